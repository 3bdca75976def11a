# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks without the settings of another test, and the texts of tests/data."""

import gin
import pytest

from tests.data.conftest import code, folder, vocabulary
from tests.seqio_testing import registries_restored

__all__ = ["code", "folder", "vocabulary"]


@pytest.fixture(autouse=True)
def no_settings():
  gin.clear_config()
  with registries_restored():
    yield
  gin.clear_config()
