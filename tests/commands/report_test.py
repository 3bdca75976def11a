# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf report`: the path of the page, and errors in one line."""

import importlib.util

import pytest

from palm_mtf.cli.main import main


@pytest.fixture
def folders(write_run):
  # JSON can hold half of a surrogate pair, UTF-8 cannot.
  sample = {"step": 1, "prompt": "half ", "continuation": "\ud800"}
  files = {"samples.jsonl": [sample]}
  lines = [{"step": 1, "loss": 2.0}]  # one figure, because drawing takes long
  return [str(write_run(name, lines, files)) for name in ("one", "two")]


def test_the_page_is_in_the_first_model_dir_or_where_it_is_asked_for(
  folders, tmp_path, capsys
):
  assert main(["report", *folders]) == 0
  assert capsys.readouterr().out == f"{folders[0]}/report.html\n"
  page = (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
  assert "two" in page and "<b>half </b>&#55296;" in page
  other = tmp_path / "new" / "page.html"
  assert main(["report", *folders, f"--output={other}"]) == 0
  assert other.read_text(encoding="utf-8") == page


def test_what_cannot_work_is_one_line(folders, tmp_path, fails, monkeypatch):
  assert fails("report", *folders, f"--output={tmp_path}") == (
    f"--output = '{tmp_path}': is a folder; name a file in it, such as "
    f"'{tmp_path}/report.html'."
  )
  assert "MODEL_DIR" in fails("report")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  line = fails("report", *folders)
  assert "-m pip install 'matplotlib>=3.10,<4'" in line
