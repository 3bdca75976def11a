# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of the collectives within a mesh."""

import contextlib
import re
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf

# Among n devices with S bytes each, all of them together move
#   all-reduce      2 (n - 1) S
#   reduce-scatter    (n - 1) S    each device ends with its nth of the sum
#   all-gather        (n - 1) S    S is what each device ends with
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"

_SCOPE = re.compile(
  rf"(?:^|/)({ALL_REDUCE}|{ALL_GATHER}|{REDUCE_SCATTER})"
  r"\.([a-z]+(?:\.[a-z]+)*)(?:_\d+)?/"
)


def collective_scope(
  kind: str, shape: mtf.Shape, mesh_axes: Sequence[int]
) -> contextlib.AbstractContextManager:
  """Opens the name scope of a collective over mesh axes, in a mesh's shape."""
  if not mesh_axes:  # nothing moves
    return contextlib.nullcontext()
  # "all_reduce.data.model": traffic.py finds an operation's collective by it.
  return tf.name_scope(".".join([kind, *(shape[x].name for x in mesh_axes)]))


def collective_of(operation: str) -> tuple[str, tuple[str, ...]] | None:
  """Returns kind and axes of the collective of an operation, by its name."""
  found = _SCOPE.search(operation)
  return (found[1], tuple(found[2].split("."))) if found else None
