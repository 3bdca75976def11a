# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""README.md; tests/docs_test.py and tests/pages_test.py have the rest of it."""

import json
import re
import shlex
import subprocess

from palm_mtf.cli.main import main
from tests import runs
from tests.doc_pages import Page
from tests.source_files import ROOT

PAGE = Page("README.md")
# Text for tasks about brackets and names.
TEXT = ROOT / "palm_mtf" / "data" / "**" / "*.py"


def _shape(line):
  """Returns a line without time, numbers, and names of this machine."""
  line = line.partition("palm_mtf: ")[2] or line
  line = re.sub(r" \((no )?native bfloat16: .*\)|text_files-\w+", "", line)
  return " ".join(re.sub(r"\d[\d,.]*", "#", line).split())


@PAGE.shows("make quickstart")
def test_the_quickstart_prints_lines_as_shown(
  block, tmp_path, monkeypatch, capsys
):
  """Runs what make runs, with small sizes and little text."""
  (make,) = block.commands
  printed = subprocess.run(
    [*make, "--dry-run", "BIN=bin"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout.replace("\\\n", " ")
  train, evaluate = (
    shlex.split(line)[1:]
    for line in printed.splitlines()
    if line.startswith("bin/palm_mtf ")
  )
  monkeypatch.chdir(tmp_path)
  own = {"VOCAB_SIZE": 400, "SEQUENCE_LENGTH": 256, "PROMPTS": ["class Test"]}
  settings = {**runs.SETTINGS, **own, "TEXT_FILES": str(TEXT)}
  sizes = [f"--gin.{name}={value!r}" for name, value in settings.items()]
  assert main([*train, *sizes]) == 0
  few = "--gin.corpus.questions.num_questions=6"
  assert main([*evaluate, few]) == 0
  found = {
    _shape(line) for text in capsys.readouterr() for line in text.splitlines()
  }
  shown = PAGE.blocks[1].text.splitlines()
  assert PAGE.blocks[0] == block
  for line in shown[: shown.index("--- 'class Test' continues:") + 1]:
    if line.startswith("learned "):  # nothing, in 12 steps
      assert "learned nothing from context yet; train longer" in found
    else:
      assert line == " ..." or _shape(line) in found, line
  head, *rows = shown[shown.index(" ...", 8) + 1 : -1]
  assert _shape(head) in found
  names = {tuple(x.split()[1:2] + x.split()[4:5]) for x in rows}
  assert names <= {tuple(x.split()[1:2] + x.split()[4:5]) for x in found}


@PAGE.shows("palm_mtf evaluate --gin_file=runs/quickstart/config.gin")
def test_a_run_is_evaluated_and_continues_texts(block, quickstart, capsys):
  evaluate, generate = block.commands
  assert main(evaluate[1:]) == 0
  assert json.loads(capsys.readouterr().out)["validation_loss"] > 0
  assert main(generate[1:]) == 0
  texts = capsys.readouterr().out
  assert "--- 'def main('\ndef main(" in texts and "--- 'class'\nclass" in texts


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    "2026-11-22",  # above
    ".venv/bin/palm_mtf train",  # docs_test.py
    "palm_mtf/\n",  # pages_test.py
  )
