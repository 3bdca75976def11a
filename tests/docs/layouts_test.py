# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import pytest

from tests import processes, runs
from tests.doc_pages import Page

PAGE = Page("docs/layouts.md")


@pytest.mark.slow
@PAGE.shows("palm_mtf train --gin_file=recipes/quickstart.gin")
def test_a_layout_changes_no_result(block, corpus, finished, tmp_path):
  (command,) = block.commands
  settings = {**runs.SETTINGS, "TEXT_FILES": f"{corpus}/*.txt"}
  sizes = [f"--gin.{name}={value!r}" for name, value in settings.items()]
  done = processes.python("-m", *command, *sizes, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  losses = [
    [x["loss"] for x in runs.read_metrics(model_dir) if "loss" in x]
    for model_dir in (finished, tmp_path / "runs" / "split")
  ]
  assert len(losses[0]) == 6
  assert losses[1] == pytest.approx(losses[0], rel=1e-3)


MEASURED = ["MB                  all_reduce", "mesh               devices"]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(*MEASURED)
