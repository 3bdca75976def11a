# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of a task's functions are read correctly, or refused by name."""

import fractions
import functools
import math
from decimal import Decimal

import numpy as np
import pytest
import seqio

from palm_mtf._tf import eager_mode, tf
from palm_mtf.errors import UserError
from palm_mtf.evaluation.seqio_evaluator import name_errors, simplify_metrics
from tests.refusals import message_of
from tests.seqio_testing import add_examples, registries_restored

WHERE = "EVAL_TASKS: mine"
HALF = 0.5


@pytest.mark.parametrize(
  ("value", "plain"),
  [
    (3, 3.0),
    (np.float16(HALF), HALF),
    (np.bool_(True), 1.0),
    (np.array(HALF), HALF),
    (lambda: tf.constant([HALF], tf.bfloat16), HALF),
    (lambda: tf.constant("fine"), "fine"),
    (Decimal("0.5"), HALF),
    (fractions.Fraction(1, 2), HALF),
    (10**400, math.inf),
    (-math.inf, -math.inf),
    ("fine", "fine"),
    (b"fine", "fine"),
    (np.array("fine"), "fine"),
    (seqio.metrics.Scalar(np.float32(HALF)), HALF),
    (seqio.metrics.Text("fine"), "fine"),
    (seqio.metrics.Text(b"fine"), "fine"),
    (seqio.metrics.Scalar(seqio.metrics.Scalar(True)), 1.0),
    (seqio.metrics.Scalar(seqio.metrics.Text("fine")), "fine"),
  ],
)
def test_numbers_and_texts_of_any_library_are_taken(value, plain):
  with eager_mode():
    value = value() if callable(value) else value
    found = simplify_metrics({"x": value}, WHERE)["x"]
  assert (found, type(found)) == (plain, type(plain))


@pytest.mark.parametrize(
  "value",
  [
    *(None, math.nan, np.float32("nan"), Decimal("nan")),
    *(np.ma.masked, np.ma.array(1.0, mask=True), seqio.metrics.Scalar(None)),
  ],
)
def test_what_cannot_be_computed_is_nan(value):
  assert math.isnan(simplify_metrics({"x": value}, WHERE)["x"])


PIXELS = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (seqio.metrics.Histogram([2.5, 1]), "Histogram of 2 values from 1 to 2.5"),
    (seqio.metrics.Histogram([]), "Histogram of 0 values"),
    (seqio.metrics.Image(PIXELS), "Image of 12 values from 0 to 11"),
    (seqio.metrics.Audio(np.ones((1, 5, 1))), "Audio of 5 values from 1 to 1"),
    (seqio.metrics.Generic(np.bool_([0, 1]), None), "Generic of 2 values from"),
    (seqio.metrics.Generic(np.array("a"), None), "Generic of 1 values"),
  ],
)
def test_what_is_no_number_and_no_text_is_described_in_a_text(value, text):
  assert simplify_metrics({"x": value}, WHERE)["x"].startswith(text)


@pytest.mark.parametrize(
  ("names", "shown"),
  [((1, "1"), "'1'"), (("a\nb",), r"'a\nb'"), (("\ud83d",), r"'\ud83d'")],
)
def test_a_name_that_is_taken_or_cannot_be_printed_is_refused(names, shown):
  with pytest.raises(UserError) as error:
    simplify_metrics(dict.fromkeys(names, 0.5), WHERE)
  assert str(error.value) == (
    f"{WHERE}: {shown}: give each metric another name, of printable characters."
  )


@pytest.mark.parametrize(
  ("value", "kind"),
  [
    ([1.0, 2.0], "a list"),
    ([1.0], "a list"),
    (np.array([1.0, 2.0]), "a ndarray"),
    ({"a": 1.0}, "a dict"),
    (1j, "a complex"),
    (np.array([None]), "a ndarray"),
    (print, "a builtin_function_or_method"),
    (np.timedelta64(3, "s"), "a timedelta64"),
    (np.datetime64("2026-01-01"), "a datetime64"),
    (seqio.metrics.MetricValue(), "a MetricValue"),
    ({"a": seqio.metrics.Scalar(1)}, "a dict"),
  ],
)
def test_a_value_that_is_neither_is_refused_with_its_name_and_type(value, kind):
  assert message_of(simplify_metrics, {"each": value}, WHERE) == (
    f"{WHERE}: 'each' is {kind}; return a number or a text for each name."
  )


def returns(value):
  def metric(targets, predictions):
    return value

  return metric


@pytest.fixture
def task():
  """Makes a task from given functions, with errors that name them."""

  def make(metric, postprocess=None):
    examples = {"validation": {"inputs": ["a"], "targets": ["b"]}}
    made = add_examples(
      "mine",
      examples,
      [seqio.preprocessors.tokenize],
      features=("inputs", "targets"),
      metric_fns=[metric],
      postprocess_fn=postprocess,
    )
    return name_errors(made, WHERE)

  with registries_restored():
    yield make


@pytest.mark.parametrize(
  ("value", "kind"), [(0.5, "a float"), (None, "None"), ([{}], "a list")]
)
def test_a_metric_function_that_returns_no_dict_is_named(task, value, kind):
  (metric,) = task(returns(value)).metric_fns
  assert message_of(metric, ["a"], ["b"]) == (
    f"{WHERE}: metric function returns.<locals>.metric returns {kind}; return "
    "a dict of numbers by name."
  )


def leaves(targets, predictions, code=3):
  raise SystemExit(code)


@pytest.mark.parametrize(
  "metric",
  [leaves, functools.partial(leaves, code=4)],
  ids=["plain", "partial"],
)
def test_a_metric_function_that_raises_is_named(task, metric):
  with_errors = task(metric)
  assert len(with_errors.predict_metric_fns) == 1  # SeqIO reads parameters
  (metric,) = with_errors.metric_fns
  with pytest.raises(UserError, match=f"{WHERE}: metric function leaves: Syst"):
    metric(targets=["a"], predictions=["b"])


def test_a_postprocessor_that_raises_is_named(task):
  class Judge:
    def __call__(self, output, **unused):
      return output[7]

  with pytest.raises(UserError) as error:
    task(returns({}), Judge()).postprocess_fn("a", example={}, is_target=True)
  assert str(error.value).startswith(
    f"{WHERE}: postprocessor Judge: IndexError: string index out of range ("
  )


def test_what_a_function_prints_is_no_result(task, capsys):
  def chatter(targets, predictions):
    print("chatter")
    return {"x": 1}

  (metric,) = task(chatter).metric_fns
  assert metric([], []) == {"x": 1.0}
  assert capsys.readouterr() == ("", "chatter\n")
