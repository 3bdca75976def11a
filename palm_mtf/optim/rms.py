# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Root mean squares of updates and parameters, for people to look at.

The optimizer needs the sums of squares of each variable anyway; here they are
added up over all layers, by kind: "embedding", "norm", "attention" and "mlp". A
parameter's is that before the step, an update's that of u before it is clipped,
in units of the parameter's scale (adafactor.py): 1 is where clipping begins.
"""

import collections
from collections.abc import Iterable
from typing import NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.config.parameter_names import parsed


class SumOfSquares(NamedTuple):
  """What the optimizer measured of one variable in one step.

  Attributes:
    of: "update" or "parameter".
    variable: its name.
    size: how many numbers it has.
    value: [], float32; on the mesh, or as TensorFlow has it.
  """

  of: str
  variable: str
  size: int
  value: mtf.Tensor | tf.Tensor


def rms_by_kind(sums: Iterable[SumOfSquares]) -> dict[str, tf.Tensor]:
  """Returns [] float32 for each "update_rms/<kind>" and "parameter_rms/..."."""
  by_name = collections.defaultdict(list)
  for each in sums:
    by_name[f"{each.of}_rms/{parsed(each.variable).kind}"].append(each)
  return {
    name: tf.sqrt(
      tf.add_n([each.value for each in group])
      / float(sum(each.size for each in group))
    )
    for name, group in by_name.items()
  }
