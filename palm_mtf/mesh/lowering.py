# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lowers a Mesh TensorFlow graph to TensorFlow: the only place that does.

What comes out is plain TensorFlow: tensors to fetch, operations to run and the
slices of every variable to initialize, save and restore.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.placement import Slice, SlicePlacement


@dataclasses.dataclass(frozen=True)
class Lowered:
  """One lowered graph.

  Attributes:
    tensors: what was asked for, gathered from its slices.
    operations: all operations asked for, as one.
    accumulations: for each mesh, in order, the accumulations asked for, as one
    operation.
    initialize: sets every variable to its first value.
    slices: for each mesh, in order, the slices of every variable by its
      checkpoint name; of a stack (placement.py), by that of its first.
  """

  tensors: dict[str, tf.Tensor]
  operations: tf.Operation
  accumulations: list[tf.Operation]
  initialize: tf.Operation
  slices: list[dict[str, list[Slice]]]


class _Lowering(mtf.Lowering):
  """Lowers operation by operation, each on the devices of its own mesh."""

  def __init__(
    self, graph: mtf.Graph, placements: Mapping[mtf.Mesh, SlicePlacement]
  ):
    """Lowers all of `graph`."""
    # As in mtf.Lowering, whose constructor is not called because it leaves a
    # constant, say, to TensorFlow, which may put it on another pod.
    self.graph = graph
    self.mesh_to_impl = placements
    self.tensors, self.operations, self.variables = {}, {}, {}
    self._counters = []
    with _nothing_is_freed():
      for operation in graph.operations:
        host = self.mesh_impl(operation).host
        with tf.name_scope(operation.name), tf.device(host):
          operation.lower(self)


@contextlib.contextmanager
def _nothing_is_freed() -> Iterator[None]:
  """Keeps Python from searching a graph that grows for what is free in it."""
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


def lower(
  placements: Mapping[mtf.Mesh, SlicePlacement],
  tensors: Mapping[str, mtf.Tensor],
  operations: Sequence[mtf.Operation] = (),
  accumulations: Sequence[mtf.Operation] = (),
) -> Lowered:
  """Lowers all meshes of one graph, and exports what is asked for."""
  (graph,) = {mesh.graph for mesh in placements}
  lowering = _Lowering(graph, placements)
  slices = {mesh: {} for mesh in placements}
  for variable, laid_out in lowering.variables.items():
    of_mesh = slices[variable.mesh]
    assert variable.name not in of_mesh, f"two variables {variable.name}"
    of_mesh[variable.name] = laid_out.slices
  return Lowered(
    tensors={
      name: lowering.export_to_tf_tensor(tensor)
      for name, tensor in tensors.items()
    },
    operations=tf.group([lowering.lowered_operation(op) for op in operations]),
    accumulations=[
      tf.group(
        [
          lowering.lowered_operation(op)
          for op in accumulations
          if op.mesh is mesh
        ]
      )
      for mesh in placements
    ],
    initialize=initialized(list(slices.values())),
    slices=list(slices.values()),
  )


def initialized(
  slices: Sequence[Mapping[str, Sequence[Slice]]],
) -> tf.Operation:
  """Returns what sets every slice of every mesh to its first value."""
  return tf.group(
    [
      part.variable.initializer
      for of_mesh in slices
      for parts in of_mesh.values()
      for part in parts
    ]
  )
