# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from palm_mtf.cli.main import main
from tests.doc_pages import Page
from tests.source_files import ROOT

PAGE = Page("docs/tpu.md")
LAYOUTS = re.search(r"as in `layouts/(.*?)The axis", PAGE.text, re.S)[1]
(GENERATE,) = (
  command[2:]
  for block in PAGE.blocks
  for command in block.commands
  if command[2:3] == ["generate"]
)
SLICES = re.findall(r"tpu_\w+", LAYOUTS)


def test_every_slice_of_gins_is_named():
  files = {x.stem for x in (ROOT / "gin" / "layouts").glob("tpu_*.gin")}
  assert {*SLICES} == files


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_is_named_by_tpu_in_gin(name, capsys):
  files = ["recipes/palm_8b.gin", f"layouts/{name}.gin"]
  own = [f"--gin.{x}='x'" for x in ("MODEL_DIR", "TEXT_FILES", "VOCABULARY")]
  flags = [f"--gin_file={file}" for file in files]
  assert main(["train", *flags, *own, "--print_config"]) == 0
  tpu = re.search(r'^TPU = "(.+?)"', capsys.readouterr().out, re.M)[1]
  rest = name.removeprefix("tpu_").replace("_", "-")
  assert tpu == rest or "palm" in name


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
