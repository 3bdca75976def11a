# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks are a function of (SEED, step, place, row, position).

  y = x / (1 - rate) where a number is kept, else 0

A generator with a state would draw other masks under another layout. Here each
number of the activations has a counter, its place in the global batch, and a
hash of it decides (ops/threefry.py). So a slice computes its own part of one
mask, however the batch is cut into slices and microbatches. The gradient
computes the mask again, and nothing is kept for it.
"""

import dataclasses

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.threefry import threefry
from palm_mtf.ops.xla import fused


def _words(number):
  """Returns a whole number's lower 64 bits as two of 32."""
  return [
    tf.constant((number >> shift) % 2**32, tf.uint32) for shift in (0, 32)
  ]


@fused
def _dropped(first_row, x, state, place, seed, rate):
  """Drops from x [batch, length, d_model]; see Dropout for the rest."""
  step, batch_row, is_on = tf.unstack(state)
  rows, length, width = x.shape
  # Two numbers from each counter: of the first and the second half of d_model.
  half = -(-width // 2)
  row = tf.range(rows) + (first_row + batch_row)
  counter = [
    tf.cast(tf.reshape(row, [rows, 1, 1]), tf.uint32),
    tf.cast(tf.reshape(tf.range(length * half), [1, length, half]), tf.uint32),
  ]
  counter = [tf.broadcast_to(each, [rows, length, half]) for each in counter]
  key = threefry(
    _words(seed), [tf.cast(step, tf.uint32), tf.cast(place, tf.uint32)]
  )
  bits = tf.concat(threefry(key, counter), -1)[..., :width]
  keeps = bits >= tf.constant(round(rate * 2**32), tf.uint32)
  scaled = tf.where_v2(keeps, tf.cast(x, tf.float32) / (1.0 - rate), 0.0)
  return tf.where_v2(is_on > 0, tf.cast(scaled, x.dtype), x)


@dataclasses.dataclass(frozen=True)
class Dropout:
  """Drops numbers from activations of one step.

  Attributes:
    rate: share that is dropped, above 0 and below 1.
    seed: seed of the run.
    state: [3], int32: the step from 0, the place of the batch's first row in
      the batch of the step, and 1; or 0 to drop nothing.
  """

  rate: float
  seed: int
  state: mtf.Tensor

  def __call__(self, x: mtf.Tensor, place: int) -> mtf.Tensor:
    """Returns x, [batch, length, d_model], with some numbers dropped.

    Args:
      x: activation dtype.
      place: number of the place in the model where x is.
    """

    def drop(first_row, x, state):
      place_ = tf.constant(place)
      return _dropped(first_row, x, state, place_, self.seed, self.rate)

    def apply(x, state, gradient=None):
      return WholeSlice(
        drop,
        [x, state],
        [(x.shape, x.dtype)],
        splittable=["batch"],
        gradient=gradient,
        offset_of=x.shape.dims[0],
        name="dropout",
      ).outputs[0]

    def gradient(op, dy):
      return [apply(dy, op.inputs[1]), None]

    return apply(x, self.state, gradient)
