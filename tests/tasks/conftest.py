# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks without settings of other tests, and the texts of tests/data."""

import tempfile
from pathlib import Path

import gin
import pytest

from tests.data.conftest import code, folder, vocabulary
from tests.seqio_testing import registries_restored

__all__ = ["code", "folder", "vocabulary"]


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """Makes tempfile use a folder that pytest removes.

  TFDS makes an empty folder for each builder of a dataset that is not prepared
  yet (DatasetInfo.initialize_from_bucket), and leaves it.
  """
  path = tmp_path / "temporary"
  path.mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(path))
  return path


@pytest.fixture(autouse=True)
def no_settings(temporary_folder):
  gin.clear_config()
  with registries_restored():
    yield
  gin.clear_config()
