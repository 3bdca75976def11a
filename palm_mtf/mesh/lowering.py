# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lowers a Mesh TensorFlow graph to TensorFlow: the only place that does.

What comes out is plain TensorFlow: tensors to fetch, operations to run and the
slices of every variable to initialize, save and restore.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.placement import Slice, SlicePlacement


@dataclasses.dataclass(frozen=True)
class Lowered:
  """One lowered graph.

  Attributes:
    tensors: what was asked for, gathered from its slices.
    operations: all operations asked for, as one.
    accumulations: the same of those.
    initialize: sets every variable to its first value.
    slices: the slices of every variable, by its checkpoint name.
  """

  tensors: dict[str, tf.Tensor]
  operations: tf.Operation
  accumulations: tf.Operation
  initialize: tf.Operation
  slices: dict[str, list[Slice]]


def lower(
  mesh: mtf.Mesh,
  placement: SlicePlacement,
  tensors: Mapping[str, mtf.Tensor],
  operations: Sequence[mtf.Operation] = (),
  accumulations: Sequence[mtf.Operation] = (),
) -> Lowered:
  """Lowers everything on `mesh`, and exports what is asked for."""
  lowering = mtf.Lowering(mesh.graph, {mesh: placement}, autostack=False)
  slices = {
    variable.name: laid_out.slices
    for variable, laid_out in lowering.variables.items()
  }
  return Lowered(
    tensors={
      name: lowering.export_to_tf_tensor(tensor)
      for name, tensor in tensors.items()
    },
    operations=tf.group([lowering.lowered_operation(op) for op in operations]),
    accumulations=tf.group(
      [lowering.lowered_operation(op) for op in accumulations]
    ),
    initialize=tf.group(
      [s.variable.initializer for parts in slices.values() for s in parts]
    ),
    slices=slices,
  )
