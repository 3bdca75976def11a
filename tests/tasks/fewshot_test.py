# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every task on records of the real schema, as JSON lines and in TFDS."""

import functools
import importlib.resources.abc
import importlib.util
import json
import os
import sys

import pytest
import seqio
import tensorflow_datasets as tfds

from palm_mtf.evaluation.few_shot import few_shot_task
from palm_mtf.tasks import fewshot
from tests.cases import needs_t5
from tests.seqio_testing import (
  bind,
  examples_of,
  scores_of,
  targets_of,
  text_of,
)
from tests.tasks.evaluation_records import EXPECTED

pytestmark = needs_t5

# PaLM's few-shot counts (6.1).
SHOTS = {
  "trivia_qa": 1, "natural_questions": 64, "web_questions": 64, "lambada": 8,
  "hellaswag": 5, "story_cloze": 5, "winograd": 5, "winogrande": 5, "drop": 1,
  "coqa": 5, "quac": 1, "squad_v2": 5, "race_middle": 8, "race_high": 5,
  "piqa": 5, "arc_easy": 5, "arc_challenge": 5, "openbookqa": 32, "boolq": 8,
  "copa": 5, "rte": 5, "wic": 5, "multirc": 5, "wsc": 5, "record": 2, "cb": 5,
  "anli_r1": 5, "anli_r2": 5, "anli_r3": 5,
}  # fmt: skip
each_task = pytest.mark.parametrize("name", EXPECTED)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Writes JSON lines of every dataset: three records that differ in fields."""
  folder = tmp_path_factory.mktemp("records")
  for dataset, record, *_ in EXPECTED.values():
    (folder / dataset).mkdir(parents=True, exist_ok=True)
    for split, numbers in (("train", (1, 2)), ("validation", (3,))):
      lines = [json.dumps({**record, "number": i}) + "\n" for i in numbers]
      (folder / dataset / f"{split}.jsonl").write_text("".join(lines))
  return folder


@pytest.fixture
def folder(written, vocabulary):
  """The folder of records, which gin names."""
  bind_places(vocabulary, folder=str(written))
  return written


def bind_places(vocabulary, normalization=None, **places):
  """Sets the folders of records, and the normalization of `piqa`."""
  bindings = {f"records__places__{k}": v for k, v in places.items()}
  if normalization:
    bindings["fewshot__normalization__piqa"] = normalization
  bind(documents__vocabulary__path=vocabulary.path, **bindings)


def whole(feature, value):
  """Returns a value with every field of its feature, and no other."""
  fields = getattr(feature, "feature", feature)
  if isinstance(fields, tfds.features.FeaturesDict):
    value = value or {}
    assert set(value) <= set(fields)
    if fields is feature:
      return {name: whole(fields[name], value.get(name)) for name in fields}
    length = max(map(len, value.values()), default=0)  # a sequence of objects
    empty = {name: [whole(fields[name], None)] * length for name in fields}
    return {**empty, **value}
  if value is not None:
    return value
  if isinstance(feature, tfds.features.Sequence):
    return []
  return "" if feature.tf_dtype.name == "string" else 0


@functools.cache
def from_lines(name):
  """Returns the examples of the records in `folder`."""
  return examples_of(name)


def test_the_29_tasks_have_the_papers_number_of_exemplars():
  assert set(fewshot.ENGLISH) == set(SHOTS)
  assert len(SHOTS) == 29
  mixture = seqio.MixtureRegistry.get("palm_english_few_shot")
  assert {task.name for task in mixture.tasks} == {
    f"{name}_{shots}_shot" for name, shots in SHOTS.items()
  }


@each_task
def test_a_record_is_asked_as_expected(name):
  _, record, inputs, options, *label = EXPECTED[name]
  made = next(iter(fewshot.TASKS[name].prompt(record)))
  assert made.inputs == inputs
  if label:
    assert (made.options, made.correct) == (options, label)
  else:
    assert made.answers == options


# One task of each way to ask, to compare options, and to score.
SOME = ("winogrande", "race_high", "boolq", "multirc", "mmlu", "coqa")


@pytest.mark.parametrize("name", SOME)
def test_each_question_of_a_record_is_an_example_and_each_option_is_one(
  name, folder
):
  questions = [*fewshot.TASKS[name].prompt(EXPECTED[name][1])]
  made = [e for e in from_lines(name) if not e.get("unconditional", False)]
  found = [(text_of(e, "inputs"), text_of(e, "targets")) for e in made]
  if name == "coqa":
    assert found == [(q.inputs, q.targets) for q in questions]
    assert targets_of(name, made) == [q.answers for q in questions]
    return
  expected = [
    (q.inputs if isinstance(q.inputs, str) else q.inputs[i], option)
    for q in questions
    for i, option in enumerate(q.options)
  ]
  assert found == expected
  assert [bool(e["is_correct"]) for e in made] == [
    i in q.correct for q in questions for i in range(len(q.options))
  ]


@pytest.mark.parametrize("name", ["race_high", "coqa"])
def test_an_exemplar_ends_in_the_right_answer(name, folder):
  made = examples_of(few_shot_task(name, 1))
  original = from_lines(name)
  right = [e for e in original if e.get("is_correct", True)]
  # If a text has several questions, any of them may be the exemplar.
  solved = {text_of(e, "inputs") + text_of(e, "targets") for e in right}
  for example, before in zip(made, original, strict=True):
    if example.get("unconditional", False):
      assert text_of(example, "inputs") == "Answer:"
    else:
      shot, query = text_of(example, "inputs").split("\n\n")
      assert query == text_of(before, "inputs")
      assert shot in solved


@each_task
def test_a_record_has_the_schema_of_tfds(name, folder):
  dataset, record, *_ = EXPECTED[name]
  task = fewshot.TASKS[name]
  if task.version is None:
    return
  builder = tfds.builder(dataset, data_dir=os.fspath(folder))
  assert str(builder.version) == task.version
  features = builder.info.features
  features.encode_example(whole(features, record))


@pytest.mark.parametrize("name", ["coqa", "race_high"])
def test_a_prepared_dataset_of_tfds_gives_the_same_examples(
  name, folder, tmp_path, vocabulary, monkeypatch
):
  dataset, record, *_ = EXPECTED[name]
  expected = from_lines(name)
  task = fewshot.TASKS[name]
  builder = tfds.builder(dataset, data_dir=str(tmp_path / "tfds"))
  record = whole(builder.info.features, record)
  splits = {split: [("key", record)] for split in task.splits.values()}
  monkeypatch.setattr(
    type(builder), "_split_generators", lambda *unused: splits
  )
  # TFDS writes with this module, without depending on it; Python has the same.
  monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
  builder.download_and_prepare()
  bind_places(vocabulary, data_dir=str(tmp_path / "tfds"))
  prepared = examples_of(name)
  assert len(prepared) == len(expected)
  for one, other in zip(prepared, expected, strict=True):
    assert {k: str(v) for k, v in one.items() if k != "record"} == {
      k: str(v) for k, v in other.items() if k != "record"
    }


@pytest.mark.parametrize("name", SOME[:-1])
def test_likely_right_options_are_all_right(name, folder):
  made = from_lines(name)
  apart = [e for e in made if not e["unconditional"]]
  assert len(made) in (len(apart), 2 * len(apart))
  # Far below, so that no number of tokens or characters compensates.
  wrong = -1.0 - 9 * max(len(text_of(e, "targets")) for e in made)

  def likelihood(example):
    if example["unconditional"]:
      return -5.0
    return -1.0 if example["is_correct"] else wrong

  results = scores_of(name, made, likelihood)
  assert results["accuracy"] == 100
  options = [e for e in apart if e["idx"][0] == 0]
  assert results["chance"] == pytest.approx(100 / len(options))


def test_gin_chooses_what_is_compared(folder, vocabulary):
  assert not any(e["unconditional"] for e in examples_of("piqa"))
  bind_places(vocabulary, "unconditional", folder=str(folder))
  made = examples_of("piqa")
  assert [bool(e["unconditional"]) for e in made] == [False, True] * 2
  bind_places(vocabulary, "token", folder=str(folder))
  with pytest.raises(Exception, match='did you mean "tokens"'):
    examples_of("piqa")


def test_missing_records_are_named(tmp_path, vocabulary):
  """In TFDS; records_test.py has those in files."""
  bind_places(vocabulary, data_dir=str(tmp_path / "none"))
  with pytest.raises(Exception, match="hellaswag: not prepared in TFDS"):
    examples_of("hellaswag")
  with pytest.raises(Exception, match="mmlu is not in TFDS: set records"):
    examples_of("mmlu")


PERFECT = {
  "trivia_qa": (" Jane Austen\nQ:", {"em": 100, "f1": 100}),
  "natural_questions": (" The Austen.", {"em": 100, "f1": 100}),
  "lambada": (" boat. She", {"sequence_accuracy": 100}),
  "drop": (" one two", {"em": 0, "f1": pytest.approx(200 / 3)}),
  "squad_v2": (" unanswerable", {"em": 100, "f1": 100}),
  "gsm8k": (" 1000 + 2. The answer is 1,002.", {"sequence_accuracy": 100}),
}


@pytest.mark.parametrize("name", PERFECT)
def test_answers_are_judged_by_t5s_metrics(name, folder):
  output, expected = PERFECT[name]
  (made,) = from_lines(name)
  task = seqio.get_mixture_or_task(name)
  predictions = [task.postprocess_fn(output, example=made, is_target=False)]
  (metric,) = task.predict_metric_fns
  assert metric(targets_of(name, [made]), predictions) == expected


def test_without_t5_a_task_of_its_metrics_says_so_before_it_begins(
  folder, monkeypatch
):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    "importlib.util.find_spec",
    lambda name, *rest: None if name == "t5" else find(name, *rest),
  )
  with pytest.raises(Exception, match=r"trivia_qa: its metric is T5's.*pip"):
    examples_of("trivia_qa")
