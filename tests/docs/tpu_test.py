# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import pytest

from palm_mtf.cli.main import main
from tests.doc_pages import Page

PAGE = Page("docs/tpu.md")
(GENERATE,) = (
  command[2:]
  for block in PAGE.blocks
  for command in block.commands
  if command[2:3] == ["generate"]
)


@pytest.mark.slow
@PAGE.shows("JAX_PLATFORMS=cpu .venv/bin/palm_mtf train")
def test_rehearsals_run_as_the_page_says(block, tmp_path, monkeypatch, capsys):
  ((variable, _, *arguments),) = block.commands
  monkeypatch.setenv(*variable.split("="))
  model_dir = f"--gin.MODEL_DIR={str(tmp_path / 'run')!r}"
  own = [model_dir if "MODEL_DIR" in x else x for x in arguments]
  assert main([*own, "--gin.TRAIN_STEPS=2"]) == 0
  capsys.readouterr()
  own = [x.replace("runs/rehearsal", str(tmp_path / "run")) for x in GENERATE]
  assert main(own) == 0
  assert "--- 'def main('" in capsys.readouterr().out


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    "make tpu",  # needs a TPU; flags: docs_test.py
    "JAX_PLATFORMS=cpu .venv/bin/palm_mtf generate",  # the rehearsals' test
  )
