# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Function that keeps an adapter for the texts that name it by its number."""

import dataclasses
from collections.abc import Mapping

from palm_mtf._tf import tf
from palm_mtf.generation.decode.functions import DecodeFunction, Effect
from palm_mtf.generation.decode.rows import State
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.native.adapters import keep_adapter


@dataclasses.dataclass(frozen=True)
class KeepAdapter(DecodeFunction):
  """Keeps an adapter under a number, or drops it.

  Inputs:
    number, parts, values: as `keep_adapter` takes them.

  Outputs:
    kept: int32: number of adapters that are kept; -1 if steps are not in C++,
      so that nothing can add adapters.
  """

  effect = Effect.READS

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    return {
      "number": tf.TensorSpec([], tf.int32),
      "parts": tf.TensorSpec([None, 6], tf.int32),
      "values": tf.TensorSpec([None], tf.float32),
    }

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    return {"kept": tf.int32}

  def __call__(
    self, model: DecodeModel, state: State, inputs: Mapping[str, tf.Tensor]
  ) -> tuple[State, dict[str, tf.Tensor]]:
    """Builds the operation; returns the same state, and the output."""
    if not model.is_native:
      return state, {"kept": tf.constant(-1)}
    dtype = tf.as_dtype(model.config.activation_dtype)
    return state, {"kept": keep_adapter(**inputs, dtype=dtype)}
