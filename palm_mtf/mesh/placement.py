# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface between a program and the devices that run it.

  Devices      all pods, by name
  Placement    one pod: slices of tensors and variables, collectives
  Lowering     one Mesh TensorFlow graph of all pods, as TensorFlow

mesh/cpu_gpu.py implements it for CPUs and GPUs, mesh/tpu/ for TPUs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palm_mtf._tf import mtf, tf
from palm_mtf.config import MeshLayout
from palm_mtf.mesh.slices import Slice

# Among n devices with S bytes each, all of them together move
#   all-reduce      2 (n - 1) S
#   reduce-scatter    (n - 1) S    each device ends with its nth of the sum
#   all-gather        (n - 1) S    S is what each device ends with
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"


class LaidOut(Protocol):
  """The slices of a tensor or a variable; a sum of them may be pending."""

  def to_laid_out_tensor(self) -> "LaidOut":
    """Returns the slices; adds them up first where a sum is pending."""


# cluster/client/connect.py chooses the implementation: TPUs where TPU is set.


class Devices(Protocol):
  """The devices of all pods, by TensorFlow's names.

  Attributes:
    client: CPU of the process that feeds, fetches, and reads files.
    pods: devices of each pod, in the order of its mesh.
  """

  client: str
  pods: Sequence[Sequence[str]]

  def placement(self, mesh: MeshLayout, pod: int) -> "Placement":
    """Returns the placement of a pod."""


class Placement(Protocol):
  """The devices of one pod: a Mesh TensorFlow `MeshImpl`, and more.

  Attributes:
    cpu: CPU of the first device's process; what the pod is fed goes through it.
    reading_cpus: CPUs that may read batches themselves, one per process.
    native_threads: threads of an operation of `native` on a device; 0 where the
      devices have none.
    shape: axes of the mesh.
  """

  cpu: str
  reading_cpus: Sequence[str]
  native_threads: int
  shape: mtf.Shape

  def import_copies(
    self, mesh: mtf.Mesh, tensors: Mapping[str, tf.Tensor], shape: mtf.Shape
  ) -> mtf.Tensor:
    """Imports a tensor that processes hold whole, onto their devices.

    Args:
      mesh: mesh that is placed here.
      tensors: copy of each of `reading_cpus`, or only that of `cpu`, by name.
      shape: shape on the mesh.
    """

  def slicewise(self, fn: Callable, *inputs: object) -> object:
    """Applies `fn` to the inputs' slices on each device."""

  # Collectives run in each group of devices that differ in `mesh_axes` alone.

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOut:
    """Reduces x ("SUM", "MAX"); each device gets the whole result."""

  def reduce_scatter(
    self, x: LaidOut, mesh_axis: int, split_axis: int
  ) -> LaidOut:
    """Sums x; each device gets its part of the sum, cut along `split_axis`."""

  def allconcat(self, x: LaidOut, mesh_axis: int, concat_axis: int) -> LaidOut:
    """All-gathers x; each device gets all parts, joined."""

  def delay(self, x: LaidOut, signal: LaidOut) -> LaidOut:
    """Returns x, which is not computed before `signal` is there."""

  # A slot is the slices of a variable, as `lowering.variables` has them.

  def assign_if_finite(
    self, slot: LaidOut, value: LaidOut, is_finite: LaidOut
  ) -> list[tf.Operation]:
    """Assigns, in a step whose numbers are all finite.

    Args:
      slot: slices of the variable.
      value: slices of the next value, in the stored dtype.
      is_finite: [], bool, on each device; false assigns nothing.
    """
    # On CPUs and GPUs the call raises InvalidArgumentError then: no pass over
    # memory is spent on a choice. XLA cannot raise; it writes the old value.

  def update_if_finite(
    self,
    fn: Callable[..., Sequence[tf.Tensor]],
    slots: Sequence[LaidOut],
    operands: Sequence[LaidOut],
    is_finite: LaidOut,
  ) -> list[tf.Operation]:
    """Updates slots of one shape, in a step whose numbers are all finite.

    Args:
      fn: element-wise function of a module; takes a list of a slice of each
        slot, and slices of the operands; returns the slots' next values.
      slots: slices of each variable.
      operands: slices of tensors, the first of the slots' shape.
      is_finite: [], bool, on each device; false updates nothing.
    """
    # CPUs and GPUs write each next value over the one before.

  def add(
    self, slot: LaidOut, value: LaidOut, is_first: tf.Tensor
  ) -> list[tf.Operation]:
    """Adds to an accumulator in place.

    Args:
      slot: slices of the accumulator, float32.
      value: slices of the next term, any float dtype.
      is_first: [], bool, on `cpu`; true begins the sum anew with `value`.
    """

  @staticmethod
  def lower(placements: "Mapping[mtf.Mesh, Placement]") -> "Lowering":
    """Lowers a graph whose meshes, one a pod, are placed like this one."""


class Lowering(Protocol):
  """A Mesh TensorFlow graph as TensorFlow: tensors to fetch, steps to run.

  Attributes:
    slices: slices of each mesh's variables, by checkpoint name; a stack
      (slices.py) is named like its first variable. A variable is there once a
      `call` needs it.
    initialize: sets every slice to its first value.
  """

  # Hosts lower the whole graph at once, and a session runs what a call needs of
  # it. On TPUs each call is a program, which holds what it needs.

  slices: list[dict[str, list[Slice]]]
  initialize: tf.Operation

  def call(
    self,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation] = (),
  ) -> tuple[dict[str, tf.Tensor], tf.Operation]:
    """Builds what one call into a session runs, on all pods.

    Args:
      tensors: tensors to fetch, by name; on TPUs [] float32 or bool.
      operations: operations to run, the updates of a training step say.

    Returns:
      The tensors, whole, by name; and all operations, as one.
    """


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


def collective_scope(
  kind: str, shape: mtf.Shape, mesh_axes: Sequence[int]
) -> contextlib.AbstractContextManager:
  """Opens the name scope of a collective over mesh axes, in a mesh's shape."""
  if not mesh_axes:  # nothing moves
    return contextlib.nullcontext()
  # "all_reduce.data.model": tools/traffic.py parses this name.
  return tf.name_scope(".".join([kind, *(shape[x].name for x in mesh_axes)]))
