# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Root mean squares of updates and parameters, as metrics."""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.config.parameter_names import parsed


class SumOfSquares(NamedTuple):
  """Sum of squares of one variable, or of its update, in one step."""

  # "parameter", before the step, of a norm the scale minus one where NORM_SCALE
  # centers it; or "update", of u before it is clipped, in
  # units of the parameter's scale (adafactor.py): 1 is where clipping begins.
  of: str
  variable: str
  size: int  # numbers in the variable
  # [], float32; on the mesh, or as TensorFlow has it
  value: mtf.Tensor | tf.Tensor


def total(terms: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns the sum of float32 terms of one shape, in their order."""
  # Not tf.add_n: it adds to the memory of a term that nobody else holds, and
  # which term that is may change from step to step, and with it the last bit.
  return tf.reduce_sum(tf.stack(terms), axis=0)


def rms_by_kind(sums: Iterable[SumOfSquares]) -> dict[str, tf.Tensor]:
  """Returns [] float32 for each "update_rms/<kind>" and "parameter_rms/..."."""
  # The optimizer needs the sums of each variable anyway. Of all layers together
  # there is one for each kind: "embedding", "norm", "attention" and "mlp".
  by_name = collections.defaultdict(list)
  for each in sums:
    by_name[f"{each.of}_rms/{parsed(each.variable).kind}"].append(each)
  return {
    name: tf.sqrt(
      total([each.value for each in group])
      / float(sum(each.size for each in group))
    )
    for name, group in by_name.items()
  }
