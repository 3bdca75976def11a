# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The placement of a pod on TPUs: one program, which all devices run.

  host of a device    rows of a batch, sums over pods  -> device
  device              results of a computation         -> its host

Mesh TensorFlow's `SimdMeshImpl` builds the operations of one device; inside
`tf.tpu.replicate` XLA compiles these operations for every device of the mesh.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf._tf import gen_xla_ops, mtf, tf, tpu_ops
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.mesh.placement import (
  ALL_GATHER,
  ALL_REDUCE,
  REDUCE_SCATTER,
  Lowering,
  collective_scope,
)
from palm_mtf.mesh.slices import Slice, cpu_near
from palm_mtf.mesh.tpu.stacked_variables import (
  Stack,
  StackedVariable,
  list_stacks,
)
from palm_mtf.ops.variables import SlicedVariable


class TpuPlacement(mtf.simd_mesh_impl.SimdMeshImpl):
  """`Placement` of a pod on TPUs; `cpus` has the CPU of each device's host."""

  native_threads = 0

  def __init__(
    self,
    mesh: DeviceMesh,
    assignment: tf.tpu.experimental.DeviceAssignment,
    devices: Sequence[str],
    lower: Callable[..., Lowering],
  ):
    # `assignment` tells where each device of the mesh is on the TPU's torus.
    # `lower` makes the lowering of a graph from {mesh: placement}.
    shape = mtf.Shape([mtf.Dimension(*axis) for axis in mesh.axes.items()])
    super().__init__(
      shape,
      list(mesh.rules.items()),
      device_assignment=assignment,
      # Sums are sent in the dtype of their terms, as on CPUs and GPUs.
      allreduce_in_bfloat16_max_group_size=len(devices),
    )
    self._devices, self.lower = list(devices), lower
    self.cpus = [cpu_near(device) for device in devices]
    self.cpu = self.cpus[0]
    self.reading_cpus = [self.cpu]  # this host sends rows to the other hosts
    self._stacks: list[Stack] = []
    self._variables: dict[str, StackedVariable] = {}
    self._groups: dict[tuple[int, ...], np.ndarray] = {}
    # For `import_round`, {name: values in all rounds (microbatches)}: on the
    # host in `_rounds`, on the devices in `_fed_rounds`.
    self._rounds: Mapping[str, tf.Tensor] = {}
    self._fed_rounds: dict[str, tf.Tensor] = {}

  def LaidOutVariable(  # noqa: N802, Mesh TensorFlow's name
    self, variable: SlicedVariable, mesh_impl: "TpuPlacement"
  ) -> "_LaidOutVariable":
    """Returns a variable as a row of its `Stack`; makes missing `Stack`s."""
    if variable.name not in self._variables:
      with tf.control_dependencies(None):  # outside of the computation
        for alike in list_stacks(variable, self):
          self._stacks.append(Stack(alike, self, self.cpus))
          self._variables |= self._stacks[-1].variables()
    return _LaidOutVariable(self._variables[variable.name], mesh_impl)

  @property
  def slices(self) -> dict[str, list[Slice]]:
    """{name of a stack: slices}, of all variables that computations use."""
    return {stack.name: stack.slices for stack in self._stacks}

  def replicate(
    self, computation: Callable[[], tuple[Sequence[tf.Tensor], tf.Operation]]
  ) -> tuple[list[list[tf.Tensor]], tf.Operation]:
    """Builds a program that runs a computation on every device.

    Args:
      computation: builds one device's part; returns the tensors to fetch, and
        an operation to run.

    Returns:
      The fetched tensors, as [tensors][devices]; and the program, an operation.
    """
    # Forget inputs, because a computation cannot read another computation's.
    self._pnum_tensor = None
    self._fed_rounds = {}
    job, _, _ = self.cpu.rpartition("/task:")

    def on_one_device():
      if job:  # the program runs on the TPU system of the pod's job
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

    Args:
      condition: function of the values; returns whether to run another round.
      body: function of the values; runs a round and returns the next values. It
        uses only variables that an earlier computation has used.
      values: values before the first round.

    Returns:
      The values after the last round.
    """
    num = len(values)

    # Besides the values, the loop carries the stacks of all variables. So a
    # round begins with the previous round's variables, and the program reads
    # and writes each variable once.
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
  def import_round(
    self, rounds: Mapping[str, tf.Tensor], index: tf.Tensor
  ) -> Iterator[None]:
    """Makes the `with` body import the values of one round (microbatch).

    Args:
      rounds: {name of an imported tensor: values in all rounds, [rounds, ...]}.
      index: index of the round, from 0, [], int32.
    """
    self._rounds, self._index = rounds, index
    yield
    self._rounds = {}

  @property
  def pnum_tensor(self) -> tf.Tensor:
    """The index of the device in the mesh, [] int32."""
    if self._pnum_tensor is None:
      numbers = []
      # "pnum/" is outside of the name scope of the collective that needs pnum.
      with tf.init_scope(), tf.name_scope("pnum/"):
        for pnum, cpu in enumerate(self.cpus):
          with tf.device(cpu):
            numbers.append(tf.constant(pnum))
      self._pnum_tensor = self.feed(numbers)
    return self._pnum_tensor

  def import_copies(self, mesh, tensors, shape):
    """Imports a tensor; takes all slices from the copy on `cpu`."""
    return mtf.import_tf_tensor(mesh, tensors[self.cpu], shape)

  def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor):
    """Gives each device its slice of a tensor on the host, or of a constant."""
    value = tf.get_static_value(tf_x)
    if value is not None:  # a constant is a part of the program
      return self.slice(tf.constant(value, tf_x.dtype), x.shape)
    return self.LaidOutTensor([self._import_slice(tf_x, x.shape)])

  def _import_slice(self, tf_x: tf.Tensor, shape: mtf.Shape) -> tf.Tensor:
    # Returns a device's slice of a tensor on the host; during `import_round`,
    # of the tensor's value in that round.
    if tf_x.name not in self._rounds:
      return self._cut_and_feed(tf_x, shape)
    if tf_x.name not in self._fed_rounds:
      rounds = self._rounds[tf_x.name]
      self._fed_rounds[tf_x.name] = self._cut_and_feed(rounds, shape)
    return tf.gather(self._fed_rounds[tf_x.name], self._index)

  def _cut_and_feed(self, tf_x: tf.Tensor, shape: mtf.Shape) -> tf.Tensor:
    # Cuts the last dimensions of tf_x, [..., shape]; feeds devices the slices.
    before = tf_x.shape.as_list()[: tf_x.shape.ndims - shape.ndims]
    size = before + self.slice_shape(shape)
    begins = [
      (*([0] * len(before)), *self.slice_begin(shape, pnum))
      for pnum in range(self.size)
    ]
    cut = {}
    # The pod's host cuts a slice once for all devices that hold it, outside of
    # computations and their loops.
    with tf.init_scope(), tf.device(self.cpu):
      for begin in dict.fromkeys(begins):
        is_whole = size == tf_x.shape.as_list()
        cut[begin] = tf_x if is_whole else tf.slice(tf_x, begin, size)
    return self.feed([cut[begin] for begin in begins])

  def feed(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sends value i from the host to device i; returns the device's value."""
    with tf.init_scope():
      return tpu_ops.tpu_replicated_input(list(values))

  def delay(self, x, signal):
    """Returns x, which is not computed before `signal` is computed."""
    return self.slicewise(_delay, x, signal)

  def assign_if_finite(self, variable, value, is_finite) -> list[tf.Tensor]:
    """Assigns `value` if `is_finite`; otherwise writes the old value."""
    return self.slicewise(_assign_if, variable, value, is_finite).all_slices

  def update_if_finite(self, fn, variables, operands, is_finite):
    """Updates variables if `is_finite`; otherwise writes the old values."""
    num = len(variables)

    def update(is_finite, *others):
      variables = others[:num]
      values = fn(list(map(tf.convert_to_tensor, variables)), *others[num:])
      return tuple(
        _assign_if(variable, value, is_finite)
        for variable, value in zip(variables, values, strict=True)
      )

    values = self.slicewise(update, is_finite, *variables, *operands)
    return [x for each in values for x in each.all_slices]

  def add(self, accumulator, value, is_first: tf.Tensor) -> list[tf.Tensor]:
    """Adds `value` to an accumulator; see `Placement`."""
    is_first = self._import_slice(is_first, mtf.Shape([]))  # host -> device
    return self.slicewise(_add, accumulator, value, is_first).all_slices

  def allreduce(self, x, mesh_axes, reduction_fn_string):
    """All-reduces x by XLA's sum or maximum."""
    axes = [axis for axis in mesh_axes if self.shape[axis].size > 1]
    if not axes:
      return x.to_laid_out_tensor()
    with collective_scope(ALL_REDUCE, self.shape, axes):
      if reduction_fn_string == "SUM":
        return super().allreduce(x, axes, "SUM")
      part = x.to_laid_out_tensor().one_slice
      reduction = reduction_fn_string.capitalize()
      whole = gen_xla_ops.xla_all_reduce(
        part, self._create_group_assignment(axes), reduction, "CrossReplica"
      )
      return self.LaidOutTensor([whole])

  def allconcat(self, x, mesh_axis, concat_axis, stack=False):
    """All-gathers x; each device gets all parts, joined."""
    assert not stack
    part = x.to_laid_out_tensor().one_slice
    n = self.shape[mesh_axis].size
    if n == 1:
      return self.LaidOutTensor([part])
    # TensorFlow has no operation for XLA's all-gather. Instead each device pads
    # its part with zeros, and the padded parts are added, which is exact in
    # every dtype. Unless XLA turns the sum into an all-gather, the sum moves
    # twice the bytes of an all-gather.
    with collective_scope(ALL_GATHER, self.shape, [mesh_axis]):
      is_here = tf.equal(tf.range(n), self.laid_out_pcoord(mesh_axis).one_slice)
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
        [tpu_ops.cross_replica_sum(tf.reshape(whole, sizes), groups)]
      )

  def reduce_scatter(self, x, mesh_axis: int, split_axis: int):
    """Sums x; each device gets its part of the sum."""
    part = x.to_laid_out_tensor().one_slice
    if self.shape[mesh_axis].size == 1:
      return self.LaidOutTensor([part])
    with collective_scope(REDUCE_SCATTER, self.shape, [mesh_axis]):
      groups = self._create_group_assignment([mesh_axis])
      own = gen_xla_ops.xla_reduce_scatter(
        part, groups, split_axis, reduce_op="Add"
      )
      return self.LaidOutTensor([own])

  def _create_group_assignment(self, mesh_axes):
    axes = tuple(mesh_axes)
    if axes not in self._groups:  # super() is slow if there are many devices
      groups = super()._create_group_assignment(axes)
      self._groups[axes] = np.array(groups, np.int32)
    return self._groups[axes]


class _LaidOutVariable:
  """A variable's row in a stack."""

  def __init__(self, variable: StackedVariable, mesh_impl: TpuPlacement):
    self.laid_out_tensor = mesh_impl.LaidOutTensor([variable])


def _delay(x: tf.Tensor, signal: tf.Tensor) -> tf.Tensor:
  # XLA ignores control dependencies, but not optimization barriers.
  return gen_xla_ops.xla_optimization_barrier([x, signal])[0]


def _assign_if(variable: StackedVariable, value, is_finite) -> tf.Tensor:
  return variable.assign(
    tf.where_v2(is_finite, value, tf.convert_to_tensor(variable))
  )


def _add(variable: StackedVariable, value, is_first) -> tf.Tensor:
  so_far = tf.where_v2(is_first, 0.0, tf.convert_to_tensor(variable))
  return variable.assign(so_far + tf.cast(value, variable.dtype))
