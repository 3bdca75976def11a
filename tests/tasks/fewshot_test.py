# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every task on records of the real schema, as JSON lines and in TFDS."""

import importlib.resources.abc
import importlib.util
import json
import os
import sys

import gin
import pytest

pytest.importorskip("seqio", reason="SeqIO is not installed")
pytest.importorskip("t5", reason="T5 is not installed; `make test` installs it")

import seqio
import tensorflow_datasets as tfds

from palm_mtf.evaluation.few_shot import few_shot_task
from palm_mtf.tasks import fewshot
from tests.seqio_testing import registries_restored
from tests.tasks.evaluation_records import EXPECTED

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


@pytest.fixture(autouse=True)
def no_settings(temporary_folder):
  gin.clear_config()
  with registries_restored():
    yield
  gin.clear_config()


def configure(vocabulary, **bindings) -> None:
  lines = [
    "from __gin__ import dynamic_registration",
    "from palm_mtf.tasks import documents",
    "from palm_mtf.tasks import fewshot",
    "from palm_mtf.tasks import records",
    f"documents.vocabulary.path = {vocabulary.path!r}",
  ]
  lines += [f"{k.replace('__', '.')} = {v!r}" for k, v in bindings.items()]
  gin.parse_config("\n".join(lines))


@pytest.fixture
def folder(tmp_path, vocabulary):
  """JSON lines of every dataset: three records, told apart by a field."""
  for dataset, record, *_ in EXPECTED.values():
    (tmp_path / dataset).mkdir(parents=True, exist_ok=True)
    for split, numbers in (("train", (1, 2)), ("validation", (3,))):
      lines = [json.dumps({**record, "number": i}) + "\n" for i in numbers]
      (tmp_path / dataset / f"{split}.jsonl").write_text("".join(lines))
  configure(vocabulary, records__places__folder=str(tmp_path))
  return tmp_path


def examples(name, split="validation") -> list[dict]:
  task = seqio.get_mixture_or_task(name)
  dataset = task.get_dataset(split=split, shuffle=False, seed=42)
  return list(dataset.as_numpy_iterator())


def text(example, feature) -> str:
  return example[f"{feature}_pretokenized"].decode()


def judged(name, made) -> list:
  task = seqio.get_mixture_or_task(name)
  return [
    task.postprocess_fn(text(e, "targets"), example=e, is_target=True)
    for e in made
  ]


def test_the_29_tasks_have_the_papers_number_of_exemplars():
  assert set(fewshot.ENGLISH) == set(SHOTS)
  assert len(SHOTS) == 29
  mixture = seqio.MixtureRegistry.get("palm_english_few_shot")
  assert {task.name for task in mixture.tasks} == {
    f"{name}_{shots}_shot" for name, shots in SHOTS.items()
  }


@each_task
def test_a_record_is_asked_as_expected(name, folder):
  _, _, inputs, options, *label = EXPECTED[name]
  made = [e for e in examples(name) if not e.get("unconditional", False)]
  if not label:
    assert text(made[0], "inputs") == inputs
    assert judged(name, made)[0] == options
    return
  made = made[: len(options)]
  inputs = [inputs] * len(options) if isinstance(inputs, str) else inputs
  assert [text(e, "inputs") for e in made] == inputs
  assert [text(e, "targets") for e in made] == options
  assert [bool(e["is_correct"]) for e in made] == [
    i == label[0] for i in range(len(options))
  ]


@pytest.mark.parametrize("name", ["winogrande", "race_high", "coqa", "record"])
def test_an_exemplar_ends_in_the_right_answer(name, folder):
  made = examples(few_shot_task(name, 1))
  original = examples(name)
  right = [e for e in original if e.get("is_correct", True)]
  # An exemplar of a text with several questions may be any of them.
  solved = {text(e, "inputs") + text(e, "targets") for e in right}
  for example, before in zip(made, original, strict=True):
    if example.get("unconditional", False):
      assert text(example, "inputs") == "Answer:"
    else:
      shot, query = text(example, "inputs").split("\n\n")
      assert query == text(before, "inputs")
      assert shot in solved


@each_task
def test_a_record_has_the_schema_of_tfds(name, folder):
  dataset, record, *_ = EXPECTED[name]
  task = fewshot.TASKS[name]
  if task.version is None:
    return
  builder = tfds.builder(dataset, data_dir=os.fspath(folder))
  assert str(builder.version) == task.version
  builder.info.features.encode_example(record)
  assert set(builder.info.features) == set(record)


@pytest.mark.parametrize("name", ["coqa", "race_high", "squad_v2", "boolq"])
def test_a_prepared_dataset_of_tfds_gives_the_same_examples(
  name, folder, tmp_path, vocabulary, monkeypatch
):
  dataset, record, *_ = EXPECTED[name]
  from_lines = examples(name)
  task = fewshot.TASKS[name]
  builder = tfds.builder(dataset, data_dir=str(tmp_path / "tfds"))
  splits = {split: [("key", record)] for split in task.splits.values()}
  monkeypatch.setattr(
    type(builder), "_split_generators", lambda *unused: splits
  )
  # What TFDS writes with, and does not depend on; Python has the same.
  monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
  builder.download_and_prepare()
  gin.clear_config()
  configure(vocabulary, records__places__data_dir=str(tmp_path / "tfds"))
  prepared = examples(name)
  assert len(prepared) == len(from_lines)
  for one, other in zip(prepared, from_lines, strict=True):
    assert {k: str(v) for k, v in one.items() if k != "record"} == {
      k: str(v) for k, v in other.items() if k != "record"
    }


def score(name, made, right: float, wrong: float) -> dict[str, float]:
  task = seqio.get_mixture_or_task(name)
  scores = [right if e["is_correct"] else wrong for e in made]
  results = {}
  for metric in task.score_metric_fns:
    results |= metric(judged(name, made), scores)
  return results


@pytest.mark.parametrize(
  "name", [k for k, t in fewshot.TASKS.items() if isinstance(t, fewshot.Scored)]
)
def test_likely_right_options_are_all_right(name, folder):
  made = examples(name)
  length = max(len(text(e, "targets")) for e in made)
  made_apart = [e for e in made if not e["unconditional"]]
  alone = {tuple(e["idx"]): -1.0 for e in made if e["unconditional"]}
  assert len(alone) in (0, len(made_apart))
  right = score(name, made_apart, -1.0, -1.0 - 9 * length) if not alone else {}
  if alone:
    task = seqio.get_mixture_or_task(name)
    scores = [
      -5.0 if e["unconditional"] else (-4.0 if e["is_correct"] else -6.0)
      for e in made
    ]
    (metric,) = task.score_metric_fns
    right = metric(judged(name, made), scores)
  assert right["accuracy"] == 100
  options = [e for e in made_apart if e["idx"][0] == 0]
  assert right["chance"] == pytest.approx(100 / len(options))


def test_seqios_evaluator_takes_a_task_and_its_few_shot_form(folder):
  for name in ("boolq", few_shot_task("boolq", 2)):
    evaluator = seqio.Evaluator(
      name,
      seqio.EncDecFeatureConverter(pack=False),
      eval_split="validation",
      sequence_length={"inputs": 256, "targets": 16},
    )
    yes = evaluator.cached_task_datasets[name].enumerate()
    scores = {
      int(i): float(e["targets_pretokenized"] == b" yes")
      for i, e in yes.as_numpy_iterator()
    }
    results, _ = evaluator.evaluate(
      compute_metrics=True,
      score_fn=lambda dataset, scores=scores: [
        (int(i), scores[int(i)]) for i, _ in dataset.as_numpy_iterator()
      ],
    )
    assert results.result()[name] == {
      "accuracy": 100,
      "chance": 50,
      "margin": 50,
    }


def test_gin_chooses_what_is_compared(folder, vocabulary):
  assert not any(e["unconditional"] for e in examples("piqa"))
  configure(
    vocabulary,
    records__places__folder=str(folder),
    fewshot__normalization__piqa="unconditional",
  )
  made = examples("piqa")
  assert [bool(e["unconditional"]) for e in made] == [False, True] * 2
  configure(vocabulary, fewshot__normalization__piqa="token")
  with pytest.raises(Exception, match='did you mean "tokens"'):
    examples("piqa")


def test_missing_records_are_named(folder, vocabulary):
  (folder / "piqa" / "validation.jsonl").unlink()
  (folder / "rte.jsonl").touch()
  with pytest.raises(Exception, match=r"there is no file .*piqa/validation"):
    examples("piqa")
  (folder / "gsm8k" / "validation.jsonl").write_text("{\n")
  with pytest.raises(Exception, match=r"gsm8k/validation.jsonl, line 1: not"):
    examples("mmlu"), examples("boolq")
    list(
      fewshot.RecordSource("gsm8k", None, {"validation": "x"}).get_dataset(
        "validation", shuffle=False
      )
    )
  gin.clear_config()
  configure(vocabulary, records__places__data_dir=str(folder / "none"))
  with pytest.raises(Exception, match="hellaswag: not prepared in TFDS"):
    examples("hellaswag")
  with pytest.raises(Exception, match="mmlu is not in TFDS: set records"):
    examples("mmlu")


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
  (made,) = examples(name)
  task = seqio.get_mixture_or_task(name)
  predictions = [task.postprocess_fn(output, example=made, is_target=False)]
  (metric,) = task.predict_metric_fns
  assert metric(judged(name, [made]), predictions) == expected


def test_without_t5_a_task_of_its_metrics_says_so_before_it_begins(
  folder, monkeypatch
):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    "importlib.util.find_spec",
    lambda name, *rest: None if name == "t5" else find(name, *rest),
  )
  with pytest.raises(Exception, match=r"trivia_qa: its metric is T5's.*pip"):
    examples("trivia_qa")
