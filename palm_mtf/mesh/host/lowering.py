# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lowers Mesh TensorFlow graphs for CPUs and GPUs."""

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.call_stacks import one_call_stack
from palm_mtf.mesh.placement import Placement
from palm_mtf.mesh.slices import Slice, initialized


class HostLowering(mtf.Lowering):
  """`Lowering` of a whole graph at once; a session runs what a call needs."""

  def __init__(self, placements: Mapping[mtf.Mesh, Placement]):
    # mtf.Lowering's constructor is not called: it leaves a constant, say, to
    # TensorFlow, which may put it on another pod. Here each operation is on its
    # own pod.
    (self.graph,) = {mesh.graph for mesh in placements}
    self.mesh_to_impl = placements
    self.tensors, self.operations, self.variables = {}, {}, {}
    self._counters = []
    with _nothing_is_freed():
      for operation in self.graph.operations:
        host = self.mesh_impl(operation).host
        scope = tf.name_scope(operation.name)
        with scope, tf.device(host), one_call_stack():
          operation.lower(self)

  def call(
    self,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation] = (),
  ) -> tuple[dict[str, tf.Tensor], tf.Operation]:
    """Builds what one call into a session runs, on all pods."""
    # Slices of a tensor that is split are joined on one of its devices.
    values = {name: self.export_to_tf_tensor(x) for name, x in tensors.items()}
    return values, tf.group([self.lowered_operation(x) for x in operations])

  @property
  def slices(self) -> list[dict[str, list[Slice]]]:
    """Slices of each mesh's variables, by checkpoint name."""
    slices = {mesh: {} for mesh in self.mesh_to_impl}
    for variable, laid_out in self.variables.items():
      of_mesh = slices[variable.mesh]
      assert variable.name not in of_mesh, f"two variables {variable.name}"
      of_mesh[variable.name] = laid_out.slices
    return list(slices.values())

  @property
  def initialize(self) -> tf.Operation:
    """Sets every slice to its first value."""
    return initialized(self.slices)


@contextlib.contextmanager
def _nothing_is_freed() -> Iterator[None]:
  # Python would search the graph, which grows, for what is free in it.
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()
