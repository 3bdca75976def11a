# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from palm_mtf.data.filters.decision_file import (
  read_decisions,
  write_decisions,
)

DECISIONS = [
  np.array([0, 1, 4], np.uint8),
  np.zeros(0, np.uint8),
  np.array([2], np.uint8),
]


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "folder" / "removed"
  write_decisions(str(path), DECISIONS)
  return path


def test_decisions_are_read_as_they_were_written(path):
  found = read_decisions(str(path))
  assert [each.tolist() for each in found] == [[0, 1, 4], [], [2]]


def test_no_file_and_any_damaged_one_has_no_decisions(path, capsys):
  content = path.read_bytes()
  assert read_decisions(f"{path}.missing") is None
  for i in range(len(content)):
    path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
    assert read_decisions(str(path)) is None
    path.write_bytes(content[:i])
    assert read_decisions(str(path)) is None
  assert (
    "is damaged: its documents are filtered anew" in capsys.readouterr().err
  )
