# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of SeqIO tasks, which are skipped without SeqIO."""

import pytest


@pytest.fixture
def lines(tmp_path):
  """Returns a file of TEXTS, one per line."""
  from tests.seqio_testing import TEXTS

  path = tmp_path / "lines.txt"
  path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
  return path
