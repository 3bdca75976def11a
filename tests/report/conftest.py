# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes MODEL_DIRs like training does."""

import json
from pathlib import Path

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


def write_model_dir(
  folder: Path, lines: list[dict], files: dict | None = None
) -> Path:
  """Writes a MODEL_DIR and returns it.

  A file is a text, or a list of records of JSON lines.
  """
  for path, content in {"metrics.jsonl": lines, **(files or {})}.items():
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, str):
      content = "".join(json.dumps(line) + "\n" for line in content)
    file.write_text(content)
  return folder


@pytest.fixture
def write_run(tmp_path):
  """Returns `write_model_dir` for a name below tmp_path."""
  return lambda name, *content: write_model_dir(tmp_path / name, *content)
