# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefill and steps against a cache give the logits of one forward pass."""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.decode.decoder import Decoder
from palm_mtf.decode.weights import checkpoint_variables, make_weights
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.session import session_config
from palm_mtf.model.dims import model_dims
from tests import oracle
from tests.mtf_testing import (
  LAYOUTS,
  SINGLE,
  load_parameters,
  mesh_layout,
  placement,
  random_tokens,
  run_model,
  small_config,
)

ROWS, PROMPT = 4, 4


def cached_logits(
  config, params, inputs, mesh_rules=SINGLE, weight_dtype="activation"
):
  """Returns logits from the prompt's last place on, [rows, places, vocab]."""
  with tf.Graph().as_default():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dims = model_dims(config, ROWS, mesh_rules)
    checkpoint_variables(mesh, config, dims)
    impl = placement(mesh_rules)
    (slices,) = lower({mesh: impl}, {}).slices
    variables = {n: [x.variable for x in parts] for n, parts in slices.items()}
    weights = make_weights(impl, config, dims, variables, weight_dtype)
    decoder = Decoder(impl, config, dims, weights)

    def split(x):
      others = [mtf.Dimension(f"d{n}", n) for n in x.shape[1:]]
      shape = mtf.Shape([dims.batch, *others])
      return impl.LaidOutTensor(impl.make_slices(tf.constant(x), shape))

    y, cache = decoder.prefill(
      split(inputs[:, :PROMPT]), config.sequence_length
    )
    logits = [decoder.logits(impl.slicewise(lambda y: y[:, -1], y))]
    for place in range(PROMPT, config.sequence_length):
      position = split(np.full([ROWS], place, np.int32))
      step, cache = decoder.step(split(inputs[:, place]), position, cache)
      logits.append(step)
    shape = mtf.Shape([dims.batch, mtf.Dimension("tokens", config.vocab_size)])
    whole = [impl.combine_slices(x.tensor_list, shape) for x in logits]
    config_ = session_config(mesh_rules.num_devices)
    with tf.Session(config=config_) as session:
      load_parameters(session, slices, params)
      session.run(weights.initialize)
      return np.stack(
        session.run([tf.cast(x, tf.float32) for x in whole]), axis=1
      )


def full_logits(config, params, batch):
  return run_model(config, params, batch).logits[:, PROMPT - 1 :]


MULTI_HEAD = {"attention": "multi_head", "norm": "rms_norm"}
SERIAL = {"block": "serial"}
BOTH = {**MULTI_HEAD, **SERIAL}


@pytest.mark.parametrize(
  ("changes", "layout"),
  [
    ({}, "one device"),
    (MULTI_HEAD, "one device"),
    (SERIAL, "one device"),
    (BOTH, "one device"),
    ({}, "all over data and model"),
    pytest.param(BOTH, "all over data and model", marks=pytest.mark.slow),
    pytest.param({}, "two axes but no batch", marks=pytest.mark.slow),
    (MULTI_HEAD, "two axes but no batch"),
  ],
)
def test_cached_logits_equal_those_of_a_forward_pass(changes, layout):
  config = small_config(**changes)
  params = oracle.random_parameters(config, seed=1)
  batch = random_tokens(config, ROWS, seed=3)
  mesh = mesh_layout(layout) if layout in LAYOUTS else SINGLE
  cached = cached_logits(config, params, batch["inputs"], mesh)
  full = full_logits(config, params, batch)
  np.testing.assert_allclose(cached, full, atol=1e-5, rtol=0)


def test_bfloat16_is_off_by_its_rounding_alone():
  config = small_config(activation_dtype="bfloat16")
  params = oracle.random_parameters(config, seed=1)
  batch = random_tokens(config, ROWS, seed=3)
  cached = cached_logits(config, params, batch["inputs"])
  exact = oracle.forward(config, params, batch["inputs"])
  full = full_logits(config, params, batch)
  error = np.abs(cached - exact[:, PROMPT - 1 :]).max()
  assert error < 1.5 * np.abs(full - exact[:, PROMPT - 1 :]).max()


@pytest.mark.parametrize(
  "layout",
  [
    "all over data and model",
    pytest.param("two axes but no batch", marks=pytest.mark.slow),
  ],
)
def test_int8_logits_are_near_and_the_same_in_every_layout(layout):
  config = small_config()
  params = oracle.random_parameters(config, seed=1)
  batch = random_tokens(config, ROWS, seed=3)
  full = full_logits(config, params, batch)
  int8 = cached_logits(config, params, batch["inputs"], weight_dtype="int8")
  assert 1e-3 < np.abs(int8 - full).max() < 0.03 * np.abs(full).max()
  split = cached_logits(
    config, params, batch["inputs"], mesh_layout(layout), "int8"
  )
  np.testing.assert_allclose(split, int8, atol=1e-5, rtol=0)
