# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes what runs leave behind."""

import json
import pathlib
from collections.abc import Sequence

import pytest


def log_line(step: int, **fields: object) -> dict:
  """Returns a line as training logs it."""
  return {
    "step": step,
    "loss": 8.0 - step / 100,
    "grad_norm": 1.0 + step / 1000,
    "learning_rate": 0.01,
    "global_batch_tokens": 64,
    "tokens_per_sec": 8000.25 + step,
    "mfu": 0.5,
    "data_wait_secs": 0.001,
    "num_pods": 1,
    **fields,
  }


@pytest.fixture
def write_run(tmp_path):
  """Returns a function that writes a MODEL_DIR and returns it."""

  def write(
    name: str,
    lines: list[dict],
    *,
    config: str = "",
    samples: list[dict] | None = None,
    manifest: dict | None = None,
    evaluations: Sequence[dict] = (),
  ) -> pathlib.Path:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", lines)
    if config:
      (folder / "config.gin").write_text(config)
    if samples is not None:
      write_lines(folder / "samples.jsonl", samples)
    if manifest is not None:
      checkpoint = folder / "checkpoints" / "step_00000020"
      checkpoint.mkdir(parents=True)
      (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    for each in evaluations:
      file = folder / "eval" / f"step_{each['step']:08d}" / "quiz-test.json"
      file.parent.mkdir(parents=True)
      file.write_text(json.dumps(each))
    return folder

  return write


def write_lines(path: pathlib.Path, lines: list[dict]) -> None:
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
