# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The run that pages name, made of one that all tests share."""

import re
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def quickstart(
  finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
  """runs/quickstart below the current folder, with rows of 256 tokens."""
  monkeypatch.chdir(tmp_path)
  model_dir = tmp_path / "runs" / "quickstart"
  shutil.copytree(finished, model_dir)
  config = model_dir / "config.gin"
  text, count = re.subn(
    r"(?m)^SEQUENCE_LENGTH = \d+", "SEQUENCE_LENGTH = 256", config.read_text()
  )
  assert count == 1
  config.write_text(text)
  return model_dir
