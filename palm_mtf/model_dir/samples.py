# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of a run: samples.jsonl, a line for each step and prompt."""

from collections.abc import Sequence

from palm_mtf.model_dir.json_lines import read_json_lines, write_json_lines
from palm_mtf.model_dir.paths import ModelDir


def write_samples(
  model_dir: str, step: int, prompts: Sequence[str], texts: Sequence[str]
) -> None:
  """Adds `texts`, which continue `prompts` at a step, to samples.jsonl."""
  if not prompts:
    return
  path = ModelDir(model_dir).samples
  # Drop samples of this and later steps, which a resumed run makes again.
  lines = read_json_lines(path, number="step")
  kept = [x for x in lines if x["step"] < step]
  new = [
    {"step": step, "prompt": prompt, "continuation": text}
    for prompt, text in zip(prompts, texts, strict=True)
  ]
  write_json_lines(path, [*kept, *new])


def has_samples(model_dir: str, step: int) -> bool:
  """Returns whether samples.jsonl has continuations after `step` steps."""
  lines = read_json_lines(ModelDir(model_dir).samples, number="step")
  return any(line["step"] == step for line in lines)
