# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Syncs of toy pods, against the papers in float64 and torchft's records."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import ExchangeConfig
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import Slice
from palm_mtf.programs.outer import build_outer, fragment_of
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program
from palm_mtf.training.diloco import Syncs
from tests.cases import slow
from tests.optim.outer_test import rounded

NAMES = ["embedding", "layer_000/w", "layer_001/w", "final_norm/scale"]
SLOT = "layer_000/w/momentum"


class ToyPods:
  """Pods with a vector per name in NAMES, whose updates a test chooses."""

  def __init__(self, num_pods: int, first: np.ndarray, config: ExchangeConfig):
    """Every pod begins with `first`, [names, size] float32."""
    size = first.shape[1]
    self.graph = tf.Graph()
    with self.graph.as_default():
      self._fed = tf.placeholder(tf.float32, [num_pods, *first.shape])
      self._pods, assigned, added = [], [], []
      for pod in range(num_pods):
        device, slices = f"/device:cpu:{pod}", {}
        for name in [*NAMES, SLOT]:
          with tf.device(device):
            held = tf.Variable(tf.zeros([size]), use_resource=True)
          slices[name] = [
            Slice([0], [size], "", True, tf.float32, [name], held, device)
          ]
        for i, name in enumerate(NAMES):
          held = slices[name][0].variable
          assigned.append(held.assign(self._fed[pod, i]).op)
          added.append(held.assign_add(self._fed[pod, i]).op)
        self._pods.append(slices)
      self.outer = build_outer(self._pods, NAMES, config)
      values = [[x[y][0].read() for y in NAMES] for x in self._pods]
      of_outer = [[x[y][0].read() for y in NAMES] for x in self.outer.equal]
      initialize = tf.global_variables_initializer()
    session = tf.Session(graph=self.graph, config=session_config(1, num_pods))
    self.client = Client(session)
    self.syncs = Syncs(self.client, config, self.outer)
    session.run(initialize)
    fed = {"fed": self._fed}
    # They conflict with syncs as training steps do.
    state = {"writes": self.outer.show.writes - {"outer parameters"}}
    self._add = Program(fed, operations=added, **state)
    self._values = Program(outputs=values)
    self._of_outer = Program(outputs=of_outer)
    self._set = Program(fed, operations=assigned, **state)
    self.reset(first)

  def reset(self, first: np.ndarray) -> None:
    """Begins again; every pod has `first`, and its momentum is 0."""
    copies = np.stack([first] * len(self._pods))
    self.client.call(self._set, {"fed": copies})
    self.syncs.begin()

  def train(self, updates: np.ndarray) -> list[np.ndarray]:
    """Adds [steps, pods, names, size]; returns all values after each step."""
    found = []
    for step, update in enumerate(updates, 1):
      self.client.call(self._add, {"fed": update})
      self.syncs.run(step)
      found.append(np.array(self.client.call(self._values)))
    return found

  def outer_values(self) -> np.ndarray:
    """Returns the outer parameters on each pod, [pods, names, size]."""
    return np.array(self.client.call(self._of_outer))


def train_in_float64(first, updates, c: ExchangeConfig):
  """Streaming DiLoCo, 2501.18512: Algorithm 2 with delay tau and mixing alpha.

  With one fragment and without overlap, it is DiLoCo, 2311.08105: Algorithm 1.
  A fragment is sent tau steps before step k H / P, its turn.
  """
  num_pods = updates.shape[1]
  local = np.stack([first.astype(np.float64)] * num_pods)
  outer, velocity, sent = first.astype(np.float64), np.zeros(first.shape), {}
  turn, found = c.outer_steps // c.fragments, []
  for t, update in enumerate(updates, 1):
    local = local + update
    for p in range(c.fragments):
      rows = [i for i, x in enumerate(NAMES) if p == fragments_by_hand(x, c)]
      due = ((p + 1) * turn) % c.outer_steps
      if (t + c.overlap_steps) % c.outer_steps == due:
        deltas = [
          [rounded(outer[i] - x[i], c.outer_dtype) for i in rows] for x in local
        ]
        sent[p] = np.mean(deltas, axis=0)
      if t % c.outer_steps == due:
        delta = sent.pop(p)
        velocity[rows] = c.outer_momentum * velocity[rows] + delta
        step = delta + c.outer_momentum * velocity[rows]
        outer[rows] -= c.outer_lr * step
        for x in local:
          kept, taken = c.merge_alpha * x[rows], 1 - c.merge_alpha
          x[rows] = kept + taken * outer[rows]
    found.append(local)
  return found, outer


def fragments_by_hand(name: str, c: ExchangeConfig) -> int:
  last = c.fragments - 1
  by_name = {"embedding": 0, "layer_000/w": 0, "layer_001/w": 1}
  return min(last, by_name.get(name, last))


@pytest.mark.parametrize(
  "changes",
  [
    {},
    slow({"fragments": 2}),
    {"fragments": 2, "overlap_steps": 2, "merge_alpha": 0.5},
    slow({"overlap_steps": 3, "outer_dtype": "bfloat16"}),
    slow({"fragments": 2, "outer_dtype": "int8"}),
    {"fragments": 2, "overlap_steps": 1, "outer_dtype": "e3m0"},
  ],
  ids=str,
)
def test_syncs_are_those_of_the_papers(changes):
  """In float64, and the outer parameters have the same bits on all pods."""
  config = ExchangeConfig(exchange="diloco", outer_steps=6, **changes)
  rng = np.random.default_rng(1)
  first = rng.normal(size=[4, 300]).astype(np.float32)
  updates = rng.normal(size=[18, 3, 4, 300]).astype(np.float32)
  pods = ToyPods(3, first, config)
  found = pods.train(updates)
  expected, outer = train_in_float64(first, updates, config)
  np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
  held = pods.outer_values()
  np.testing.assert_allclose(held[0], outer, 1e-4, 1e-4)
  assert held[0].tobytes() == held[1].tobytes() == held[2].tobytes()
  if not changes:
    assert all((x == held[0]).all() for x in found[-1])


def test_trivial_fragments_and_overlap_are_the_simple_form():
  """P fragments in turn, each with the bits of its own syncs.

  Without inner updates between its send and its merge, a fragment that is sent
  early has the bits of one that is not; so have all fragments together those of
  the whole model, where each of them moves only in its own turn.
  """
  rng = np.random.default_rng(2)
  first = rng.normal(size=[4, 5]).astype(np.float32)
  updates = rng.normal(size=[8, 2, 4, 5]).astype(np.float32)
  updates[1::2] = 0.0
  found = []
  for changes in ({}, {"overlap_steps": 1}):
    config = ExchangeConfig(exchange="diloco", outer_steps=2, **changes)
    found.append(ToyPods(2, first, config).train(updates)[1::2])
  np.testing.assert_array_equal(*found)
  whole = ExchangeConfig(exchange="diloco", outer_steps=4)
  parts = ExchangeConfig(exchange="diloco", outer_steps=4, fragments=2)
  rows = [i for i, x in enumerate(NAMES) if fragment_of(x, 2) == 1]
  one, other = (ToyPods(2, first, x).train(updates) for x in (whole, parts))
  np.testing.assert_array_equal(one[3][:, rows], other[3][:, rows])
  np.testing.assert_array_equal(one[7][:, rows], other[7][:, rows])


# The weight of each of two fragments before each step, as torchft 0.2.0 (BSD
# licence) recorded it in test_fixtures/torchft.diloco_regression_test.*.json,
# commit 7eb70878 of github.com/meta-pytorch/torchft. Its replicas subtract 2 in
# each step; H = 6, outer rate 2 without momentum. {(tau, alpha): fragments}.
# The first is of ..failure_recovery_0, replica 0; ..updates_0 is its beginning.
_ALL_OWN = "1 -1 -3 -5 -7 -9 -11 -13 -15 -17 -19 -21 -23 -25 -27 -29"
TORCHFT = {
  (0, 0.0): (
    "1 -1 -3 -11 -13 -15 -17 -19 -21 -35 -37 -39 -41 -43 -45 -59 -61 -63 -65 "
    "-67 -69 -83",
    "1 -1 -3 -5 -7 -9 -23 -25 -27 -29 -31 -33 -47 -49 -51 -53 -55 -57 -71 "
    "-73 -75 -77",
  ),
  (0, 0.5): (
    "1 -1 -3 -8 -10 -12 -14 -16 -18 -24.5 -26.5 -28.5 -30.5 -32.5 -34.5 -40.25",
    "1 -1 -3 -5 -7 -9 -17 -19 -21 -23 -25 -27 -32 -34 -36 -38",
  ),
  (0, 1.0): (_ALL_OWN, _ALL_OWN),
  (1, 0.0): (
    "1 -1 -3 -7 -9 -11 -13 -15 -17 -27 -29 -31 -33 -35 -37 -47",
    "1 -1 -3 -5 -7 -9 -19 -21 -23 -25 -27 -29 -39 -41 -43 -45",
  ),
  (1, 0.5): (
    "1 -1 -3 -6 -8 -10 -12 -14 -16 -21.5 -23.5 -25.5 -27.5 -29.5 -31.5 -35.75",
    "1 -1 -3 -5 -7 -9 -15 -17 -19 -21 -23 -25 -29 -31 -33 -35",
  ),
  (1, 1.0): (_ALL_OWN, _ALL_OWN),
}


@pytest.mark.parametrize(("tau", "alpha"), TORCHFT)
def test_torchfts_own_regression_tests_have_the_same_numbers(tau, alpha):
  """Schedule, sign of the outer gradient, outer update and mixing."""
  outer = {"outer_steps": 6, "outer_lr": 2.0, "outer_momentum": 0.0}
  parts = {"fragments": 2, "overlap_steps": tau, "merge_alpha": alpha}
  config = ExchangeConfig(exchange="diloco", **outer, **parts)
  recorded = [[*map(float, x.split())] for x in TORCHFT[tau, alpha]]
  first = np.ones([4, 1], np.float32)
  updates = np.full([len(recorded[0]) - 1, 2, 4, 1], -2.0, np.float32)
  found = ToyPods(2, first, config).train(updates)
  for pod in range(2):
    for name, expected in zip(NAMES[1:3], recorded, strict=True):
      of_name = [x[pod, NAMES.index(name), 0] for x in found]
      np.testing.assert_allclose(of_name, expected[1:], 1e-6)


def test_a_rewind_during_an_exchange_drops_it():
  """The steps are repeated with the bits that they had."""
  config = ExchangeConfig(exchange="diloco", outer_steps=4, overlap_steps=2)
  rng = np.random.default_rng(3)
  first = rng.normal(size=[4, 5]).astype(np.float32)
  updates = rng.normal(size=[4, 2, 4, 5]).astype(np.float32)
  pods = ToyPods(2, first, config)
  expected = pods.train(updates)
  pods.reset(first)
  pods.train(updates[:3])
  pods.syncs.drop()
  pods.reset(first)
  np.testing.assert_array_equal(pods.train(updates), expected)
