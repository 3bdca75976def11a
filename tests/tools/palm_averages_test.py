# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from tests.tasks.averages_test import PUBLISHED


@pytest.fixture
def folder(tmp_path):
  for task, metrics in PUBLISHED.items():
    content = {"task": f"{task}_1_shot", "split": "validation"}
    path = tmp_path / f"{task}_1_shot-validation.json"
    path.write_text(json.dumps({**content, "metrics": metrics}))
  return tmp_path


def test_the_papers_averages_are_printed_of_kept_results(folder, run_tool):
  code, out, _ = run_tool("palm_averages", str(folder))
  assert (code, out) == (0, "Avg NLG  63.9\nAvg NLU  74.7\n")


def test_a_task_that_is_missing_is_named(folder, run_tool):
  (folder / "copa_1_shot-validation.json").unlink()
  code, _, err = run_tool("palm_averages", str(folder))
  assert code == 2
  assert "copa accuracy missing" in err
