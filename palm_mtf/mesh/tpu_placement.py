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
config/tpu_topology.py decides.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.tpu_topology import TpuSlice, chips_of_replicas
from palm_mtf.mesh.collectives import (
  ALL_GATHER,
  ALL_REDUCE,
  REDUCE_SCATTER,
  scope_of,
)
from palm_mtf.mesh.placement import Devices, Slice, SlicePlacement, host_of
from palm_mtf.mesh.tpu_stacked_variables import (
  Stack,
  StackedVariable,
  stacked_with,
)
from palm_mtf.ops.variables import SlicedVariable
from palm_mtf.ops.xla import (
  cross_replica_reduce,
  cross_replica_reduce_scatter,
  cross_replica_sum,
  tpu_replicated_input,
)


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
    mesh: devices and layout rules of each pod.
    where: the slice that each pod is.
    topologies: topology of each pod.
    jobs: name of each pod's job; None is this process.
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
      shape,
      list(mesh.rules.items()),
      device_assignment=assignment,
      # Sums are sent in the dtype of what is summed, as on other devices.
      allreduce_in_bfloat16_max_group_size=len(devices),
    )
    self._devices = list(devices)
    self.hosts = [host_of(device) for device in devices]
    self.host = self.hosts[0]
    self._stacks: list[Stack] = []
    self._slots: dict[str, StackedVariable] = {}
    self._groups: dict[tuple[int, ...], np.ndarray] = {}
    # Of a loop: what is imported in all rounds, also as devices are fed it.
    self._rounds: Mapping[str, tf.Tensor] = {}
    self._fed_rounds: dict[str, tf.Tensor] = {}

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
    self._pnum_tensor = None  # each computation has inputs of its own
    self._fed_rounds = {}
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

  def loop(
    self,
    condition: Callable[..., tf.Tensor],
    body: Callable[..., Sequence[tf.Tensor]],
    values: Sequence[tf.Tensor],
  ) -> list[tf.Tensor]:
    """Repeats a part of a computation while a condition holds.

    Each round goes on from the variables that the last one left.

    Args:
      condition: function of the values before a round: whether there is one.
      body: a round: returns the next values. It uses no variable that no
        computation has used before.
      values: before the first round.

    Returns:
      The last values.
    """
    num = len(values)

    def of_round(*carried: tf.Tensor) -> list[tf.Tensor]:
      for stack, whole in zip(self._stacks, carried[num:], strict=True):
        stack.begin(whole)
      following = list(body(*carried[:num]))
      return following + [stack.whole() for stack in self._stacks]

    carried = tf.while_loop(
      lambda *carried: condition(*carried[:num]),
      of_round,
      [*values, *(stack.whole() for stack in self._stacks)],
    )
    for stack, whole in zip(self._stacks, carried[num:], strict=True):
      stack.begin(whole)
    return carried[:num]

  @contextlib.contextmanager
  def in_round(
    self, rounds: Mapping[str, tf.Tensor], index: tf.Tensor
  ) -> Iterator[None]:
    """Lowers what is imported, in its body, as a round of a loop has it.

    Args:
      rounds: the values in all rounds, [rounds, ...], by the name of the tensor
        that is imported.
      index: number of the round, [], int32.
    """
    self._rounds, self._index = rounds, index
    yield
    self._rounds = {}

  @property
  def pnum_tensor(self) -> tf.Tensor:
    """Which of the mesh a device is, [] int32."""
    if self._pnum_tensor is None:
      numbers = []
      # No part of the collective that may be the first to ask for it.
      with tf.init_scope(), tf.name_scope("pnum/"):
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
    return self.LaidOutTensor([self._imported(tf_x, x.shape)])

  def _imported(self, tf_x: tf.Tensor, shape: mtf.Shape) -> tf.Tensor:
    """Returns a device's slice of a tensor of the host."""
    if tf_x.name not in self._rounds:
      return self._cut_and_fed(tf_x, shape)
    if tf_x.name not in self._fed_rounds:
      rounds = self._rounds[tf_x.name]
      self._fed_rounds[tf_x.name] = self._cut_and_fed(rounds, shape)
    return tf.gather(self._fed_rounds[tf_x.name], self._index)

  def _cut_and_fed(self, tf_x: tf.Tensor, shape: mtf.Shape) -> tf.Tensor:
    """Cuts by the last dimensions, which `shape` is of."""
    before = tf_x.shape.as_list()[: tf_x.shape.ndims - shape.ndims]
    size = before + self.slice_shape(shape)
    begins = [
      (*([0] * len(before)), *self.slice_begin(shape, pnum))
      for pnum in range(self.size)
    ]
    cut = {}
    # Outside of computations, and of loops in them.
    with tf.init_scope(), tf.device(self.host):
      for begin in dict.fromkeys(begins):
        is_whole = size == tf_x.shape.as_list()
        cut[begin] = tf_x if is_whole else tf.slice(tf_x, begin, size)
    return self.fed([cut[begin] for begin in begins])

  def fed(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns what each device is given from outside."""
    with tf.init_scope():
      return tpu_replicated_input(values)

  def assign(self, slot: StackedVariable, value: tf.Tensor, clip: tf.Tensor):
    """Assigns where the step is finite: a program of XLA cannot raise.

    Args:
      slot: slot of a variable.
      value: its next.
      clip: [], float32, no number where the step is not finite (optim/clip.py).
    """
    is_bad = tf.math.is_nan(clip)
    return slot.assign(tf.where_v2(is_bad, tf.convert_to_tensor(slot), value))

  def add(self, slot: StackedVariable, value: tf.Tensor, is_first: tf.Tensor):
    """Adds to an accumulator, or begins anew; see SlicePlacement."""
    is_first = self._imported(is_first, mtf.Shape([]))
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
      mesh_axis: number of the mesh axis.
      split_axis: axis of x along which the parts are cut.
    """
    part = x.to_laid_out_tensor().one_slice
    if self.shape[mesh_axis].size == 1:
      return self.LaidOutTensor([part])
    with self._moving(REDUCE_SCATTER, [mesh_axis]):
      groups = self._create_group_assignment([mesh_axis])
      return self.LaidOutTensor(
        [cross_replica_reduce_scatter(part, groups, split_axis)]
      )

  def _create_group_assignment(self, mesh_axes):
    """Mesh TensorFlow's, once: of thousands of devices it takes a while."""
    axes = tuple(mesh_axes)
    if axes not in self._groups:
      groups = super()._create_group_assignment(axes)
      self._groups[axes] = np.array(groups, np.int32)
    return self._groups[axes]

  def _coordinate(self, mesh_axis: int) -> tf.Tensor:
    return self.laid_out_pcoord(mesh_axis).one_slice

  def _moving(self, kind: str, mesh_axes: Sequence[int]):
    names = [self.shape[axis].name for axis in mesh_axes]
    return tf.name_scope(scope_of(kind, names))


class _LaidOutVariable:
  """A variable's row of a stack."""

  def __init__(self, slot: StackedVariable, mesh_impl: TpuPlacement):
    self.laid_out_tensor = mesh_impl.LaidOutTensor([slot])
