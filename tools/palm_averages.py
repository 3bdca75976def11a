# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints Avg NLG and Avg NLU from a checkpoint's results on PaLM's 29 tasks.

python -m tools.palm_averages runs/mine/eval/step_00001000
"""

# `palm_mtf evaluate` writes the folder, with EVAL_TASKS =
# ["palm_english_few_shot"], or with "palm_english" and NUM_SHOTS = 1 as for the
# paper's averages.

import argparse
import json
import sys
from pathlib import Path

from palm_mtf.tasks.averages import palm_averages
from tools.bench.command import one_line_errors


def read_results(folder: Path) -> dict[str, dict[str, float]]:
  """Returns the metrics of each task with results in `folder`."""
  contents = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(folder.glob("*.json"))
  ]
  return {content["task"]: content["metrics"] for content in contents}


@one_line_errors
def main() -> None:
  """Prints the averages."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("folder", type=Path, help="MODEL_DIR/eval/step_...")
  averages = palm_averages(read_results(parser.parse_args().folder))
  for name, value in averages.items():
    print(f"{name}  {value:.1f}")


if __name__ == "__main__":
  sys.exit(main())
