# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of docs/evaluation.md on lm-evaluation-harness."""

import json
import re
import sys

import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.lm_eval import __main__ as command
from palm_mtf.lm_eval.requests import generation
from palm_mtf.lm_eval.run import Run
from tests import processes
from tests.doc_pages import Page

PAGE = Page("docs/evaluation.md")
BLOCK = PAGE.shows("pip install 'palm_mtf[lm_eval]'")


@BLOCK
def test_where_the_harness_is_absent_the_command_says_how_to_install_it(
  block, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  assert command.main() == 2
  install, *_ = block.text.splitlines()
  assert capsys.readouterr().err.rstrip().endswith(install)


@pytest.mark.peers
@BLOCK
def test_the_command_measures_a_task(block, quickstart):
  """A local task stands for those that the harness downloads."""
  pytest.importorskip("lm_eval", reason="lm-evaluation-harness is absent")
  folder = quickstart.parents[1]
  (folder / "data.jsonl").write_text('{"text": "one two three"}\n')
  task = {
    "task": "counting",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
  }
  (folder / "counting.yaml").write_text(json.dumps(task))
  _, (python, *words) = block.commands
  assert (python, words[-2]) == ("python", "--tasks")
  done = processes.python(
    *(*words[:-1], "counting", "--include_path", str(folder)),
    variables={"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    cwd=folder,
  )
  assert done.returncode == 0, done.stderr
  assert "bits_per_byte" in done.stdout


def test_model_args_are_macros_over_those_of_the_run(quickstart):
  shown = re.search(r"Other `model_args` are macros(.*?);", PAGE.text, re.S)[1]
  macros = dict(x.split("=") for x in re.findall(r"`(\w+=\w+)`", shown))
  assert macros == {"STRIDE": "64", "WEIGHT_DTYPE": "int8"}
  # The harness reads numbers as such.
  run = Run(str(quickstart), {**macros, "STRIDE": 64}, False)
  (text,) = dict(run.continuations([("one", {"max_gen_toks": 3})])).values()
  assert isinstance(text, str)


def test_the_keywords_of_generation_that_the_table_names_are_followed():
  row = re.search(r"^\| `generate_until` \|.*", PAGE.text, re.M)[0]
  names = re.findall(r"`(do_sample|temperature|top_k|top_p|until)`", row)
  assert len(names) == 5
  values = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9}
  asked = generation({**values, "until": "x"}, DecodeConfig(), 512).decode
  assert (asked.temperature, asked.top_k, asked.top_p) == (0.5, 3, 0.9)
  assert asked.stop_strings == ("x",)
