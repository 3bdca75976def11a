# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One call's tensors and operations of a Mesh TensorFlow graph, lowered."""

import dataclasses
from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.placement import Placement
from palm_mtf.mesh.slices import Slice


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A lowered graph, and what one `call` of it gives; see `Lowering`."""

  tensors: dict[str, tf.Tensor]
  operations: tf.Operation
  initialize: tf.Operation
  slices: list[dict[str, list[Slice]]]


def lower(
  placements: Mapping[mtf.Mesh, Placement],
  tensors: Mapping[str, mtf.Tensor],
  operations: Sequence[mtf.Operation] = (),
) -> Lowered:
  """Lowers all meshes of one graph, for one call."""
  # All placements of a graph are of one class, which lowers it.
  first, *_ = placements.values()
  lowering = first.lower(placements)
  values, done = lowering.call(tensors, operations)
  return Lowered(values, done, lowering.initialize, lowering.slices)
