# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A joined product and its gradients are those of the separate kernels."""

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.mesh.session import session_config
from palm_mtf.model.matmul import (
  joined_input_gradient,
  joined_kernel_gradients,
  matmul_joined,
)
from palm_mtf.native.operations import threads_here

SHAPES = [[7, 4], [40], [2]]  # of kernels, without their 12 inputs


# Without threads, no operation in C++ runs. On CPUs whose bfloat16 products
# oneDNN computes, the kernels' gradient multiplies by a copy of x.
@pytest.mark.parametrize("has_threads", [True, False])
@pytest.mark.parametrize(
  ("dtype", "tolerance"), [(np.float32, 1e-5), (ml_dtypes.bfloat16, 2**-8)]
)
def test_joined_products_are_those_of_separate_kernels(
  dtype, tolerance, has_threads
):
  rng = np.random.default_rng(0)
  x, dy, *kernels = (
    rng.normal(size=shape).astype(dtype)
    for shape in ([40, 12], [40, 70], *([12, *shape] for shape in SHAPES))
  )
  threads = threads_here() if has_threads else 0
  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    x_, dy_, *kernels_ = map(tf.constant, (x, dy, *kernels))
    y, dx, dkernels = session.run(
      [
        matmul_joined(x_, kernels_, threads=threads),
        joined_input_gradient(dy_, kernels_, threads=threads),
        joined_kernel_gradients(x_, dy_, SHAPES, threads=threads),
      ]
    )
  assert [list(each.shape) for each in dkernels] == [[12, *s] for s in SHAPES]
  dkernel = np.concatenate([each.reshape(12, -1) for each in dkernels], 1)
  x, dy, *kernels = (a.astype(np.float64) for a in (x, dy, *kernels))
  joined = np.concatenate([each.reshape(12, -1) for each in kernels], 1)
  for found, expected in (
    (y, x @ joined),
    (dx, dy @ joined.T),
    (dkernel, x.T @ dy),
  ):
    assert found.dtype == dtype
    largest = np.abs(expected).max()
    np.testing.assert_allclose(
      found.astype(np.float64), expected, rtol=0, atol=tolerance * largest
    )
