# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of a text equal those of a forward pass in float64 NumPy."""

import collections

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.compression.statistics import (
  _take_features,
  build_statistics,
  collect_statistics,
)
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.client import Client
from tests import oracle
from tests.blocks import block_config
from tests.cases import slow
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import load_parameters, random_documents, random_tokens


class Watched(np.ndarray):
  """A parameter that records by what the oracle multiplies it."""

  name, expert = "", 0
  seen: collections.defaultdict

  def __array_finalize__(self, other):
    self.__dict__.update(getattr(other, "__dict__", {}))

  def __getitem__(self, key):
    found = super().__getitem__(key)
    if isinstance(key, int | np.integer) and isinstance(found, Watched):
      found.expert = int(key)
    return found

  def __array_ufunc__(self, ufunc, method, *inputs, **more):
    if ufunc is np.matmul:
      _record(*inputs)
    return getattr(ufunc, method)(*map(np.asarray, inputs), **more)

  def __array_function__(self, function, types, args, more):
    if function is np.einsum:
      _record(*args[1:])
    if function is np.reshape:
      return super().__array_function__(function, types, args, more)
    return function(
      *(np.asarray(x) if isinstance(x, Watched) else x for x in args), **more
    )


def _record(x, w):
  if isinstance(w, Watched):
    w.seen[w.name, w.expert].append(np.asarray(x))


def _watch(params):
  seen = collections.defaultdict(list)
  watched = {}
  for name, value in params.items():
    watched[name] = value.view(Watched)
    watched[name].name, watched[name].seen = name, seen
  return watched, seen


def _compute(config, params, batch):
  graph = tf.Graph()
  with graph.as_default():
    program, parameters, slices = build_statistics(
      config, [*batch], 2, hessians=True
    )
  session = tf.Session(graph=graph)
  load_parameters(session, slices, params)
  with Client(session) as client:
    found = client.call(program, batch)
  return {
    name: each
    for names, each in zip(parameters, found, strict=True)
    for name in names
  }


@pytest.mark.parametrize(
  "block",
  [
    "Mixtral",
    slow("layer_norm parallel multi_query"),
    slow("LLaMA 3"),
    slow("GPT-J"),
    slow("DeepSeek-V3"),
  ],
)
def test_statistics_are_the_oracles(block):
  config = block_config(block)
  params = oracle.random_parameters(config, seed=1)
  is_sparse = config.num_experts is not None
  # The oracle computes experts token by token, without their positions.
  rows = random_tokens if is_sparse else random_documents
  batch = rows(config, batch_size=2, seed=2)
  mask = batch.get("segments", np.ones_like(batch["inputs"])) > 0
  watched, seen = _watch(params)
  given = (batch.get(x) for x in ("inputs", "segments"))
  oracle.forward(config, watched, *given)
  found = _compute(config, params, {**batch, "loss_weights": 1.0 * mask})
  names = {name for name, _ in seen}
  assert names == found.keys()
  for name in names:
    experts = config.num_experts if "/experts/" in name else None
    for i in range(experts or 1):
      ours = {k: y[i] if experts else y for k, y in found[name].items()}
      num_inputs = len(ours["sums"])
      seen_rows = [y.reshape(-1, num_inputs) for y in seen[name, i]]
      x = np.vstack([*seen_rows, np.zeros([0, num_inputs])])
      if not experts:
        x = x[mask.ravel()]
      assert ours["tokens"] == len(x), name
      for key, wanted in (("sums", (x**2).sum(0)), ("hessian", x.T @ x)):
        error = np.abs(ours[key] - wanted).max(initial=0)
        # The forward pass is in float32.
        assert error <= 1e-5 * np.abs(wanted).max(), (name, key)


def test_tokens_of_prompts_count_and_padding_does_not():
  """Loss weights of rows without segments are 0 at both."""
  weights = np.float32([[0, 0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1]])
  tokens = np.zeros(weights.shape, np.int32)
  batch = {"inputs": tokens, "targets": tokens, "loss_weights": weights}
  expected = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
  np.testing.assert_array_equal(_take_features(batch)["loss_weights"], expected)


def test_inputs_that_are_not_finite_are_one_error_line(tmp_path):
  config = block_config("LLaMA 3")
  params = oracle.random_parameters(config, seed=1)
  params["embedding"][:] = np.nan
  checkpoint = save_checkpoint(config, params, tmp_path)
  batch = random_tokens(config, batch_size=1, seed=2)
  with pytest.raises(UserError, match="are too large or not numbers"):
    collect_statistics(checkpoint, config, [batch])
