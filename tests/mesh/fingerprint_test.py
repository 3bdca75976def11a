# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints follow their formula and see any one changed bit."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.mesh.fingerprint import build_fingerprints
from palm_mtf.mesh.placement import Slice, session_config


def fingerprints(*variables):
  """Returns the fingerprint of each variable, a list of slices."""
  with tf.Graph().as_default(), tf.Session(config=session_config(2)) as session:
    slices = {}
    for number, parts in enumerate(variables):
      slices[str(number)] = []
      for i, part in enumerate(parts):
        with tf.device(f"/device:cpu:{i}"):
          variable = tf.Variable(part, use_resource=True)
        slices[str(number)].append(
          Slice([str(number)], variable, "", list(variable.shape), True)
        )
    result = build_fingerprints(slices)
    session.run(tf.global_variables_initializer())
    return session.run(result)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_holds(dtype):
  dtype, rng = tf.as_dtype(dtype).as_numpy_dtype, np.random.default_rng(0)
  parts = [rng.normal(size=[3, 5]).astype(dtype) for _ in range(2)]
  kind = {2: np.uint16, 4: np.uint32}[parts[0].itemsize]
  total = sum(
    int(bits) * (2 * i + 1) * (2 * s + 1)
    for s, part in enumerate(parts)
    for i, bits in enumerate(part.view(kind).ravel())
  )
  (number,) = fingerprints(parts)
  assert int(number) % 2**64 == total % 2**64


def test_any_flipped_bit_and_any_exchange_is_seen():
  x = np.random.default_rng(1).normal(size=[4, 7]).astype(np.float32)
  changed = []
  for bit in range(32):
    y = x.copy()
    y.view(np.uint32)[bit % 4, bit % 7] ^= np.uint32(1 << bit)
    changed.append([y])
  zero = x.copy()
  zero[2, 2] = 0.0
  minus = zero.copy()
  minus[2, 2] = -0.0
  others = [[x[::-1].copy()], [x[:2], x[2:]], [x[2:], x[:2]], [zero], [minus]]
  numbers = fingerprints([x], [x.copy()], *changed, *others)
  assert numbers[0] == numbers[1]
  assert len(set(numbers[1:].tolist())) == len(numbers) - 1
