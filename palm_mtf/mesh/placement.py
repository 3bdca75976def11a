# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface between a program and the devices that run it.

  Devices      the names of all pods' devices
  Placement    one pod: slices of tensors and variables, collectives
  Lowering     one Mesh TensorFlow graph for all pods, as TensorFlow operations

mesh/cpu_gpu.py implements the interface for TensorFlow's devices. On
accelerators, JAX lowers each device's part (accelerators/placement.py).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palm_mtf._tf import mtf, tf
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.mesh.slices import Slice

# Bytes that n devices send in total, for a tensor of S bytes:
#   all-reduce      2 (n - 1) S
#   reduce-scatter    (n - 1) S    each device gets 1/n of the sum
#   all-gather        (n - 1) S    each device has 1/n of the tensor
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"


class LaidOut(Protocol):
  """Slices of a variable or a tensor; slices may be partial sums."""

  def to_laid_out_tensor(self) -> "LaidOut":
    """Returns the slices; all-reduces them first if they are partial sums."""


class Devices(Protocol):
  """The devices of all pods (copies of the model), by TensorFlow's names.

  Attributes:
    client: CPU of the client process, which feeds and fetches tensors.
    pods: devices of each pod: stage after stage, each in the order of the mesh.
  """

  client: str
  pods: Sequence[Sequence[str]]

  def placement(
    self, mesh: DeviceMesh, pod: int, stage: int = 0
  ) -> "Placement":
    """Returns the placement of a stage of a pod."""


class Placement(Protocol):
  """The devices of one pod: a Mesh TensorFlow `MeshImpl` with more methods.

  Attributes:
    cpu: CPU of the first device's process, through which the pod is fed.
    reading_cpus: a CPU of each process that may read its own copy of a batch.
    native_threads: threads per C++ operation (native/) on a device; 0 if the
      devices have no C++ operations.
    shape: axes of the mesh.
  """

  cpu: str
  reading_cpus: Sequence[str]
  native_threads: int
  shape: mtf.Shape

  def import_copies(
    self, mesh: mtf.Mesh, tensors: Mapping[str, tf.Tensor], shape: mtf.Shape
  ) -> mtf.Tensor:
    """Imports a whole tensor; each device gets its slice.

    Args:
      mesh: mesh of this placement.
      tensors: {name of a CPU: the whole tensor there}, for each of
        `reading_cpus`, so that processes send no slices; or only for `cpu`.
      shape: shape of the tensor.
    """

  def slicewise(self, fn: Callable, *inputs: object) -> object:
    """Applies `fn` to the inputs' slices on each device."""

  # A collective runs separately in each group of devices whose coordinates
  # differ only along `mesh_axes`.

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOut:
    """Reduces x by "SUM" or "MAX"; each device gets the whole result."""

  def reduce_scatter(
    self, x: LaidOut, mesh_axis: int, split_axis: int
  ) -> LaidOut:
    """Sums x; each device gets one part of the sum, cut along `split_axis`."""

  def allconcat(self, x: LaidOut, mesh_axis: int, concat_axis: int) -> LaidOut:
    """All-gathers x; each device gets all parts, concatenated."""

  def delay(self, x: LaidOut, signal: LaidOut) -> LaidOut:
    """Returns x, delayed: nothing reads it before `signal` is computed."""

  # The methods below take a variable as its slices (`lowering.variables`).

  def assign_if_finite(
    self, variable: LaidOut, value: LaidOut, is_finite: LaidOut
  ) -> list[tf.Operation]:
    """Assigns `value`, in the stored dtype, if `is_finite`, [] bool, is true.

    If `is_finite` is false, TensorFlow's devices raise InvalidArgumentError,
    because keeping the old value by tf.where would cost a pass over memory. XLA
    cannot raise errors, so accelerators write the old value.
    """

  def update_if_finite(
    self,
    fn: Callable[..., Sequence[tf.Tensor]],
    variables: Sequence[LaidOut],
    operands: Sequence[LaidOut],
    is_finite: LaidOut,
  ) -> list[tf.Operation]:
    """Updates variables of one shape; see `assign_if_finite`.

    Args:
      fn: element-wise module-level function. It takes a list with one slice per
        variable, then one slice per operand, and returns the next values.
      variables: the variables.
      operands: tensors; the first has the shape of the variables.
      is_finite: [], bool; false updates nothing.
    """

  def add(
    self, accumulator: LaidOut, value: LaidOut, is_first: tf.Tensor
  ) -> list[tf.Operation]:
    """Adds `value` to an accumulator in place.

    Args:
      accumulator: variable with the sum, float32.
      value: the next term, any float dtype.
      is_first: [], bool, on `cpu`; true begins a new sum with `value`.
    """

  @staticmethod
  def lower(placements: "Mapping[mtf.Mesh, Placement]") -> "Lowering":
    """Lowers a graph whose placements, one per pod, are of this class."""


class Lowering(Protocol):
  """A Mesh TensorFlow graph as TensorFlow operations, ready to run.

  Attributes:
    slices: for each mesh, {name in checkpoints: a slice for each device}.
    initialize: operation that sets every slice to its initial value.
  """

  slices: list[dict[str, list[Slice]]]
  initialize: tf.Operation

  def call(
    self,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation] = (),
  ) -> tuple[dict[str, tf.Tensor], tf.Operation]:
    """Builds the tensors and operations that one session.run fetches.

    Args:
      tensors: tensors to fetch, by name.
      operations: operations to run, such as the updates of a training step.

    Returns:
      The whole (unsplit) tensors, by name; and one operation that runs all of
      `operations`.
    """


def collective_scope(
  kind: str, shape: mtf.Shape, mesh_axes: Sequence[int]
) -> contextlib.AbstractContextManager:
  """Returns the name scope of a collective over axes of a mesh.

  Args:
    kind: ALL_REDUCE, ALL_GATHER or REDUCE_SCATTER.
    shape: shape of the mesh.
    mesh_axes: indices of the axes.
  """
  if not mesh_axes:  # no collective
    return contextlib.nullcontext()
  # tools/traffic.py parses the name, such as "all_reduce.data.model".
  return tf.name_scope(".".join([kind, *(shape[x].name for x in mesh_axes)]))
