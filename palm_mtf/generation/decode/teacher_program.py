# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Function that computes a teacher's distributions in one forward pass."""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.generation.decode.forward import (
  build_palm,
  import_rows,
  run_blocks,
  take_slices,
)
from palm_mtf.generation.decode.functions import (
  Built,
  DecodeFunction,
  Effect,
  Inputs,
)
from palm_mtf.generation.decode.rows import State, join_rows, split_rows
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.ops.slicewise import split_axes

_LEAST = -1e9  # instead of log(0): it may be multiplied by 0


@dataclasses.dataclass(frozen=True)
class TeachRows(DecodeFunction):
  """Reads rows as training does, with decoding's weights.

  Inputs:
    inputs, segments: [rows, length], int32 (FEATURE_DTYPES).
    uniform: [rows, length], float32 in [0, 1): decides which tokens are drawn.

  Outputs (p is the softmax of the logits divided by `temperature`):
    teacher_ids: [rows, length, count], int32: the likeliest tokens if `targets`
      is "top", tokens drawn from p if it is "sampled"; no output if "full".
    teacher_log_p: float32: log p of these tokens, shaped like them; if "full",
      of all tokens, [rows, length, vocab].
  """

  num_rows: int  # divisible by the number of slices of `batch`
  length: int  # at most the model's sequence_length
  targets: str
  count: int  # less than the model's vocab_size
  temperature: float

  effect = Effect.READS

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    dtypes = {"inputs": tf.int32, "segments": tf.int32, "uniform": tf.float32}
    shape = [self.num_rows, self.length]
    return {name: tf.TensorSpec(shape, x) for name, x in dtypes.items()}

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    ids = {} if self.targets == "full" else {"teacher_ids": tf.int32}
    return {**ids, "teacher_log_p": tf.float32}

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds one forward pass; returns the same state, and the outputs."""
    impl = model.placement
    mesh, shape, palm = build_palm(model, self.num_rows, self.length)
    tokens, segments = (
      import_rows(model, mesh, inputs[x], shape) for x in ("inputs", "segments")
    )
    x = run_blocks(model, palm, palm.embed(tokens, segments), [segments])
    logits = palm.unembed(palm.last_norm(x))
    (whole,) = take_slices(model, mesh, [logits])
    for axis in split_axes(impl, [model.dims.vocab]):
      whole = impl.allconcat(whole, axis, 2)
    found = impl.slicewise(
      self._find, whole, split_rows(impl, inputs["uniform"])
    )
    outputs = found if isinstance(found, tuple) else [found]
    return state, {
      name: join_rows(impl, x)
      for name, x in zip(self.output_dtypes(), outputs, strict=True)
    }

  def _find(
    self, logits: tf.Tensor, uniform: tf.Tensor
  ) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    logits = tf.cast(logits, tf.float32) / self.temperature
    log_p = tf.maximum(tf.nn.log_softmax(logits), _LEAST)
    if self.targets == "full":
      return log_p
    if self.targets == "top":
      top, ids = tf.math.top_k(log_p, self.count)
      return ids, top
    # Systematic sampling: draws are at equal distances in the cumulative
    # distribution, from a random start. A token gets count * p draws on
    # average, as with independent draws, but is never further than one draw
    # from that, so gradients have less noise. Sums are float64: in float32, the
    # unlikely tokens of a large vocabulary would not increase a sum near 1.
    ends = tf.cumsum(tf.cast(tf.exp(log_p), tf.float64), axis=-1)
    uniform = tf.cast(uniform, tf.float64)[..., tf.newaxis]
    draws = tf.range(self.count, dtype=tf.float64) + uniform
    ids = tf.searchsorted(
      ends, draws * (ends[..., -1:] / self.count), side="right"
    )
    ids = tf.minimum(ids, logits.shape[-1] - 1)  # the last draw may round up
    # So it may be a token whose p is 0, such as one that pads the vocabulary.
    is_possible = tf.exp(tf.gather(log_p, ids, batch_dims=2)) > 0
    likeliest = tf.argmax(log_p, -1, output_type=tf.int32)[..., tf.newaxis]
    ids = tf.where_v2(is_possible, ids, likeliest)
    return ids, tf.gather(log_p, ids, batch_dims=2)
