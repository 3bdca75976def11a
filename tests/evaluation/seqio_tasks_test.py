# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model gets examples as its own ids; SeqIO gets the model's answers."""

import functools
import inspect
import os

import numpy as np
import pytest
import seqio

from palm_mtf._tf import tf
from palm_mtf.config import FewShotConfig, TaskEvalConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.evaluation.seqio_tasks import group_metrics, open_eval_tasks
from tests.refusals import message_of
from tests.seqio_testing import Says, add_examples, exact, mean_score

pytestmark = pytest.mark.usefixtures("registries")

BOTH = ("inputs", "targets")
STEPS = [seqio.preprocessors.tokenize]
WITH_EOS = [*STEPS, seqio.preprocessors.append_eos]
QUESTIONS = {
  "inputs": ["1 + 1 =", "2 + 2 =", "caf\u00e9?"],
  "targets": [" 2", " 4", " \u00e9"],
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  train_vocabulary(["1 + 1 = 2\n2 + 2 = 4\nabcxy?\n" * 20], 290, path=path)
  return open_vocabulary(path)


def register(
  name, metrics, examples=QUESTIONS, steps=STEPS, split="validation", **changes
):
  changes = {"features": BOTH, "metric_fns": metrics, **changes}
  add_examples(name, {split: examples}, steps, **changes)


def open_tasks(vocabulary, *names, few_shot=None, **settings):
  few_shot = FewShotConfig(**few_shot or {})
  config = TaskEvalConfig(eval_tasks=names, few_shot=few_shot, **settings)
  return open_eval_tasks(config, vocabulary, 64)


def test_text_becomes_the_runs_ids_though_the_tasks_are_out_of_reach(
  vocabulary,
):
  register("plain", [exact])
  register("with_eos", [exact], steps=WITH_EOS)
  tokenize = functools.partial(STEPS[0], copy_pretokenized=False)
  register("bare", [exact], steps=[tokenize])
  registered = set(seqio.TaskRegistry.names())
  plain, with_eos, bare = open_tasks(vocabulary, "plain", "with_eos", "bare")
  assert set(seqio.TaskRegistry.names()) == registered, "nothing stays there"
  expected = [vocabulary.encode(x) for x in QUESTIONS["targets"]]
  assert plain.targets == bare.targets == expected
  assert plain.inputs == [vocabulary.encode(x) for x in QUESTIONS["inputs"]]
  eod = vocabulary.eod_id
  assert with_eos.targets == [[*ids, eod] for ids in expected]
  assert plain.fingerprint != with_eos.fingerprint
  # If an example does not hold its text, the text is decoded from ids.
  for task in (plain, bare):
    records = task.evaluate(1, Says([["a"]] * 3)).records
    assert [x["inputs"] for x in records] == QUESTIONS["inputs"]


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_metrics_are_what_the_tasks_functions_make_of_texts_and_scores(
  vocabulary, in_a_graph
):
  def postprocess(text, example, is_target):
    assert ("inputs_pretokenized" in example) and text is not None
    return text.strip()

  register(
    "both", [exact, mean_score], steps=WITH_EOS, postprocess_fn=postprocess
  )
  says = Says([["2"], ["  5 "], ["\u00e9\n"]], [-1.0, -2.0, -6.0])

  def evaluate():
    (task,) = open_tasks(vocabulary, "both")
    return task.evaluate(7, says)

  if in_a_graph:  # as during training
    with tf.Graph().as_default():
      result = evaluate()
  else:
    result = evaluate()
  assert result.metrics == {"exact": pytest.approx(2 / 3), "mean_score": -3.0}
  assert result.records[1] == {
    "inputs": "2 + 2 =",
    "targets": " 4",
    "expected": "4",
    "output": "  5 ",
    "prediction": "5",
    "score": -2.0,
  }


def test_predictions_may_be_empty_and_several_and_have_scores(vocabulary):
  def best_of(targets, predictions):
    return {
      "best": np.mean(
        [t in p for t, p in zip(targets, predictions, strict=True)]
      )
    }

  def with_aux(targets, predictions, aux_values):
    del targets
    assert list(predictions) == ["", " 4 5", "x"]
    return {"total": float(np.sum(aux_values["scores"]))}

  register("several", [best_of])
  register("scored", [with_aux])
  several, scored = open_tasks(vocabulary, "several", "scored")
  texts = [["a", " 2"], ["", "4"], [" \u00e9", "b"]]
  assert several.evaluate(1, Says(texts)).metrics["best"] == pytest.approx(
    2 / 3
  )
  result = scored.evaluate(1, Says([[""], [" 4 5"], ["x"]]))
  assert result.metrics == {"total": -5.0}


def test_a_mixture_is_its_tasks_without_those_that_cannot_be(
  vocabulary, capsys
):
  register("first", [exact])
  register("second", [mean_score])
  register("no_metric", [])
  register("no_split", [], split="train")
  names = ["first", "second", "no_metric", "no_split"]
  seqio.MixtureRegistry.add("all_of_them", names, default_rate=1.0)
  tasks = open_tasks(vocabulary, "all_of_them", "first", eval_examples=2)
  assert [task.name for task in tasks] == ["first", "second"]
  assert [len(task.targets) for task in tasks] == [2, 2]
  err = capsys.readouterr().err
  assert "left out of all_of_them: no_metric has no metric functions" in err
  assert "left out of all_of_them: no_split has no split 'validation'" in err


def test_preprocessors_that_cut_get_the_sequence_length(vocabulary):
  seen = []

  def cut(dataset, sequence_length):
    seen.append(sequence_length)
    return dataset

  register("cut", [exact], steps=[*STEPS, cut])
  open_tasks(vocabulary, "cut")
  assert seen[0] == {"inputs": 64, "targets": 64}


def broken_metric(targets, predictions):
  raise KeyError(f"{len(targets)} and {len(predictions)}")


def ids_of(dataset):
  return dataset.map(lambda x: {"inputs": [3, 4], "targets": [5]})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"metrics": []},
      "EVAL_TASKS = 'mine': mine has no metric functions; give its",
    ),
    (
      {"examples": {"inputs": ["a", ""], "targets": ["b", "c"]}},
      "EVAL_TASKS: mine, split 'validation': example 1 has no inputs; there "
      "has to be a text to continue.",
    ),
    (
      {"examples": {"targets": ["a"]}, "features": ("targets",)},
      "example 0 has no inputs; there has to be a text to continue.",
    ),
    (
      {"steps": [ids_of], "vocabulary": seqio.ByteVocabulary()},
      "EVAL_TASKS: the preprocessors of mine make token ids, so the run's",
    ),
    (
      {"steps": [lambda d: d.filter(lambda x: False), *STEPS]},
      "EVAL_TASKS: mine, split 'validation': there are no examples.",
    ),
  ],
)
def test_what_cannot_be_evaluated_is_one_line(vocabulary, changes, message):
  register(**{"name": "mine", "metrics": [exact], **changes})
  assert message in message_of(open_tasks, vocabulary, "mine")


def test_a_metric_function_that_fails_is_one_line_with_the_task(vocabulary):
  register("broken", [broken_metric])
  (task,) = open_tasks(vocabulary, "broken")
  line = inspect.getsourcelines(broken_metric)[1] + 1
  assert message_of(task.evaluate, 1, Says([["a"]] * 3)) == (
    "EVAL_TASKS: broken, split 'validation': metric function broken_metric: "
    f"KeyError: '3 and 3' ({os.path.relpath(__file__)}:{line}, in "
    "broken_metric)"
  )


GROUPED = {name: values * 2 for name, values in QUESTIONS.items()} | {
  "exemplar_group": ["a", "b"] * 3
}


def test_a_task_s_own_metric_keeps_its_name_and_value(vocabulary, caplog):
  own = {"m": 1.0, "macro_m": 99.0, "m_clean": 77.0}

  def named(targets, scores):
    return own

  register("own", [named], GROUPED)
  (task,) = open_tasks(vocabulary, "own")
  metrics = task.evaluate(1, Says(numbers=[1.0] * 6), [0, 1, 2]).metrics
  assert {name: metrics[name] for name in own} == own
  assert "its own macro_m stand for" in caplog.text
  assert "its own m_clean" in caplog.text


def test_a_metric_that_needs_more_examples_than_a_category_has_is_computed(
  vocabulary, caplog
):
  def correlation(targets, scores):
    if len(scores) < 4:
      raise ValueError("4 examples are needed")
    return {"n": len(scores)}

  register("few", [correlation, mean_score], GROUPED)
  (task,) = open_tasks(vocabulary, "few")
  scores = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
  result = task.evaluate(1, Says(numbers=scores), [0, 1, 2, 3, 4])
  assert result.metrics == {
    **{"n": 6.0, "mean_score": 3.5, "macro_mean_score": (3.0 + 4.0) / 2},
    **{"n_clean": 5.0, "mean_score_clean": 3.0, "macro_mean_score_clean": 3.0},
  }
  assert result.categories == {"a": {"mean_score": 3.0}, "b": {"mean_score": 4}}
  (line,) = [x for x in caplog.messages if "metrics of some examples" in x]
  assert "4 examples are needed" in line


# Right answers per category: law 1 of 4, logic 1 of 1, art 2 of 3.
RIGHT = [1, 0, 0, 0, 1, 1, 1, 0]
CATEGORIES = ["law", "law", "law", "law", "logic", "art", "art", "art"]


def metrics_of(numbers):
  right = [RIGHT[number] for number in numbers]
  return {"accuracy": 100 * sum(right) / len(right)}


def test_averages_are_those_by_hand():
  groups = {"humanities": ["law", "art"], "rest": ["logic", "sport"]}
  averages, of_each = group_metrics(metrics_of, CATEGORIES, groups)
  assert of_each == {
    "art": {"accuracy": pytest.approx(200 / 3)},
    "law": {"accuracy": 25},
    "logic": {"accuracy": 100},
  }
  assert averages == {
    "macro_accuracy": pytest.approx((200 / 3 + 25 + 100) / 3),
    "accuracy/humanities": pytest.approx(300 / 7),
    "macro_accuracy/humanities": pytest.approx((200 / 3 + 25) / 2),
    "accuracy/rest": 100,
    "macro_accuracy/rest": 100,
  }


# {group of MMLU: (subjects, questions, accuracy of PaLM 540B and of GPT-3)},
# from Touvron et al. (2023), Table 9, which also has averages: 69.3 and 43.9.
MMLU = {
  "humanities": (13, 4705, 77.0, 40.8),
  "STEM": (18, 3018, 55.6, 36.7),
  "social sciences": (12, 3077, 81.0, 50.4),
  "other": (14, 3242, 69.6, 48.8),
}


def test_palm_reports_mmlus_mean_over_subjects_its_authors_over_questions():
  subjects = [x for x, (count, *_) in MMLU.items() for _ in range(count)]

  def of_palm(numbers):
    (group,) = {subjects[number] for number in numbers}
    return {"accuracy": MMLU[group][2]}

  names = [f"{group} {number}" for number, group in enumerate(subjects)]
  averages, _ = group_metrics(of_palm, names, {})
  assert round(averages["macro_accuracy"], 1) == 69.3
  questions = sum(count for _, count, *_ in MMLU.values())
  of_gpt3 = sum(count * right for _, count, _, right in MMLU.values())
  assert round(of_gpt3 / questions, 1) == 43.9


def test_a_task_of_one_category_or_none_has_no_averages_over_them():
  for category in ("", "law"):
    assert group_metrics(metrics_of, [category] * 8, {}) == ({}, {})
