# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks are a hash of (SEED, step, place, row, position).

A place is one use of dropout in the model; a row is a sequence's index in the
batch of all pods. A random generator with a state would depend on how the batch
is split into slices and microbatches; a hash does not. A kept activation x
becomes x / (1 - rate); a dropped activation becomes 0.
"""

import dataclasses

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.threefry import threefry
from palm_mtf.ops.xla import fused

DROPOUT_STATE = mtf.Dimension("dropout_state", 4)


def _words(number):  # the lower 64 bits, as two 32-bit words for Threefry
  return [
    tf.constant((number >> shift) % 2**32, tf.uint32) for shift in (0, 32)
  ]


@fused
def _drop(first_row, x, state, place, seed, rate):
  step, batch_row, is_on, first_place = tf.unstack(state)
  rows, length, width = x.shape
  # Threefry hashes each counter to two numbers, one for each half of d_model.
  half = -(-width // 2)
  row = tf.range(rows) + (first_row + batch_row)
  counter = [
    tf.cast(tf.reshape(row, [rows, 1, 1]), tf.uint32),
    tf.cast(tf.reshape(tf.range(length * half), [1, length, half]), tf.uint32),
  ]
  counter = [tf.broadcast_to(each, [rows, length, half]) for each in counter]
  key = threefry(
    _words(seed),
    [tf.cast(step, tf.uint32), tf.cast(first_place + place, tf.uint32)],
  )
  bits = tf.concat(threefry(key, counter), -1)[..., :width]
  keeps = bits >= tf.constant(round(rate * 2**32), tf.uint32)
  scaled = tf.where_v2(keeps, tf.cast(x, tf.float32) / (1.0 - rate), 0.0)
  return tf.where_v2(is_on > 0, tf.cast(scaled, x.dtype), x)


@dataclasses.dataclass(frozen=True)
class Dropout:
  """Dropout in one training step."""

  rate: float  # share of the activations to drop, above 0 and below 1
  seed: int  # seed of the run
  # [4], int32: the step, from 0; the index of the microbatch's first row in the
  # step's batch; 1 to drop activations, 0 to drop none; and an offset to add to
  # `place`. The offset is 0 unless all layers run the graph of one layer.
  state: mtf.Tensor

  def __call__(self, x: mtf.Tensor, place: int) -> mtf.Tensor:
    """Applies dropout to x [batch, length, d_model]; keeps its dtype.

    `place` is the index of this use of dropout in the model; each use has its
    own mask.
    """

    def drop(first_row, x, state):
      at = tf.constant(place)
      return _drop(first_row, x, state, at, self.seed, self.rate)

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
      # The backward pass recomputes the mask, so that no mask is kept.
      return [apply(dy, op.inputs[1]), None]

    return apply(x, self.state, gradient)
