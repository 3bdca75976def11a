# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import re
import shutil
import sys

import pytest

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load
from palm_mtf.cli.main import main
from palm_mtf.config import DataConfig, FilterConfig
from palm_mtf.data.sources.conversation import read_fields
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.generation.inference.scorer import Example, make_scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from tests import runs
from tests.doc_pages import Page
from tests.seqio_testing import registries_restored
from tests.source_files import ROOT

PAGE = Page("docs/data.md")
SIZES = [f"--gin.{name}={value!r}" for name, value in runs.SETTINGS.items()]


@pytest.fixture
def here(finished, tmp_path, monkeypatch):
  """The current folder: texts of the page's names, and its run."""
  monkeypatch.chdir(tmp_path)
  shutil.copytree(finished, tmp_path / "runs" / "first")
  (tmp_path / "texts").mkdir()
  lines = []
  for i in range(200):
    words = [runs.WORDS[(i + j) % 10] for j in range(50)]
    text = f"{i}: {' '.join(words)}"
    lines.append(json.dumps({"text": text, "score": i / 100}))
  lines += [*lines[-5:], '{"text": "red birds", "score": 1}']
  file = tmp_path / "texts" / "birds.jsonl.gz"
  file.write_bytes(gzip.compress("\n".join(lines).encode()))
  return tmp_path


@PAGE.shows("palm_mtf vocab --input")
def test_text_becomes_a_vocabulary_tokens_and_batches(block, here, capsys):
  vocab, cache, inspect = block.commands
  vocab[vocab.index("32000")] = "320"  # of little text
  assert main(vocab[1:]) == 0
  assert main([*cache[1:], *SIZES]) == 0
  assert [*(here / "cache").rglob("manifest.json")]
  capsys.readouterr()
  texts = "--gin.TEXT_FILES='texts/*.gz'"  # not all of Python's library
  assert main([*inspect[1:], *SIZES, texts]) == 0
  assert capsys.readouterr().out


@PAGE.shows("palm_mtf data cache")
def test_filters_remove_what_the_table_says(block, here, capsys):
  (command,) = block.commands
  assert main([*command[1:], *SIZES, "--json"]) == 0
  (counts,) = map(json.loads, capsys.readouterr().out.splitlines())
  names = ("low_quality", "too_short", "exact_duplicates")
  assert [counts[f"removed_{name}"] for name in names] == [50, 1, 5]


@PAGE.shows("# mine.gin")
def test_a_mixture_of_the_users_module_is_the_text(block, here, monkeypatch):
  monkeypatch.syspath_prepend(here)
  monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
  (here / "mine.gin").write_text(block.text)
  lines = [f"{i} {' '.join(runs.WORDS)}\n" for i in range(200)]
  (here / "lines.txt").write_text("".join(lines))
  (here / "my_tasks.py").write_text("""
import functools
import seqio

seqio.TaskRegistry.add(
  "my_task",
  source=seqio.TextLineDataSource({"train": "lines.txt"}),
  preprocessors=[
    lambda lines: lines.map(lambda line: {"targets": line}),
    seqio.preprocessors.tokenize,
  ],
  output_features={
    "targets": seqio.Feature(seqio.SentencePieceVocabulary("none.model"))
  },
)
seqio.MixtureRegistry.add("my_mixture", ["my_task"], default_rate=1)
""")
  flags = ["--gin_file=mine.gin", "--gin.MODEL_DIR='runs/mine'"]
  with registries_restored():
    assert main(["data", "cache", *flags, *SIZES]) == 0


@pytest.mark.peers  # because jinja2 renders the template
@PAGE.shows('{"messages"')
def test_validation_loss_is_that_of_answers_alone(block, here, capsys):
  """The scorer encodes and scores each answer by itself."""
  template = ROOT / "examples" / "instructions" / "chat_template.jinja"
  shutil.copy(template, here / "runs" / "first")
  lines = []
  for i in range(60):
    chat = json.loads(block.text)
    for message, word in zip(
      chat["messages"], runs.WORDS[i % 9 :], strict=False
    ):
      message["content"] = f"{word} {i % 7}"
    lines.append(json.dumps(chat))
  (here / "chats.jsonl").write_text("\n".join(lines))
  macros = {
    **dict(MODEL_DIR="runs/chat", INIT_CHECKPOINT="runs/first"),
    "VOCABULARY": "runs/first/vocabulary.model",
    **dict(TEXT_FILES="chats.jsonl", PACKING="packed", PROMPTS=[]),
    **dict(TRAIN_STEPS=2, EVAL_STEPS=2, GLOBAL_BATCH_SIZE=1, EVAL_BATCHES=99),
  }
  flags = [f"--gin.{name}={value!r}" for name, value in macros.items()]
  first = "--gin_file=runs/first/config.gin"
  assert main(["train", first, *flags]) == 0
  (loss,) = (
    x["validation_loss"]
    for x in runs.read_metrics(here / "runs" / "chat")
    if "validation_loss" in x
  )
  _, config = load("evaluate", ["runs/chat/config.gin"]).build()
  checkpoint, vocabulary = open_newest("runs/chat", config)
  (source,) = open_sources(config.data)
  examples = []
  for split, document in source.documents():
    if split == "validation":
      question, answer = (x["content"] for x in document.conversation.messages)
      given = vocabulary.encode(f"Q: {question}\nA:")
      ids = vocabulary.encode(f"Q: {question}\nA: {answer}")
      examples.append(Example(given, [*ids[len(given) :], vocabulary.eod_id]))
  with LoadedDecoder.of_run(checkpoint, config) as loaded:
    scores = make_scorer(loaded, config, vocabulary).log_likelihoods(examples)
    total = -sum(value for _, value in scores)
  num_tokens = sum(len(targets) for _, targets in examples)
  assert len(examples) > 5
  assert loss == pytest.approx(total / num_tokens, rel=1e-5)
  capsys.readouterr()
  inspect = ["data", "inspect", "--gin_file=runs/chat/config.gin"]
  assert main([*inspect, "--gin.INSPECT_STEPS=[0]"]) == 0
  shown = capsys.readouterr().out
  found = re.findall(r"^: Q: (.*)\n: A:\n\|  (.*)\n\[eod\]$", shown, re.M)
  assert found and shown.count("[eod]") == len(found)


@PAGE.shows('{"prompt"')
def test_pairs_have_the_forms_of_the_page(block):
  plain, chat = (
    read_fields(json.loads(x), "here") for x in block.text.splitlines()
  )
  assert (plain.texts, plain.form) == (["2 + 2 =", " 4", " 5"], "plain pairs")
  assert (chat.texts, chat.form) == (["Hi", "Hello!", "What?"], "pairs")


@PAGE.shows("palm_mtf train")
def test_preferences_are_learned(block, here):
  (here / "runs" / "first").rename(here / "runs" / "quickstart")
  pairs = [
    {"prompt": f"{i} +", "chosen": f"{word}", "rejected": f"{i}"}
    for i, word in enumerate(runs.WORDS * 8)
  ]
  (here / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
  (command,) = block.commands
  sizes = {**runs.SETTINGS, "TRAIN_STEPS": 2, "EVAL_STEPS": 2, "PROMPTS": []}
  flags = [f"--gin.{name}={value!r}" for name, value in sizes.items()]
  assert main([*command[1:], *flags]) == 0
  metrics = runs.read_metrics(here / "runs" / "preferred")
  assert metrics[0]["loss"] < 0.7 and "rewards/margins" in metrics[0]


@PAGE.shows("texts/documents/2020/x.jsonl.gz")
def test_attributes_have_the_form_of_the_page(block, here):
  for line in block.text.splitlines():
    name, content = line.split(maxsplit=1)
    (here / name).parent.mkdir(parents=True)
    (here / name).write_bytes(gzip.compress(content.encode()))
  for limit, expected in ((0.5, [False]), (0.95, [True])):
    filters = FilterConfig(attribute_filters=[f"mine/hq >= {limit}"])
    data = DataConfig(
      text_files="texts/documents/**/*.gz",
      vocabulary=None,
      validation_share=0.5,
      filters=filters,
    )
    (source,) = open_sources(data)
    assert [x.is_excluded for _, x in source.documents()] == expected


@PAGE.shows("palm_mtf data report")
def test_a_report_makes_the_batches_again(block, here, capsys):
  report, compare = block.commands
  assert main(report[1:]) == 0
  printed = capsys.readouterr().out
  (here / "data.json").write_text(printed)
  assert main(compare[1:]) == 0
  (here / "again.gin").write_text(json.loads(printed)["gin"])
  made = ["--gin_file=again.gin", "--gin.MODEL_DIR='runs/again'"]
  again = [*made, *compare[4:]]
  assert main(["data", "report", *again]) == 0
  (here / "data.json").write_text(
    printed.replace('"blake2b": "', '"blake2b": "0', 1)
  )
  assert main(["data", "report", *again]) == 1


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
