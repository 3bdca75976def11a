# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from palm_mtf.cli.main import main
from tests.doc_pages import Page
from tests.source_files import ROOT

PAGE = Page("docs/tpu.md")
LAYOUTS = re.search(r"as in `layouts/(.*?)the axis", PAGE.text, re.S)[1]
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


def test_the_plans_that_the_page_compares_are_those_of_today(capsys):
  recipe = ["--gin_file=recipes/palm_540b_two_pods.gin", "--gin.NUM_PODS=1"]

  def plan(batch, layers):
    sizes = [f"--gin.GLOBAL_BATCH_SIZE={batch}", f"--gin.NUM_LAYERS={layers}"]
    assert main(["plan", *recipe, *sizes]) == 0
    return capsys.readouterr().out

  def number(pattern, printed):
    return float(re.search(rf"{pattern} +([\d.]+)", printed, re.M)[1])

  plans = {layers: plan(512, layers) for layers in (4, 8, 16, 118)}
  gib = {layers: number("^fits:", x) for layers, x in plans.items()}
  gathered = number("all_gather over data", plans[8])
  scattered = number("reduce_scatter over data", plans[8])
  step = number("^  total", plan(1024, 118).partition("step of")[2])
  column = [
    f"{(gib[16] - gib[4]) / 12:.3f} GiB",
    f"{gib[118]:.1f} GiB",
    f"{gathered:.1f} GB",
    f"{scattered:.1f} GB",
    f"{step:.1f} s",
  ]
  assert re.findall(r"^\| \w.*? \| (.*?) \|", PAGE.text, re.M) == column


def test_every_recipe_that_the_page_names_is_there():
  named = re.findall(r"`(?:recipes/)?(palm_\w+\.gin)`", PAGE.text)
  assert len(named) == 3
  for name in named:
    assert (ROOT / "gin" / "recipes" / name).is_file()


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    ".venv/bin/python -m tools.bench tpu",  # flags: docs_test.py
    "              tpu          devices",
  )
