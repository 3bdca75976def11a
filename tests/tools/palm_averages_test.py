# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import sys

import pytest

pytest.importorskip("seqio", reason="SeqIO is not installed")

from tests.tasks.averages_test import PUBLISHED
from tools import palm_averages


@pytest.fixture
def folder(tmp_path, monkeypatch):
  for task, metrics in PUBLISHED.items():
    content = {"task": f"{task}_1_shot", "split": "validation"}
    path = tmp_path / f"{task}_1_shot-validation.json"
    path.write_text(json.dumps({**content, "metrics": metrics}))
  monkeypatch.setattr(sys, "argv", ["palm_averages", str(tmp_path)])
  return tmp_path


def test_the_papers_averages_are_printed_of_kept_results(folder, capsys):
  assert palm_averages.main() == 0
  assert capsys.readouterr().out == "Avg NLG  63.9\nAvg NLU  74.7\n"


def test_a_task_that_is_missing_is_named(folder, capsys):
  (folder / "copa_1_shot-validation.json").unlink()
  assert palm_averages.main() == 2
  assert "copa accuracy missing" in capsys.readouterr().err
