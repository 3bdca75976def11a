# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""samples.jsonl of a MODEL_DIR: how PROMPTS were continued, and when.

One JSON object a line: step, prompt, continuation.
"""

from collections.abc import Sequence

from palm_mtf.model_dir.json_lines import read_json_lines, write_json_lines
from palm_mtf.model_dir.layout import ModelDir


def keep_samples(
  model_dir: str, step: int, prompts: Sequence[str], texts: Sequence[str]
) -> None:
  """Adds what `step` steps made of the prompts.

  Lines of this step and of later ones go, as in metrics.jsonl.

  Raises:
    UserError: the disk is full, or the file may not be written.
  """
  if not prompts:
    return
  path = ModelDir(model_dir).samples
  kept = [x for x in read_json_lines(path) if x["step"] < step]
  new = [
    {"step": step, "prompt": prompt, "continuation": text}
    for prompt, text in zip(prompts, texts, strict=True)
  ]
  write_json_lines(path, [*kept, *new])
