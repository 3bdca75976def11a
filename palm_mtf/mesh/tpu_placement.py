# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A mesh of TPU devices, one program for all of them.

Mesh TensorFlow's `SimdMeshImpl` writes down what one device does; inside
`tf.tpu.replicate` XLA compiles that for every device of the mesh. What differs
between devices comes in from outside: which of the mesh it is, its rows of a
batch and its slices of the variables, which live on the device between calls.

  host of a device    its rows, its part of a sum over pods -> the device
  device              what a computation returns            -> its host

Replica i of a computation is device i of the mesh: where on the torus that is,
tpu_slices.py decides.
"""

from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import (
  cross_replica_reduce,
  cross_replica_reduce_scatter,
  cross_replica_sum,
  mtf,
  tf,
  tpu_replicated_input,
)
from palm_mtf.layout import MeshLayout
from palm_mtf.mesh.collectives import (
  ALL_GATHER,
  ALL_REDUCE,
  REDUCE_SCATTER,
  scope_of,
)
from palm_mtf.mesh.placement import (
  Devices,
  Slice,
  SlicePlacement,
  host_of,
)
from palm_mtf.mesh.tpu_variables import Slot, Stack, stacked_with
from palm_mtf.tpu_slices import TpuSlice, chips_of_replicas
from palm_mtf.variables import SlicedVariable


def tpu_topology(where: TpuSlice) -> tf.tpu.experimental.Topology:
  """Returns the topology that TensorFlow would find on a slice."""
  return tf.tpu.experimental.Topology(
    mesh_shape=where.mesh_shape, device_coordinates=where.device_coordinates
  )


def tpu_devices(
  mesh: MeshLayout,
  where: TpuSlice,
  topologies: Sequence[tf.tpu.experimental.Topology],
  *,
  jobs: Sequence[str | None],
  client: str,
) -> Devices:
  """Returns the devices of pods of TPUs.

  Args:
    mesh: of each pod.
    where: the slice that each pod is.
    topologies: of each pod.
    jobs: of each pod, the name of its job; None is this process.
    client: TensorFlow's name of its device.
  """
  model_size = list(mesh.axes.values())[-1]
  coordinates = [[x] for x in chips_of_replicas(where, model_size)]
  assignments = [
    tf.tpu.experimental.DeviceAssignment(topology, coordinates)
    for topology in topologies
  ]
  return Devices(
    client,
    [
      [each.tpu_device(replica=i, job=job) for i in range(each.num_replicas)]
      for each, job in zip(assignments, jobs, strict=True)
    ],
    assignments,
  )


def placement_of(
  mesh: MeshLayout, devices: Devices, pod: int
) -> "SlicePlacement | TpuPlacement":
  """Returns what places tensors on the devices of a pod."""
  names = devices.pods[pod]
  if devices.assignments:
    return TpuPlacement(mesh, devices.assignments[pod], names)
  return SlicePlacement(mesh, names)


class TpuPlacement(mtf.simd_mesh_impl.SimdMeshImpl):
  """Places one slice of everything on each TPU device of a pod.

  Attributes:
    host: the CPU beside the first device: what the pod is fed from.
    hosts: the CPU beside each device.
  """

  def __init__(
    self,
    mesh: MeshLayout,
    assignment: tf.tpu.experimental.DeviceAssignment,
    devices: Sequence[str],
  ):
    """Lays tensors out by the rules of `mesh`.

    Args:
      mesh: axes and rules.
      assignment: where on the torus each device of the mesh lies.
      devices: TensorFlow's names of them.
    """
    shape = mtf.Shape([mtf.Dimension(*axis) for axis in mesh.axes.items()])
    super().__init__(
      shape, list(mesh.rules.items()), device_assignment=assignment
    )
    self._devices = list(devices)
    self.hosts = [host_of(device) for device in devices]
    self.host = self.hosts[0]
    self._stacks: list[Stack] = []
    self._slots: dict[str, Slot] = {}

  def LaidOutVariable(  # noqa: N802, Mesh TensorFlow's name
    self, variable: SlicedVariable, mesh_impl: "TpuPlacement"
  ) -> "_LaidOutVariable":
    """Returns a variable's row of its stack; all computations share stacks."""
    if variable.name not in self._slots:
      with tf.control_dependencies(None):  # outside of the computation
        for alike in stacked_with(variable, self):
          self._stacks.append(Stack(alike, self, self.hosts))
          self._slots |= self._stacks[-1].slots()
    return _LaidOutVariable(self._slots[variable.name], mesh_impl)

  @property
  def slices(self) -> Mapping[str, Sequence[Slice]]:
    """Of all variables that computations have, by their stack's first."""
    return {stack.name: stack.slices for stack in self._stacks}

  def replicate(
    self, computation: Callable[[], tuple[Sequence[tf.Tensor], tf.Operation]]
  ) -> tuple[list[list[tf.Tensor]], tf.Operation]:
    """Runs a computation on every device.

    Args:
      computation: builds what one device does; returns tensors, and what else
        is to be run.

    Returns:
      [tensors][devices], and what runs all of it.
    """
    self._pnum_tensor = None  # each computation has an input of its own
    job, _, _ = self.host.rpartition("/task:")

    def on_one_device():
      if job:  # each pod is a TPU system
        (metadata,) = tf.no_op().control_inputs
        metadata._set_device(f"{job}/task:0/device:TPU_SYSTEM:0")
      for stack in self._stacks:
        stack.begin()
      tensors, operation = computation()
      written = [op for stack in self._stacks for op in stack.end()]
      return [*tensors, tf.group(operation, *written)]

    outputs = tf.tpu.replicate(
      on_one_device, [[]] * self.size, device_assignment=self.device_assignment
    )
    if isinstance(outputs[0], tf.Operation):  # there are no tensors
      return [], tf.group(outputs)
    tensors = [list(each) for each in zip(*outputs, strict=True)]
    return tensors, tf.group(*tensors[0])

  @property
  def pnum_tensor(self) -> tf.Tensor:
    """Which of the mesh a device is, [] int32."""
    if self._pnum_tensor is None:
      numbers = []
      with tf.control_dependencies(None):
        for pnum, host in enumerate(self.hosts):
          with tf.device(host):
            numbers.append(tf.constant(pnum))
        self._pnum_tensor = tpu_replicated_input(numbers)
    return self._pnum_tensor

  def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor):
    """Gives each device its slice of what the pod is fed, or of a constant."""
    value = tf.get_static_value(tf_x)
    if value is not None:  # a part of the program
      return self.slice(tf.constant(value, tf_x.dtype), x.shape)
    size = self.slice_shape(x.shape)
    with tf.control_dependencies(None), tf.device(self.host):
      cut = {}
      for pnum in range(self.size):
        begin = tuple(self.slice_begin(x.shape, pnum))
        if begin not in cut:
          cut[begin] = tf.slice(tf_x, begin, size) if size else tf_x
    return self.fed(
      [cut[tuple(self.slice_begin(x.shape, i))] for i in range(self.size)]
    )

  def fed(self, values: Sequence[tf.Tensor]):
    """Returns, laid out, what each device is given from outside."""
    with tf.control_dependencies(None):
      return self.LaidOutTensor([tpu_replicated_input(values)])

  def assign(self, slot: Slot, value: tf.Tensor, clip: tf.Tensor):
    """Assigns where the step is finite: a program of XLA cannot raise.

    Args:
      slot: of a variable.
      value: its next.
      clip: [], float32, no number where the step is not finite (clip.py).
    """
    is_bad = tf.math.is_nan(clip)
    return slot.assign(tf.where_v2(is_bad, tf.convert_to_tensor(slot), value))

  def add(self, slot: Slot, value: tf.Tensor, is_first: tf.Tensor):
    """Adds to an accumulator, or begins anew; see SlicePlacement."""
    # No tf.cond: a replicated variable leaves its branches.
    so_far = tf.where_v2(is_first, 0.0, tf.convert_to_tensor(slot))
    return slot.assign(so_far + tf.cast(value, slot.dtype))

  def allreduce(self, x, mesh_axes, reduction_fn_string):
    """Mesh TensorFlow's sum, and XLA's maximum, by the name of what moves."""
    axes = [axis for axis in mesh_axes if self.shape[axis].size > 1]
    if not axes:
      return x.to_laid_out_tensor()
    with self._moving(ALL_REDUCE, axes):
      if reduction_fn_string == "SUM":
        return super().allreduce(x, axes, "SUM")
      groups = self._create_group_assignment(axes)
      part = x.to_laid_out_tensor().one_slice
      return self.LaidOutTensor(
        [cross_replica_reduce(part, groups, reduction_fn_string.capitalize())]
      )

  def allconcat(self, x, mesh_axis, concat_axis, stack=False):
    """An all-gather, as a sum of parts that are zeros elsewhere.

    TensorFlow has no name for XLA's all-gather. It is for XLA to find that a
    sum over devices of what one of them has is one; else this moves twice as
    much. No number changes by adding zeros, whatever its dtype.
    """
    assert not stack
    part = x.to_laid_out_tensor().one_slice
    n = self.shape[mesh_axis].size
    if n == 1:
      return self.LaidOutTensor([part])
    with self._moving(ALL_GATHER, [mesh_axis]):
      is_here = tf.equal(tf.range(n), self._coordinate(mesh_axis))
      sizes = part.shape.as_list()
      place = [n if i == concat_axis else 1 for i in range(len(sizes) + 1)]
      whole = tf.where_v2(
        tf.reshape(is_here, place),
        tf.expand_dims(part, concat_axis),
        tf.zeros([], part.dtype),
      )
      sizes[concat_axis] *= n
      groups = self._create_group_assignment([mesh_axis])
      return self.LaidOutTensor(
        [cross_replica_sum(tf.reshape(whole, sizes), groups)]
      )

  def reduce_scatter(self, x, mesh_axis: int, split_axis: int):
    """Adds up x over a mesh axis; each device keeps its part of the sum.

    Args:
      x: laid out: what each device adds.
      mesh_axis: of the mesh, by its number.
      split_axis: of x, which the parts are cut along.
    """
    part = x.to_laid_out_tensor().one_slice
    if self.shape[mesh_axis].size == 1:
      return self.LaidOutTensor([part])
    with self._moving(REDUCE_SCATTER, [mesh_axis]):
      groups = self._create_group_assignment([mesh_axis])
      return self.LaidOutTensor(
        [cross_replica_reduce_scatter(part, groups, split_axis)]
      )

  def _coordinate(self, mesh_axis: int) -> tf.Tensor:
    return self.laid_out_pcoord(mesh_axis).one_slice

  def _moving(self, kind: str, mesh_axes: Sequence[int]):
    names = [self.shape[axis].name for axis in mesh_axes]
    return tf.name_scope(scope_of(kind, names))


class _LaidOutVariable:
  """A variable's row of a stack."""

  def __init__(self, slot: Slot, mesh_impl: TpuPlacement):
    self.laid_out_tensor = mesh_impl.LaidOutTensor([slot])
