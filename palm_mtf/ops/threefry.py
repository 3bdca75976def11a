# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Threefry-2x32 with 20 rounds, a stateless random number generator."""

from collections.abc import Sequence

from palm_mtf._tf import tf

# Threefry hashes a counter under a key (Salmon et al. 2011). Every device gets
# the same hash, because integer arithmetic is exact.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(
  key: Sequence[tf.Tensor], counter: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
  """Hashes counters of two 32-bit words; returns both words of each hash.

  Args:
    key: both words of the keys, uint32; broadcast against the counters.
    counter: both words of the counters, uint32.
  """
  a, b = counter
  keys = [*key, tf.constant(_PARITY, tf.uint32)]
  keys[2] = tf.bitwise.bitwise_xor(keys[2], tf.bitwise.bitwise_xor(*key))
  a, b = a + keys[0], b + keys[1]
  for i in range(1, 6):
    for bits in _ROTATIONS[(i - 1) % 2]:  # four rounds, then keys are added
      a += b
      high = tf.bitwise.left_shift(b, tf.constant(bits, tf.uint32))
      low = tf.bitwise.right_shift(b, tf.constant(32 - bits, tf.uint32))
      b = tf.bitwise.bitwise_xor(tf.bitwise.bitwise_or(high, low), a)
    a += keys[i % 3]
    b += keys[(i + 1) % 3] + tf.constant(i, tf.uint32)
  return a, b
