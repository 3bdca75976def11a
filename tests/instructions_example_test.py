# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The files and commands of examples/instructions fit together."""

import importlib.util
import json
import shutil
import sys
from importlib import metadata

import pytest

from palm_mtf.cli.main import main
from palm_mtf.data.sources.conversation import read_conversation, read_fields
from palm_mtf.data.sources.seqio_task import split_at_tokenize
from palm_mtf.data.vocabulary.answers import ConversationEncoder
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from tests.doc_pages import Page
from tests.seqio_testing import registries_restored
from tests.source_files import ROOT

FOLDER = ROOT / "examples" / "instructions"
PAGE = Page("examples/instructions/README.md")
CORPUS = "categories: [a]\nconversations:\n" + "".join(
  f"- - What is {i}?\n  - It is {i % 7}.\n  - And {i} + 1?\n" for i in range(80)
)


@pytest.fixture
def here(tmp_path, monkeypatch):
  """A folder with the files of the example and the dialogues of a package."""
  pytest.importorskip("yaml", reason="only chatterbot-corpus needs PyYAML")
  shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
  monkeypatch.chdir(tmp_path)
  corpus = tmp_path / "chatterbot_corpus" / "data" / "english" / "a.yml"
  corpus.parent.mkdir(parents=True)
  corpus.write_text(CORPUS)
  path = metadata.PackagePath("chatterbot_corpus/data/english/a.yml")
  path.dist = metadata.PathDistribution(tmp_path / "none.dist-info")
  monkeypatch.setattr(metadata, "files", lambda name: [path])
  spec = importlib.util.spec_from_file_location("made", "make_dialogues.py")
  made = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(made)
  made.main(tmp_path / "dialogues")
  return tmp_path


def read_lines(here, name):
  text = (here / "dialogues" / f"{name}.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_held_out_questions_are_not_trained_on(here):
  train, held_out = read_lines(here, "train"), read_lines(here, "held_out")
  asked = [x["messages"][0]["content"] for x in train]
  tested = [x["inputs"] for x in held_out]
  assert 40 < len(asked) < 80 and 0 < len(tested) < 20
  assert not {f"Q: {x}\nA:" for x in asked} & {*tested}
  for line in train:
    read_conversation(line["messages"], "here")
    assert len(line["messages"]) == 2  # the last question has no answer


@pytest.mark.peers  # because jinja2 renders the template
def test_questions_of_the_task_are_prompts_of_the_template(here):
  path = str(here / "dialogues" / "vocabulary.model")
  train_vocabulary([CORPUS], 320, path=path)
  shutil.copy("chat_template.jinja", "dialogues")
  vocabulary = open_vocabulary(path)
  encoder = ConversationEncoder(vocabulary, 0)
  for line in read_lines(here, "held_out"):
    question = line["inputs"].removeprefix("Q: ").removesuffix("\nA:")
    asked = {"role": "user", "content": question}
    answer = {"role": "assistant", "content": line["targets"].strip()}
    twice = read_conversation([asked, answer, asked, answer], "here")
    tokens, spans = encoder.encode(twice)
    prompt = vocabulary.encode(line["inputs"])
    whole = [*vocabulary.encode(line["inputs"] + line["targets"]), 1]
    assert tokens.tolist() == [0, *whole, *whole][:-1]
    assert spans[0].tolist() == [1 + len(prompt), 1 + len(whole)]


@PAGE.shows("pip install")
def test_commands_have_a_valid_configuration(block, here):
  train = [x for x in block.commands if x[:2] == ["palm_mtf", "train"]]
  assert len(train) == 2
  for command in train:
    assert main([*command[1:], "--print_config"]) == 0


@PAGE.shows("palm_mtf score")
def test_the_task_asks_the_questions_of_both_splits(block, here, monkeypatch):
  import seqio

  monkeypatch.syspath_prepend(here)
  run = ["--gin_file=dialogues.gin", "--gin.MODEL_DIR='runs/dialogues'"]
  with registries_restored():
    for _, evaluate, *flags in block.commands[1:]:
      (given,) = [i for i, x in enumerate(flags) if x == "runs/dialogues"]
      more = flags[given + 1 :]
      assert main([evaluate, *run, *more, "--print_config"]) == 0
    monkeypatch.delitem(sys.modules, "dialogue_answers", raising=False)
    importlib.import_module("dialogue_answers")
    task = seqio.get_mixture_or_task("dialogue_answers")
    sizes = {
      split: len(list(task.source.get_dataset(split)))
      for split in ("validation", "train")
    }
    choices = seqio.get_mixture_or_task("dialogue_choices")
    (rows,), _ = split_at_tokenize(choices)
    asked = rows(choices.source.get_dataset("validation"))
    options = [bool(x["is_correct"]) for x in asked.as_numpy_iterator()]
  assert options == [True, False, False, False] * sizes["validation"]
  held_out = {x["inputs"] for x in read_lines(here, "held_out")}
  assert sizes["validation"] == len(held_out)
  assert len(held_out) <= sizes["train"] < 3 * len(held_out)


@PAGE.shows("palm_mtf train --gin_file=recipes/quickstart.gin --gin_file=p")
def test_pairs_are_of_training_questions_and_the_command_reads_them(
  block, here
):
  train, evaluate, _ = block.commands
  assert main([*train[1:], "--print_config"]) == 0
  assert evaluate[2:] == [
    *("--model_dir", "runs/preferred", "--gin_file=answers.gin")
  ]
  chats = [x["messages"] for x in read_lines(here, "train")]
  asked = {(f"Q: {x[0]['content']}\nA:", f" {x[1]['content']}") for x in chats}
  pairs = read_lines(here, "pairs")
  assert {(x["prompt"], x["chosen"]) for x in pairs} == asked
  for pair in pairs:
    found = read_fields(pair, "here")
    assert found.form == "plain pairs"
    assert (pair["prompt"], pair["rejected"]) not in asked


@PAGE.shows("awk")
def test_a_pretrained_model_has_a_valid_configuration(block, here):
  """tests/smollm2_example_test.py imports it."""
  run = here / "runs" / "smollm2"
  run.mkdir(parents=True)
  files = "recipes/finetune.gin", "models/smollm2_135m.gin"
  lines = "".join(f"include '{x}'\n" for x in files)
  (run / "config.gin").write_text(lines)
  pick, train, evaluate = block.commands
  assert pick[-1] == "dialogues/some_pairs.jsonl"
  assert main([*train[1:], "--print_config"]) == 0
  assert '--gin.TEXT_FILES="dialogues/some_pairs.jsonl"' in train
  assert '--gin.MODEL_DIR="runs/smollm2_preferred"' in train
  assert evaluate[:4] == [
    *("palm_mtf", "evaluate", "--model_dir", "runs/smollm2_preferred")
  ]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
