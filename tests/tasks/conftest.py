# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts and the small vocabulary of the tests of palm_mtf.data, for tasks."""

import tempfile
from pathlib import Path

import pytest

from tests.data.conftest import code, folder, vocabulary

__all__ = ["code", "folder", "vocabulary"]


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """Where tempfile makes files: a folder that pytest removes.

  TFDS makes an empty folder for each builder of a dataset that is not prepared
  yet (DatasetInfo.initialize_from_bucket), and leaves it.
  """
  path = tmp_path / "temporary"
  path.mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(path))
  return path
