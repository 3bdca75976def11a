# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import io
import re
import shlex

import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")
pytest.importorskip("t5", reason="t5 is not installed")

import sentencepiece  # noqa: E402
import tensorflow as tf  # noqa: E402
from sentencepiece import sentencepiece_model_pb2  # noqa: E402

from palm_mtf.cli.main import main  # noqa: E402
from palm_mtf.data.vocabulary.load import open_vocabulary  # noqa: E402
from tests import processes, runs  # noqa: E402
from tests.doc_pages import Page  # noqa: E402
from tests.seqio_testing import registries_restored  # noqa: E402
from tests.source_files import ROOT  # noqa: E402

PAGE = Page("docs/t5.md")
NAMES = "sentence sentence1 sentence2 question question1 question2"
TEXTS = [*NAMES.split(), "premise", "hypothesis"]


@pytest.fixture(autouse=True)
def registries():
  # Once imported, the tasks stay registered.
  import t5.data.mixtures
  import t5.data.tasks  # noqa: F401

  with registries_restored():
    yield


def _records(split, shuffle_files=False, seed=None):
  """Records with the fields of all tasks of GLUE."""
  rows = range(40)
  fields = {x: [f"{x} {i} {' '.join(runs.WORDS)}" for i in rows] for x in TEXTS}
  labels = {"label": [i % 2 for i in rows], "idx": [*rows]}
  return tf.data.Dataset.from_tensor_slices({**fields, **labels})


SIZES = {"train": 40, "validation": 40}
SOURCE = seqio.FunctionDataSource(
  _records, splits=[*SIZES], num_input_examples=SIZES
)


@PAGE.shows("pip install 'palm_mtf[t5]'")
def test_both_commands_are_those_that_the_makefile_runs(block):
  first, second = map(shlex.split, block.text.splitlines())
  assert first == ["pip", "install", "palm_mtf[t5]"]
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  assert f"-qq {second[2]} '{second[3]}'" in makefile
  assert second[:3] == ["pip", "install", "--no-deps"]


@pytest.mark.slow
def test_the_page_has_the_numbers_of_t5s_tasks_and_mixtures():
  shown = re.search(r"tasks \((\d+)\) and mixtures \((\d+)\)", PAGE.text)
  program = """
import palm_mtf, seqio, t5.data.mixtures, t5.data.tasks
for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
  print(len(registry.names()))
"""
  done = processes.python("-W", "ignore", "-c", program)
  assert done.returncode == 0, done.stderr
  registered = [*map(int, done.stdout.split())]
  assert registered == [*map(int, shown.groups())]


@PAGE.shows("# mine.gin: GLUE as T5 has it")
def test_a_mixture_and_tasks_of_t5s_are_found_by_gin_alone(
  block, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.gin").write_text(block.text)
  flags = ["--gin_file=mine.gin", "--gin.MODEL_DIR='run'", "--print_config"]
  assert main(["train", *flags]) == 0


@pytest.mark.slow
@PAGE.shows("# mine.gin: GLUE as T5 has it")
def test_a_mixture_of_t5s_becomes_tokens_by_gin_alone(
  block, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  mixture = seqio.MixtureRegistry.get("glue_v002_proportional")
  for task in seqio.get_subtasks(mixture):
    monkeypatch.setattr(task, "_source", SOURCE)
  (tmp_path / "mine.gin").write_text(block.text)
  sizes = [f"--gin.{name}={value!r}" for name, value in runs.SETTINGS.items()]
  flags = ["--gin_file=mine.gin", "--gin.MODEL_DIR='run'", *sizes]
  assert main(["data", "cache", *flags]) == 0
  assert [*(tmp_path / "run" / "tokens").iterdir()]


@PAGE.shows("import palm_mtf  # before t5")
def test_a_task_with_a_source_of_the_users_is_registered(block):
  names = {"my_source": SOURCE}
  exec(block.text, names)
  assert seqio.TaskRegistry.get("my_cola") is names["task"]
  assert names["task"].source is SOURCE


@PAGE.shows('VOCABULARY = "sentencepiece.model"')
def test_sentinels_have_the_ids_of_the_page(block, tmp_path, monkeypatch):
  """A model of as many pieces as T5's stands for T5's."""
  monkeypatch.chdir(tmp_path)
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter([" ".join(runs.WORDS)] * 20),
    model_writer=model,
    vocab_size=40,
    hard_vocab_limit=False,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
  for i in range(32000 - len(proto.pieces)):
    proto.pieces.add(piece=f"\u2581{i}", score=-100.0 - i)
  (tmp_path / "sentencepiece.model").write_bytes(proto.SerializeToString())
  shown = dict(re.findall(r"^(\w+) = (\S+)", block.text, re.M))
  vocabulary = open_vocabulary(
    shown["VOCABULARY"].strip('"'), extra_ids=int(shown["EXTRA_IDS"])
  )
  for text, number in re.findall(
    r"(<extra_id_\d>) (?:has )?id (\d+)", block.text
  ):
    assert vocabulary.encode(text)[-1] == int(number)
  least = re.search(r"at least (\d+)", block.text)[1]
  assert vocabulary.size == int(least) <= int(shown["VOCAB_SIZE"])
  (tmp_path / "mine.gin").write_text(
    f"include 'recipes/quickstart.gin'\n{block.text}MODEL_DIR = 'run'\n"
  )
  assert main(["train", "--gin_file=mine.gin", "--print_config"]) == 0


@pytest.mark.slow
@PAGE.shows("palm_mtf train --gin_file=recipes/quickstart.gin")
def test_blanks_are_learned_inspected_and_filled(
  block, corpus, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  train, inspect, generate = block.commands
  few = {"VOCAB_SIZE": 420, "TRAIN_STEPS": 2, "EVAL_STEPS": 2, "PROMPTS": []}
  settings = {**runs.SETTINGS, **few, "TEXT_FILES": f"{corpus}/*.txt"}
  sizes = [f"--gin.{name}={value!r}" for name, value in settings.items()]
  assert main([*train[1:], *sizes]) == 0
  capsys.readouterr()
  assert main(inspect[1:]) == 0
  assert "<extra_id_0>" in capsys.readouterr().out
  assert main(generate[1:]) == 0
  assert capsys.readouterr().out.startswith("--- 'def <extra_id_0>(self):'")


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
