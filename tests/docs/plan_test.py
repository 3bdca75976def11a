# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests/pages_test.py does not compare."""

import json
import re
import shlex

import pytest

from palm_mtf.cli.main import main
from tests import processes
from tests.doc_pages import Page

PAGE = Page("docs/plan.md")


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
  """Runs a command in an empty folder; returns what it prints."""
  monkeypatch.chdir(tmp_path)

  def run(command):
    assert main(command[1:]) == 0
    return capsys.readouterr().out

  return run


@PAGE.shows("palm_mtf plan --gin_file=recipes/palm_540b_two_pods.gin\n")
def test_json_has_the_numbers_as_one_object(block, printed):
  _, command = block.commands  # pages_test.py has the first one
  assert json.loads(printed(command))


@pytest.mark.slow
@PAGE.shows("palm_mtf plan --gin_file=recipes/palm_540b_two_pods.gin --search")
def test_the_layout_that_a_search_writes_trains_after_the_recipe(
  block, printed, tmp_path
):
  _, command = block.commands
  printed(command)
  (train,) = re.findall(r"`(palm_mtf train [^`]*best\.gin)`", PAGE.text)
  (recipe,) = (x for x in command if x.startswith("--gin_file="))
  train = shlex.split(train.replace("--gin_file=RECIPE", recipe))
  own = [f"--gin.{x}='x'" for x in ("MODEL_DIR", "TEXT_FILES", "VOCABULARY")]
  config = printed([*train, *own, "--print_config"])
  (found,) = re.findall(
    r"^LAYOUT = '(.*)'$", (tmp_path / "best.gin").read_text(), re.M
  )
  assert re.search(rf'^LAYOUT = "{found}" +# best.gin', config, re.M)


@PAGE.shows("palm_mtf plan --gin_file=recipes/palm_62b_two_pods.gin")
def test_a_price_of_the_users_makes_a_cost(block, printed):
  (command,) = block.commands
  with_price = printed(command)
  assert "cost" in with_price
  assert "cost" not in printed([x for x in command if "COST" not in x])


@pytest.mark.slow
@PAGE.shows("palm_mtf plan --calibrate")
def test_a_machine_that_was_measured_is_planned_for(
  block, printed, tmp_path, monkeypatch
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  measure, plan = block.commands
  # In a separate process, because the probes take more than a gigabyte.
  measured = processes.python("-m", "palm_mtf", *measure[1:], cwd=tmp_path)
  assert measured.returncode == 0, measured.stderr
  (rates,) = (tmp_path / "palm_mtf" / "hardware").iterdir()
  assert "CHIP_PASS_BANDWIDTHS" in rates.read_text()
  assert "tokens/s" in printed(plan)


# By pages_test.py, and compile_test.py and described_gpus_test.py of
# accelerators/.
COMPARED = [
  "pip install 'palm_mtf[compile]'",
  "compiled for v4-12x16x16",
  "pip install 'palm_mtf[compile_gpu]'",
  "compiled for 64 h100_sxm",
  "palm_mtf plan --gin_file=recipes/palm_540b_two_pods.gin --curves",
  "palm_mtf plan --table3",
  "memory per device",
  "layouts of 6,144 devices",
  "CHIP_DCN_BANDWIDTH",
  "model                        chips",
]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(*COMPARED)
