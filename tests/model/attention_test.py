# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention reads earlier positions of a segment; blocks change nothing."""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.attention_blocks import attention_blocks, block_pairs
from palm_mtf.model.attention import self_attention
from tests.mtf_testing import lowered_values, without_compiler

BATCH, HEADS = mtf.Dimension("batch", 2), mtf.Dimension("heads", 2)
D_KV = mtf.Dimension("d_kv", 4)


def test_blocks_follow_each_other_and_the_last_one_may_be_short():
  assert attention_blocks(128) == ((0, 128, 0, 128),)
  blocks = (0, 128, 0, 128), (128, 256, 0, 256), (256, 300, 0, 300)
  assert attention_blocks(300) == blocks
  assert attention_blocks(8192)[-1] == (7680, 8192, 0, 8192)
  assert block_pairs(300) == (128 * 128, 128 * 256, 44 * 300)


def test_a_prefix_may_lie_behind_a_block_which_meets_all_keys_then():
  assert sum(block_pairs(300, has_prefix=True)) == 300 * 300


def attention_oracle(q, k, v, dout, segments, prefix=None):
  """Returns out, dq, dk and dv of every head, by definition."""
  length, d_kv = q.shape[1], q.shape[-1]
  if k.ndim == 3:  # one head for all
    k, v = (np.stack([x] * q.shape[2], 2) for x in (k, v))
    out, dq, dk, dv = attention_oracle(q, k, v, dout, segments, prefix)
    return out, dq, dk.sum(2), dv.sum(2)
  visible = np.tril(np.ones([length, length], bool))
  if prefix is not None:
    visible = visible | (prefix[:, None, :] > 0)
  visible = visible & (segments[:, :, None] == segments[:, None, :])
  scores = np.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(d_kv)
  weights = np.where(visible[:, None], np.exp(scores), 0)
  weights /= weights.sum(-1, keepdims=True)
  out = np.einsum("bhlm,bmhk->blhk", weights, v)
  dweights = np.einsum("blhk,bmhk->bhlm", dout, v)
  mean = (weights * dweights).sum(-1, keepdims=True)
  dscores = weights * (dweights - mean) / np.sqrt(d_kv)
  return (
    out,
    np.einsum("bhlm,bmhk->blhk", dscores, k),
    np.einsum("bhlm,blhk->bmhk", dscores, q),
    np.einsum("bhlm,blhk->bmhk", weights, dout),
  )


def attend(dtype, keeps_weights, q, k, v, dout, *masks):
  """Returns out, dq, dk and dv, float32."""
  length = mtf.Dimension("length", q.shape[1])
  memory_length = mtf.Dimension("memory_length", q.shape[1])
  own = [BATCH, length, HEADS, D_KV]
  memory = [BATCH, memory_length, *([HEADS] * (k.ndim == 4)), D_KV]

  def build(q, k, v, dout, **masks):
    q, k, v, dout = (mtf.cast(x, dtype) for x in (q, k, v, dout))
    out = self_attention(q, k, v, **masks, keeps_weights=keeps_weights)
    gradients = mtf.gradients([out], [q, k, v], [dout])
    names = ("out", "dq", "dk", "dv")
    return dict(zip(names, [out, *gradients], strict=True))

  given = {"q": (q, own), "k": (k, memory), "v": (v, memory)}
  for name, x in zip(("segments", "prefix"), masks, strict=False):
    given[name] = x, [BATCH, length]
  found = lowered_values(build, **given, dout=(dout, own))
  return [found[x].astype(np.float32) for x in ("out", "dq", "dk", "dv")]


# These hold every pair of choices.
@pytest.mark.parametrize(
  ("length", "is_multi_head", "has_prefix"),
  [
    (300, False, False),
    (300, True, True),
    (100, False, True),
    (100, True, False),
  ],
)
@pytest.mark.parametrize("has_compiler", [True, False])
def test_blocks_attend_as_all_positions_at_once_whatever_they_keep(
  has_compiler, length, is_multi_head, has_prefix, monkeypatch
):
  """Segments recur in any order; prefixes reach over blocks."""
  if not has_compiler:
    without_compiler(monkeypatch)
  rng = np.random.default_rng(length)
  q, dout = rng.standard_normal([2, 2, length, 2, 4], dtype=np.float32)
  shape = [2, 2, length, *([2] * is_multi_head), 4]
  k, v = rng.standard_normal(shape, dtype=np.float32)
  segments = rng.integers(4, size=[2, length], dtype=np.int32)
  given = (q, k, v, dout, segments)
  if has_prefix:
    given += (rng.integers(2, size=[2, length], dtype=np.int32),)
  expected = attention_oracle(*(x.astype(float) for x in given))
  for dtype, limit in ((tf.float32, 2e-6), (tf.bfloat16, 0.02)):
    kept = attend(dtype, True, *given)
    for x, y in zip(kept, expected, strict=True):
      assert np.abs(x - y).max() <= limit * np.abs(y).max()
    again = attend(dtype, False, *given)
    for x, y in zip(kept, again, strict=True):
      np.testing.assert_array_equal(x, y)
