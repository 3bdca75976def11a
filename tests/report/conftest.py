# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes MODEL_DIRs like training does."""

import json

import pytest


def log_line(step: int, **fields: object) -> dict:
  """Returns a line like training logs it."""
  return {
    "step": step,
    "loss": 8.0 - step / 100,
    "grad_norm": 1.0 + step / 1000,
    "learning_rate": 0.01,
    "tokens": 64 * step,
    "global_batch_tokens": 64,
    "tokens_per_sec": 8000.25 + step,
    "mfu": 0.5,
    "step_secs": 0.008,
    "num_pods": 1,
    **fields,
  }


@pytest.fixture
def write_run(tmp_path):
  """Returns a function that writes a MODEL_DIR and returns it.

  A file is a text, or a list of records of JSON lines.
  """

  def write(name: str, lines: list[dict], files: dict | None = None):
    for path, content in {"metrics.jsonl": lines, **(files or {})}.items():
      file = tmp_path / name / path
      file.parent.mkdir(parents=True, exist_ok=True)
      if not isinstance(content, str):
        content = "".join(json.dumps(line) + "\n" for line in content)
      file.write_text(content)
    return tmp_path / name

  return write
