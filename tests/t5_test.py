# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""T5's registered tasks with local records, as TASK and as EVAL_TASKS."""

import functools

import pytest
import seqio

from palm_mtf._tf import tf
from palm_mtf.config import TaskEvalConfig
from palm_mtf.data.sources.seqio_task import (
  find_provider,
  open_task,
)
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.evaluation.seqio_tasks import open_eval_tasks
from tests.cases import needs_t5
from tests.seqio_testing import Says, open_one, registries_restored

pytestmark = needs_t5

COLA = {"sentence": ["a b", "c d", "e f", "g h"], "label": [1, 0, 1, 1]}
SIMILAR = {"sentence1": ["a", "b", "c"], "sentence2": ["d", "e", "f"]}
SQUAD = {
  "question": ["Who ?", "Where ?"],
  "context": ["Ann went home .", "Ann went home ."],
  "answers": {
    "text": [["Ann", "the Ann"], ["home", "at home"]],
    "answer_start": [[0, 0], [9, 9]],
  },
  "id": ["1", "2"],
  "title": ["t", "t"],
}
INDEX = {"idx": [0, 1, 2, 3]}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  train_vocabulary(["acceptable True 3.8 Ann home\n" * 20], 290, path=path)
  return open_vocabulary(path)


@pytest.fixture(autouse=True)
def registries():
  # The tasks stay registered after the import.
  import t5.data.mixtures
  import t5.data.tasks  # noqa: F401

  with registries_restored():
    yield


def with_records(name: str, records: dict) -> None:
  """Lets a T5 task read `records`, with TFDS's features, in every split."""
  task = seqio.TaskRegistry.get(name)

  def read(split, shuffle_files=False, seed=None):
    return tf.data.Dataset.from_tensor_slices(records)

  source = seqio.FunctionDataSource(read, splits=("train", "validation"))
  seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add_provider(name, task.replace(source=source))


def test_names_of_t5s_tasks_and_mixtures_are_found():
  for name in ("glue_cola_v002", "c4_v220_span_corruption", "squad_v010"):
    assert find_provider(name) is seqio.TaskRegistry.get(name)
  mixture = find_provider("glue_v002_proportional")
  assert "glue_cola_v002" in {t.name for t in seqio.get_subtasks(mixture)}


def test_a_task_of_t5s_is_trained_on_as_text():
  with_records("glue_cola_v002", COLA | INDEX)
  source = open_one("glue_cola_v002")
  assert source.has_inputs
  assert [(d.inputs, d.text) for _, d in source.documents()][:2] == [
    ("cola sentence: a b", "acceptable"),
    ("cola sentence: c d", "unacceptable"),
  ]


def test_a_mixture_of_t5s_has_its_own_rates():
  with_records("glue_cola_v002", COLA | INDEX)
  with_records("glue_stsb_v002", SIMILAR | {"label": [0.0, 2.5, 5.0]})
  names = ["glue_cola_v002", ("glue_stsb_v002", 3)]
  seqio.MixtureRegistry.add("two", names, default_rate=1)
  rates = {task.name: task.rate for task in open_task("two", 0.1)}
  assert rates == {"glue_cola_v002": 0.25, "glue_stsb_v002": 0.75}


# Matthews correlation of targets 1, 0, 1, 1 and answers 1, 0, 0, 1: TP 2, TN 1,
# FN 1, FP 0, so (2 * 1 - 0 * 1) / sqrt(2 * 3 * 1 * 2) = 0.57735.
# Targets 0, 2.6, 5.0, answers 0, 5, 2.6: Spearman 1 - 6 * 2 / (3 * 8) = 0.5.
@pytest.mark.parametrize(
  ("name", "records", "said", "expected"),
  [
    (
      "glue_cola_v002",
      COLA | INDEX,
      ["acceptable", "unacceptable", "unacceptable", "acceptable"],
      {"matthews_corrcoef": 57.735},
    ),
    (
      "glue_stsb_v002",
      SIMILAR | {"label": [0.0, 2.6, 5.0], "idx": [0, 1, 2]},
      ["0.0", "5.0", "2.6"],
      {"spearman_corrcoef": 50.0},
    ),
    (
      "squad_v010_allanswers",
      SQUAD,
      ["The Ann.", "went home"],
      {"em": 50.0, "f1": 83.333},
    ),
    (
      "cnn_dailymail_v002",
      {"article": ["a b c"], "highlights": ["Ann went home"]},
      ["Ann stayed home"],
      {"rouge1": 66.667, "rouge2": 0.0, "rougeLsum": 66.667},
    ),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_t5_evaluates_answers_with_its_own_metrics(
  vocabulary, name, records, said, expected
):
  with_records(name, records)
  config = TaskEvalConfig(eval_tasks=[name])
  (task,) = open_eval_tasks(config, vocabulary, 64)
  metrics = task.evaluate(1, Says([[text] for text in said])).metrics
  found = {name: metrics[name] for name in expected}
  assert found == pytest.approx(expected, abs=1e-2)


@pytest.mark.slow
def test_ids_of_t5s_preprocessors_are_the_same_when_read_again(vocabulary):
  """T5's span corruption uses SeqIO's seeds, so that runs can resume."""
  import t5.data.preprocessors as t5_steps

  own = seqio.SentencePieceVocabulary(vocabulary.path, extra_ids=20)
  seqio.TaskRegistry.add(
    "corrupted",
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: (
        tf.data.Dataset.from_tensor_slices(
          {"text": [f"Ann went home {i} times" for i in range(40)]}
        )
      ),
      splits=("train",),
    ),
    preprocessors=[
      functools.partial(
        seqio.preprocessors.rekey, key_map={"inputs": None, "targets": "text"}
      ),
      seqio.preprocessors.tokenize,
      t5_steps.span_corruption,
    ],
    output_features={x: seqio.Feature(own) for x in ("inputs", "targets")},
  )
  source = open_one("corrupted", sequence_length=32)
  source.check_vocabulary(open_vocabulary(vocabulary.path, extra_ids=20).sha256)
  with pytest.raises(UserError, match=r"set VOCABULARY = .* EXTRA_IDS = 20"):
    source.check_vocabulary(vocabulary.sha256)
  first, again = ([d for _, d in source.documents()] for _ in range(2))
  assert first and source.has_inputs
  for one, other in zip(first, again, strict=True):
    assert one.inputs.tolist() == other.inputs.tolist()
    assert one.text.tolist() == other.text.tolist()
