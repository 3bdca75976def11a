# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""samples.jsonl of a MODEL_DIR: how PROMPTS were continued, and when.

One JSON object a line: step, prompt, continuation.
"""

import json
import os
from collections.abc import Sequence

from palm_mtf.disk import write_atomically

_FILE = "samples.jsonl"


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
  path = os.path.join(model_dir, _FILE)
  new = [
    json.dumps({"step": step, "prompt": prompt, "continuation": text}) + "\n"
    for prompt, text in zip(prompts, texts, strict=True)
  ]
  kept = [x for x in _read(path) if json.loads(x)["step"] < step]
  write_atomically(path, "".join([*kept, *new]).encode())


def _read(path: str) -> list[str]:
  """Returns the lines of a file, none where there is no file."""
  if not os.path.exists(path):
    return []
  with open(path, encoding="utf-8") as file:
    return file.readlines()
