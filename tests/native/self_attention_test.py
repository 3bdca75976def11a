# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention in C++, and its gradients, equal their definition in float64."""

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.native import layers as native
from palm_mtf.native.operations import operations
from tests.model.attention_test import attention_oracle

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler here"
)

DTYPES = {"float32": (np.float32, 2e-6), "bfloat16": (ml_dtypes.bfloat16, 0.02)}
# Full and partial blocks, tiles, panels and registers: batch,
# length, heads, d_kv, and whether each head has its own keys.
SHAPES = {
  "one position": (1, 1, 2, 4, False),
  "two blocks": (2, 300, 4, 64, False),
  "odd sizes": (3, 97, 3, 10, False),
  "two panels": (1, 130, 5, 80, False),
  "odd heads": (2, 97, 3, 7, False),
  "multi-head, odd heads": (1, 66, 2, 33, True),
  "multi-head": (2, 97, 3, 10, True),
  "multi-head, two panels": (1, 66, 2, 72, True),
}


def random(shape, kind, seed=0):
  """Returns q, k, v and dout."""
  batch, length, heads, d_kv, is_multi_head = shape
  rng = np.random.default_rng(seed)
  q, dout = rng.standard_normal([2, batch, length, heads, d_kv])
  own = [heads] if is_multi_head else []
  k, v = rng.standard_normal([2, batch, length, *own, d_kv])
  return [x.astype(kind) for x in (q, k, v, dout)]


def random_masks(shape, number, seed=1):
  """Returns at most `number` masks: segments with recurring ids, prefix."""
  rng = np.random.default_rng(seed)
  segments = rng.integers(4, size=shape[:2], dtype=np.int32)
  return [segments, rng.integers(2, size=shape[:2], dtype=np.int32)][:number]


def attended(q, k, v, dout, masks=(), threads=2):
  """Returns out, dq, dk and dv."""
  with tf.Graph().as_default(), tf.Session() as session:
    q, k, v, dout = (tf.constant(x) for x in (q, k, v, dout))
    masks = [tf.constant(x) for x in masks]
    out = native.attend(q, k, v, masks, threads=threads)
    gradients = native.attend_gradient(
      q, k, v, out, dout, masks, threads=threads
    )
    return session.run([out, *gradients])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_masks", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_and_gradients_equal_the_definition(shape, num_masks, dtype):
  kind, limit = DTYPES[dtype]
  given, masks = random(shape, kind), random_masks(shape, num_masks)
  found = attended(*given, masks)
  segments = masks[0] if masks else np.zeros(shape[:2], int)
  expected = attention_oracle(
    *(x.astype(np.float64) for x in given), segments, *masks[1:]
  )
  for x, y in zip(found, expected, strict=True):
    # A position that attends only to itself has no gradients of q and k.
    assert np.abs(x - y).max() <= limit * max(np.abs(y).max(), 1e-3)


@pytest.mark.parametrize("d_kv", [4, 7, 16, 64])
def test_a_position_that_sees_only_itself_has_no_gradient_of_scores(d_kv):
  given = random((1, 5, 2, d_kv, False), np.float32)
  segments = np.arange(5, dtype=np.int32)[np.newaxis]
  _, dq, dk, _ = attended(*given, [segments])
  assert not dq.any() and not dk.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
  shape = SHAPES["two blocks"]
  given = random(shape, DTYPES[dtype][0])
  one, three = (attended(*given, threads=n) for n in (1, 3))
  for x, y in zip(one, three, strict=True):
    assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_that_are_not_seen_change_nothing(dtype):
  """A loss in one segment has gradients of exactly 0 in other segments."""
  shape = (1, 200, 2, 16, False)
  q, k, v, dout = random(shape, DTYPES[dtype][0])
  segments = np.repeat([[1, 2]], 100, 1).astype(np.int32)
  dout[:, 100:] = 0
  out, *gradients = attended(q, k, v, dout, [segments])
  for dx in gradients:
    assert not dx[:, 100:].any()
  changed = [x.copy() for x in (q, k, v)]
  for x in changed:
    x[:, 100:] *= 7
  again, *gradients_again = attended(*changed, dout, [segments])
  np.testing.assert_array_equal(again[:, :100], out[:, :100])
  for x, y in zip(gradients_again, gradients, strict=True):
    np.testing.assert_array_equal(x, y)


def test_huge_scores_choose_one_key_and_nan_stays_nan():
  """They affect only their own rows."""
  shape = (1, 40, 1, 8, False)
  q, k, v, dout = random(shape, np.float32)
  expected, *_ = attended(q, k, v, dout)
  q[0, 20] *= 1e6
  q[0, 30] = np.nan
  out, *_ = attended(q, k, v, dout)
  chosen = np.argmax(k[0, :21] @ q[0, 20, 0])
  np.testing.assert_allclose(out[0, 20, 0], v[0, chosen], rtol=1e-6)
  assert np.isnan(out[0, 30]).all()
  others = [i for i in range(40) if i not in (20, 30)]
  np.testing.assert_array_equal(out[0, others], expected[0, others])
