# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with kernels: their number, and the rounding of their results."""

import collections

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.mesh.session import session_config
from palm_mtf.model.product import product
from palm_mtf.model.weights import initializer
from palm_mtf.programs.train_program import build_train_program
from tests.mtf_testing import (
  LAYOUTS,
  SINGLE,
  lower,
  mesh_layout,
  placement,
  small_config,
)
from tests.settings import step_config

# Kernels of a layer, by the axis that splits them.
ONE_AXIS = [
  x
  for x, (_, rules) in LAYOUTS.items()
  if x not in ("heads over model", "d_ff over model", "two axes but no batch")
]


def products_on_one_device(config, mesh):
  """Returns how many products of matrices a step has on a device."""
  with tf.Graph().as_default():
    config = step_config(config, mesh)
    program = build_train_program(config, batch_size=4, seed=0)
    seen, todo = set(), [*program.update.operations]
    while todo:
      op = todo.pop()
      if op not in seen:
        seen.add(op)
        todo += [x.op for x in op.inputs] + op.control_inputs
  found = collections.Counter(x.device for x in seen if x.type == "MatMul")
  return set(found.values())


@pytest.mark.parametrize(
  ("changes", "deviation"),
  [
    ({}, 1.0),
    ({"logits_scale": 1.0}, 24**-0.5),
    ({"logits_scale": 1.0, "embedding_scale": 3.0}, 3 * 24**-0.5),
    ({"output_embedding": "separate", "embedding_scale": 3.0}, 3.0),
  ],
)
def test_learned_positions_are_at_first_as_large_as_tokens(changes, deviation):
  """Otherwise they would hide the tokens, to which they are added."""
  config = small_config(positions="learned", **changes)
  tokens, positions = (
    initializer(parse_name(name), config, (), seed=0).stddev
    for name in ("embedding", "position_embedding")
  )
  assert positions == tokens * config.embedding_scale
  assert positions == pytest.approx(deviation)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ONE_AXIS)
def test_kernels_that_read_one_norm_are_one_product_in_every_layout(layout):
  """One product forward and two backward; the same for o, wo and logits."""
  parallel = small_config(num_layers=2)
  serial = small_config(num_layers=1, block="serial")
  mesh = mesh_layout(layout)
  assert products_on_one_device(parallel, mesh) == {3 * (2 * 3 + 1)}
  assert products_on_one_device(serial, mesh) == {3 * (4 + 1)}


@pytest.mark.parametrize("layout", ["heads over model", "d_ff over model"])
def test_two_axes_need_a_product_more_on_the_way_back(layout):
  """Terms summed over an axis cannot share a sum with other terms."""
  config = small_config(num_layers=1)
  found = products_on_one_device(config, mesh_layout(layout))
  assert found == {3 * (3 + 1) + 1}


def bfloat16(x):
  return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def multiplied(x, kernel, dy, mesh=SINGLE, **how):
  """Returns the product of bfloat16 numbers and the gradient of the kernel."""
  with tf.Graph().as_default():
    mtf_mesh = mtf.Mesh(mtf.Graph(), "mesh")
    names = "batch", "length", "d_model", "vocab"
    sizes = zip(names, (*x.shape, len(kernel)), strict=True)
    batch, length, inner, vocab = (mtf.Dimension(*each) for each in sizes)

    def imported(value, *dims):
      value = tf.constant(value, tf.bfloat16)
      return mtf.import_tf_tensor(mtf_mesh, value, mtf.Shape(dims))

    x = imported(x, batch, length, inner)
    kernel = imported(kernel, vocab, inner)
    dy = imported(dy, batch, length, vocab)
    y = product(x, kernel, transpose=True, **how)
    dy = mtf.cast(dy, y.dtype)
    (gradient,) = mtf.gradients([y], [kernel], grad_ys=[dy])
    lowered = lower({mtf_mesh: placement(mesh)}, {"y": y, "gradient": gradient})
    with tf.Session(config=session_config(mesh.num_devices)) as session:
      found = session.run(lowered.tensors)
  return {name: value.astype(np.float32) for name, value in found.items()}


def test_logits_in_float32_are_exact_where_bfloat16_rounds_to_an_eighth():
  """Near 16, numbers of 8 bits are 0.125 (nats) apart."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal([2, 5, 64]).astype(np.float32)
  kernel = (4 * rng.standard_normal([32, 64])).astype(np.float32)
  dy = np.zeros([2, 5, 32], np.float32)
  exact = bfloat16(x) @ bfloat16(kernel).T
  assert np.abs(exact).max() > 64
  whole = multiplied(x, kernel, dy, dtype=tf.float32)["y"]
  rounded = multiplied(x, kernel, dy)["y"]
  assert np.abs(whole - exact).max() < 1e-4
  assert np.abs(rounded - exact).max() > 0.1


@pytest.mark.parametrize("gradient_dtype", [None, tf.float32])
def test_gradients_of_four_devices_are_added_up_in_the_dtype_that_is_asked(
  gradient_dtype,
):
  """256 + 1 + 1 + 1 is 259, which has 9 bits."""
  dy = np.ones([4, 1, 8], np.float32)
  dy[0] = 256
  x, kernel = np.ones_like(dy), np.ones([8, 8], np.float32)
  how = {"mesh": mesh_layout("fully sharded"), "gradient_dtype": gradient_dtype}
  seen = multiplied(x, kernel, dy, **how)
  is_exact = seen["gradient"] == 259
  assert is_exact.all() if gradient_dtype else not is_exact.any()
