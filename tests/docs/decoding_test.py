# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import io
import json
import sys

import pytest

from palm_mtf.cli.main import main
from tests import processes
from tests.doc_pages import Page

PAGE = Page("docs/decoding.md")


@pytest.fixture
def printed(quickstart, capsys):
  def run(words):
    capsys.readouterr()
    assert main(words[1:]) == 0, words
    return capsys.readouterr().out

  return run


@pytest.mark.slow
@PAGE.shows("palm_mtf generate --model_dir runs/quickstart\n")
def test_texts_are_continued_as_the_page_says(
  block, printed, quickstart, monkeypatch
):
  interactive, sampled, several, beams = block.commands
  terminal = io.StringIO("one\n\n")
  terminal.isatty = lambda: True
  monkeypatch.setattr("sys.stdin", terminal)
  assert printed(interactive).startswith("--- 'one'\none")
  assert printed(sampled).startswith("--- 'def main('\ndef main(")
  records = [json.loads(line) for line in printed(several).splitlines()]
  assert [(x["prompt"], x["sample"]) for x in records] == [
    ("class", number) for number in range(4)
  ]
  assert all(x["num_tokens"] <= 100 for x in records)
  assert printed(beams).startswith("--- 'class'\nclass")


@PAGE.shows(".venv/bin/python -m tools.bench quantized_loss")
def test_the_loss_of_quantized_weights_is_measured(
  block, quickstart, monkeypatch, capsys
):
  from tools.bench.command import main as run_bench

  command, *_ = block.commands
  assert command[1:3] == ["-m", "tools.bench"]
  monkeypatch.setattr(sys, "argv", command[2:])
  assert run_bench() == 0
  lines = capsys.readouterr().out.splitlines()
  assert [x.split()[0] for x in lines[-3:]] == ["activation", "int8", "int4"]


def _bench(command, *flags):
  few = ["--json", "--rounds=1", "--bits=8", "--size=4.8M", *flags]
  done = processes.python(*command[1:], *few, cwd=processes.ROOT)
  assert done.returncode == 0, done.stderr
  return [json.loads(line)["program"] for line in done.stdout.splitlines()]


@pytest.mark.slow
@PAGE.shows(".venv/bin/python -m tools.bench quantized_loss")
def test_speed_is_measured_for_both_attentions(block):
  _, _, command, _ = block.commands
  assert _bench(command) == ["multi_query", "multi_head"]


@pytest.mark.peers
@PAGE.shows(".venv/bin/python -m tools.bench quantized_loss")
def test_speed_is_compared_with_other_programs(block):
  pytest.importorskip("llama_cpp", reason="llama-cpp-python is absent")
  pytest.importorskip("onnxruntime", reason="onnxruntime is absent")
  _, command, _, k_quants = block.commands
  assert command[-2:] == k_quants[-2:] == ["--peer_python", "PATH"]
  found = _bench([*command[:-1], sys.executable])
  assert set(found) == {"ours", "llama_cpp", "onnx"}
  found = _bench([*k_quants[:-1], sys.executable], "--bits=q4_k", "--size=125M")
  assert set(found) == {"ours", "llama_cpp"}


@pytest.mark.slow
@PAGE.shows("palm_mtf export --model_dir runs/quickstart")
def test_kernels_are_rounded_with_calibration(block, printed):
  *_, compared = map(printed, block.commands)
  assert "kl divergence" in compared


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
