# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs every kind of program of a small model, in this process.

  python -m tests.lesser_cpu_commands CORPUS FOLDER DTYPE

The environment says which CPU oneDNN and XLA shall see. They read it only once,
so this script runs in a separate process. It prints exit code and stdout of
each command as one JSON object, {name: [code, stdout]}.
"""

import contextlib
import io
import json
import pathlib
import sys

from palm_mtf.cli.main import main
from tests import runs

_DECODING = {
  "generate": [],
  "generate int8": ["--gin.WEIGHT_DTYPE='int8'"],
  "generate int4": ["--gin.WEIGHT_DTYPE='int4'"],
  "generate beams": ["--gin.NUM_BEAMS=2"],
}


def run_all(
  corpus: pathlib.Path, model_dir: pathlib.Path, dtype: str
) -> dict[str, tuple[int, str]]:
  """Trains two steps, then decodes, scores and evaluates in `dtype`."""
  of_run = ["--model_dir", str(model_dir), "--json"]
  commands = {
    "train": runs.arguments(
      "train",
      corpus,
      model_dir,
      ACTIVATION_DTYPE=dtype,
      NUM_PODS=2,
      TRAIN_STEPS=2,
      EVAL_STEPS=2,
      PROMPTS=[],
    ),
    **{
      name: ["generate", *of_run, "--prompt", "one two", "--prompt", "3", *more]
      for name, more in _DECODING.items()
    },
    "score": ["score", *of_run, "--text", "one two three"],
    "evaluate": ["evaluate", *of_run],
    "evaluate the file": [
      *("evaluate", f"--gin_file={model_dir}/config.gin", "--json")
    ],
  }
  results = {}
  for name, arguments in commands.items():
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
      code = main(arguments)
    results[name] = code, stdout.getvalue()
  return results


if __name__ == "__main__":
  folders = map(pathlib.Path, sys.argv[1:3])
  print(json.dumps(run_all(*folders, sys.argv[3])))
