# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What decoupled learners send: each of their steps once, in OUTER_DTYPE."""

import math

import numpy as np
import pytest

from palm_mtf.learners.decoupled import (
  DecoupledLearner,
  pack,
  read_metrics,
  specs_of_sent,
  unpack,
)
from palm_mtf.learners.protocol import Message, specs_of

FRAGMENTS = [["a"], ["b"]]
SHAPE = (3, 5)


class Pod:
  """Parameters that a step moves by whole numbers, so that sums are exact."""

  def __init__(self):
    self.values, self.steps = {}, {"a": 0, "b": 0}
    self.arrays = self

  def begin(self, arrays):
    self.values = dict(arrays)

  def read(self, names):
    return {x: self.values[x].copy() for x in names}

  def set(self, arrays):
    self.values |= arrays

  def train(self, batches, step, share):
    del share
    for i, _ in enumerate(batches):
      for name in self.values:
        self.values[name] = self.values[name] + (step + i + 1)
    return {"loss": 1.0}


def work(step, num_steps, sends, *, begins=False, **outer):
  rows = {"rows/inputs": np.zeros((num_steps, 1, 2), np.int32)}
  arrays = {
    f"outer/{x}": np.full(SHAPE, y, np.float32) for x, y in outer.items()
  }
  header = {"work": 0, "step": step, "share": 0, "num_steps": num_steps}
  return Message(header | {"sends": sends, "begins": begins}, rows | arrays)


def test_a_learner_sends_every_step_once_whenever_merges_reach_it():
  """A fragment moves on from the outer parameters by the steps since."""
  pod = Pod()
  learner = DecoupledLearner(pod, FRAGMENTS, "float32")

  def send(*given, **outer):
    result = learner.do(work(*given, **outer))
    return {x: y[0, 0] for x, y in result.arrays.items()}

  assert send(0, 2, [0], begins=True, a=100, b=200) == {"a": 3}
  # Fragment b has moved by 1 + 2, and by 3 + 4 since.
  assert send(2, 2, [1]) == {"b": 10}
  # The merge of a comes after two more steps (7), which the learner keeps.
  assert send(4, 1, [0], a=50) == {"a": 7 + 5}
  assert pod.values["a"][0, 0] == 50 + 7 + 5
  # No step is left of b but step 5; a has none, so it takes the outer value.
  assert send(0, 0, [0, 1], a=70, b=80) == {"a": 0, "b": 5}
  assert (pod.values["a"][0, 0], pod.values["b"][0, 0]) == (70, 85)


@pytest.mark.parametrize(
  ("dtype", "num_bytes", "error"),
  [
    ("float32", 4.0, 0.0),
    ("bfloat16", 2.0, 2**-8),
    ("int8", 1.0, 1 / 254),
    ("e3m0", 0.5, 1 / 2),
  ],
)
def test_arrays_on_the_wire_are_as_large_and_as_exact_as_their_dtype(
  dtype, num_bytes, error
):
  """With a float32 scale per 256 numbers; errors as of the nearest number."""
  rng = np.random.default_rng(0)
  moved = {
    "a": rng.normal(size=(64, 40)).astype(np.float32),
    "b": rng.normal(size=(7,)).astype(np.float32),
  }
  shapes = {x: y.shape for x, y in moved.items()}
  packed = pack(moved, dtype)
  assert specs_of(packed) == specs_of_sent(shapes, dtype)
  assert packed["a"].nbytes == num_bytes * math.prod(shapes["a"])
  found = unpack(packed, shapes, dtype)
  for name, value in moved.items():
    assert found[name].dtype == np.float32
    assert found[name].shape == value.shape
    away = np.abs(found[name] - value)
    largest = (
      np.abs(value).max() if dtype in ("int8", "e3m0") else np.abs(value)
    )
    assert (away <= error * largest + 1e-30).all()
    if dtype != "e3m0":
      assert np.sign(found[name] * value).min() >= 0


def test_a_run_cannot_make_a_learner_repeat_steps_without_rows():
  learner = DecoupledLearner(Pod(), FRAGMENTS, "float32")
  message = work(0, 1, (0,), begins=True, a=1, b=2)
  with pytest.raises(ValueError, match="rows of other steps"):
    learner.do(Message({**message.header, "num_steps": 10**9}, message.arrays))


def test_metrics_of_a_learner_are_numbers_and_not_those_of_the_client():
  good = {"loss": 2.5, "z_loss": 0, "parameter_rms/mlp": 1e-3}
  wrong = {"grad_norm": "nan", "a": None, "b": [1.0], "c": True, "d": 10**400}
  own = ("validation_loss", "validation_rewards/margins", "tokens/alice")
  own += ("unigram_entropy", "lag/bob", "last_sync/bob", "step")
  odd = ("<b>", "\x1b[2J", "a b", "a\n", "", "x" * 99, "a/b/c")
  given = good | wrong | dict.fromkeys(own + odd, 0.5)
  assert read_metrics(given) == good
  for wrong in (None, [], "loss", 3, [["loss", 1.0]]):
    assert read_metrics(wrong) == {}
  assert len(read_metrics({f"m{i}": 1.0 for i in range(10**4)})) == 100
