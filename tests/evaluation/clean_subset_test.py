# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clean examples have few 8-grams in common with the training text."""

import json

import numpy as np
import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf.config import (  # noqa: E402
  CorpusConfig,
  DataConfig,
  FewShotConfig,
  TaskEvalConfig,
)
from palm_mtf.data.vocabulary.training import train_vocabulary  # noqa: E402
from palm_mtf.data.vocabulary.vocabulary import Vocabulary  # noqa: E402
from palm_mtf.evaluation import clean_subset  # noqa: E402
from palm_mtf.evaluation.clean_subset import find_clean_examples  # noqa: E402
from palm_mtf.evaluation.seqio_tasks import open_eval_tasks  # noqa: E402
from tests.evaluation.seqio_tasks_test import Says  # noqa: E402
from tests.mtf_testing import small_config  # noqa: E402
from tests.seqio_testing import add_examples, registries_restored  # noqa: E402

BOTH = ("inputs", "targets")
STEPS = [seqio.preprocessors.tokenize]
RNG = np.random.default_rng(0)


def words(count: int) -> str:
  return " ".join(f"{word}" for word in RNG.integers(0, 1000, count))


# Inputs and targets of twelve examples with 6 to 30 words each.
EXAMPLES = [(words(5 + 2 * i), words(1 + i // 2)) for i in range(12)]


def part(example: tuple[str, str], share: float) -> str:
  text = " ".join(example).split()
  return " ".join(text[: round(share * len(text))])


# Each document contains between 0% and 100% of an example.
DOCUMENTS = [
  f"{words(30)} {part(example, i % 6 / 5)} {words(30)}"
  for i, example in enumerate(EXAMPLES)
]


def ngrams(text: str) -> list[tuple[str, ...]]:
  split = text.lower().split()
  return [tuple(split[i : i + 8]) for i in range(len(split) - 7)]


def find_contaminated(examples, documents) -> list[int]:
  seen = {ngram for each in documents for ngram in ngrams(each)}
  found = []
  for number, example in enumerate(examples):
    mine = ngrams(" ".join(example))
    if mine and sum(each in seen for each in mine) / len(mine) >= 0.7:
      found.append(number)
  return found


def mean_score(targets, scores):
  assert len(targets) == len(scores)
  return {"mean_score": np.mean(scores)}


@pytest.fixture(autouse=True)
def registries():
  with registries_restored():
    yield


def columns(examples) -> dict[str, list[str]]:
  inputs, targets = zip(*examples, strict=True)
  return {"inputs": list(inputs), "targets": list(targets)}


def register(name, examples=None, train=None, **features) -> None:
  splits = {"validation": columns(examples or EXAMPLES) | features}
  if train:
    splits["train"] = columns(train)
  add_examples(name, splits, STEPS, features=BOTH, metric_fns=[mean_score])


@pytest.fixture
def find(tmp_path):
  """Returns a task and its contaminated examples, for a run on DOCUMENTS."""
  folder = tmp_path / "texts"
  folder.mkdir()
  lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS]
  (folder / "a.jsonl").write_text("".join(lines))
  path = str(tmp_path / "vocabulary.model")
  train_vocabulary(["1 + 1 = 2\nabcxy?\n" * 20], 280, path=path)
  vocabulary = Vocabulary(path)
  config = CorpusConfig(
    model=small_config(sequence_length=64, vocab_size=vocabulary.size),
    data=DataConfig(
      # All documents are training documents.
      text_files=f"{folder}/*.jsonl",
      vocabulary=path,
      validation_share=1e-4,
    ),
  )

  def find(name, **settings):
    settings = TaskEvalConfig(eval_tasks=[name], **settings)
    tasks = open_eval_tasks(settings, vocabulary, 64)
    (clean,) = find_clean_examples(
      str(tmp_path / "run"), config, tasks
    ).values()
    return tasks[0], sorted({*range(len(tasks[0].targets))} - {*clean})

  find.folder = folder
  return find


def evaluate(task, contaminated, scores):
  """Returns the result of a task for answers with these scores."""
  clean = [n for n in range(len(scores)) if n not in contaminated]
  return task.evaluate(1, Says(numbers=scores), clean)


def test_contaminated_examples_are_those_of_sets_of_8_grams(find):
  register("plain")
  _, found = find("plain")
  assert found == find_contaminated(EXAMPLES, DOCUMENTS)
  assert 0 < len(found) < 12


def test_of_clean_examples_the_metric_functions_get_targets_and_answers(find):
  register("plain")
  task, found = find("plain")
  scores = [float(2**i) for i in range(12)]
  result = evaluate(task, found, scores)
  clean = [s for i, s in enumerate(scores) if i not in found]
  assert result.metrics == {
    "mean_score": np.mean(scores),
    "mean_score_clean": np.mean(clean),
  }
  marked = [i for i, x in enumerate(result.records) if x["contaminated"]]
  assert marked == found
  plain = task.evaluate(1, Says(numbers=scores))
  assert plain.metrics == {"mean_score": np.mean(scores)}
  assert "contaminated" not in plain.records[0]


def test_averages_over_categories_are_of_clean_examples_too(find):
  categories = [f"{'ab'[i % 2]}" for i in range(12)]
  register("plain", exemplar_group=categories)
  task, found = find("plain")
  scores = [float(2**i) for i in range(12)]
  metrics = evaluate(task, found, scores).metrics
  means = [
    np.mean([s for i, s in enumerate(scores) if i % 2 == j and i not in found])
    for j in range(2)
  ]
  assert metrics["macro_mean_score_clean"] == np.mean(means)


def test_eval_examples_limits_the_compared_examples(find):
  register("plain")
  task, found = find("plain", eval_examples=6)
  assert found == find_contaminated(EXAMPLES[:6], DOCUMENTS)
  assert len(task.texts) == 6


def test_options_of_a_question_stay_together(find):
  number = find_contaminated(EXAMPLES, DOCUMENTS)[0]
  record = ["a", "b", "c", "d", "e", "f"]
  register("named", record=[record[i // 2] for i in range(12)])
  _, named = find("named")
  register("indexed", idx=[[i // 2, i % 2] for i in range(12)])
  _, indexed = find("indexed")
  assert named == indexed
  assert {number, number ^ 1} <= {*named}
  assert all(each ^ 1 in named for each in named)


def test_an_option_without_its_question_is_not_compared(find):
  register("plain", unconditional=[True] * 12)
  assert find("plain")[1] == []


def test_exemplars_are_not_compared(find):
  # The training text contains all exemplars.
  train = [(text, "0") for text in DOCUMENTS]
  register("shots", train=train)
  _, found = find("shots", few_shot=FewShotConfig(num_shots=1))
  assert found == find_contaminated(EXAMPLES, DOCUMENTS)


@pytest.mark.parametrize("clean", [0, 12])
def test_of_none_there_is_no_clean_metric_and_of_all_it_is_the_metric(
  find, clean
):
  register(
    "seen", [(text if not clean else words(20), "0") for text in DOCUMENTS]
  )
  task, found = find("seen")
  assert len(found) == 12 - clean
  expected = {"mean_score": 1.0} | ({"mean_score_clean": 1.0} if clean else {})
  assert evaluate(task, found, [1.0] * 12).metrics == expected


def test_what_was_found_is_kept_until_text_or_examples_change(
  find, monkeypatch
):
  searched = []
  search = clean_subset._search

  def counted(sources, tasks):
    searched.append([task.name for task in tasks])
    return search(sources, tasks)

  monkeypatch.setattr(clean_subset, "_search", counted)
  register("plain")
  first = find("plain")[1]
  assert find("plain")[1] == first
  assert searched == [["plain"]]
  find("plain", eval_examples=5)
  assert len(searched) == 2
  with open(find.folder / "a.jsonl", "a") as file:
    file.write(json.dumps({"text": " ".join(EXAMPLES[6])}) + "\n")
  assert find("plain")[1] == sorted({*first, 6})
  assert len(searched) == 3
