# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes of CPUs and GPUs: each device holds a slice of every tensor.

The graph has the operations of all devices. The placement is Mesh TensorFlow's
`PlacementMeshImpl` with other collectives, and with variables that have no
master copy (ops/variables.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palm_mtf._tf import mtf, tf
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.mesh.device_copies import OperationCopies
from palm_mtf.mesh.slices import (
  Region,
  Slice,
  cpu_near,
  cpu_of_process,
  pad_to,
  regions_of,
  variables_of,
)
from palm_mtf.native.operations import threads_here
from palm_mtf.ops.matmul import einsum
from palm_mtf.ops.placement import LaidOut
from palm_mtf.ops.recompute import wait_for
from palm_mtf.ops.variables import SlicedVariable, keep_variable
from palm_mtf.ops.xla import fused_update

# Bytes that n devices send in total, for a tensor of S bytes:
#   all-reduce      2 (n - 1) S
#   reduce-scatter    (n - 1) S    each device gets 1/n of the sum
#   all-gather        (n - 1) S    each device has 1/n of the tensor
#   all-to-all        (n - 1) S    each device has S bytes for all devices
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
ALL_TO_ALL = "all_to_all"
REDUCE_SCATTER = "reduce_scatter"


class CpuGpuLowering(mtf.Lowering):
  """Makes the TensorFlow operations of a Mesh TensorFlow graph."""

  def __init__(self, placements: "Mapping[mtf.Mesh, CpuGpuPlacement]"):
    # mtf.Lowering's constructor is not called, because it lets TensorFlow
    # choose the device of some operations, such as constants. Here each
    # operation is on a device of its own pod.
    (self.graph,) = {mesh.graph for mesh in placements}
    self.mesh_to_impl = placements
    self.tensors, self.operations, self.variables = {}, {}, {}
    self.scopes: dict[mtf.Operation, str] = {}  # TensorFlow's name scopes
    self._counters = []
    for operation in self.graph.operations:
      self.lower_operation(operation)

  def lower_operation(self, operation: mtf.Operation) -> None:
    """Lowers an operation, whose inputs have been lowered."""
    cpu = self.mesh_impl(operation).cpu
    with tf.name_scope(operation.name) as scope, tf.device(cpu):
      self.scopes[operation] = scope
      operation.lower(self)

  def call(
    self,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation] = (),
  ) -> tuple[dict[str, tf.Tensor], tf.Operation]:
    """Builds the fetches of one session.run, such as a training step's.

    Args:
      tensors: tensors to fetch, by name.
      operations: operations to run, such as the updates of a training step.

    Returns:
      The whole (unsplit) tensors, by name; an operation that runs `operations`.
    """
    values = {name: self.export_to_tf_tensor(x) for name, x in tensors.items()}
    return values, tf.group([self.lowered_operation(x) for x in operations])

  @property
  def slices(self) -> list[dict[str, list[Slice]]]:
    """For each mesh, {name of a variable in checkpoints: its slices}."""
    slices = {mesh: {} for mesh in self.mesh_to_impl}
    for variable, laid_out in self.variables.items():
      of_mesh = slices[variable.mesh]
      assert variable.name not in of_mesh, f"two variables {variable.name}"
      of_mesh[variable.name] = laid_out.slices
    return list(slices.values())

  @property
  def initialize(self) -> tf.Operation:
    """Operation that sets every slice to its initial value."""
    return tf.group([x.initializer for x in variables_of(self.slices)])


class CpuGpuPlacement(mtf.placement_mesh_impl.PlacementMeshImpl):
  """The devices of one pod: a Mesh TensorFlow `MeshImpl` with more methods.

  Pass a variable x to methods as `lowering.variables[x].laid_out_tensor`. A
  collective runs separately in each group of devices whose coordinates differ
  only along `mesh_axes`.

  Attributes:
    cpu: CPU of the first device's process; scalars and the rows of a batch come
      to the pod from there.
    reading_cpus: a CPU of each process that has devices of the pod; processes
      may each read their own copy of a batch, and then send no rows.
    native_threads: threads per C++ operation (native/) on a device; 0 if the
      devices have no C++ operations.
  """

  lower = CpuGpuLowering

  def __init__(
    self, mesh: DeviceMesh, devices: Sequence[str], native_threads: int = 0
  ):
    # `devices` are TensorFlow's names; the mesh's last axis varies fastest.
    shape = mtf.Shape([mtf.Dimension(*axis) for axis in mesh.axes.items()])
    super().__init__(shape, list(mesh.rules.items()), list(devices))
    self.cpu = cpu_near(devices[0])
    self.native_threads = native_threads
    self.reading_cpus = list(dict.fromkeys(map(cpu_of_process, devices)))
    self._checked: dict[LaidOut, LaidOut] = {}

  def import_copies(
    self, mesh: mtf.Mesh, tensors: Mapping[str, tf.Tensor], shape: mtf.Shape
  ) -> mtf.Tensor:
    """Imports a whole tensor of `shape`; each device gets its slice.

    `tensors` is {name of a CPU: the whole tensor there}, for each of
    `reading_cpus` or for only `cpu`, whose process then sends all slices.
    """
    first, *others = tensors.values()
    if not others:
      return mtf.import_tf_tensor(mesh, first, shape)
    size, slices = self.slice_shape(shape), []
    for pnum, device in enumerate(self.devices):
      cpu = cpu_of_process(device)
      with tf.device(cpu):
        begin = self.slice_begin(shape, pnum)
        slices.append(tf.slice(tensors[cpu], begin, size))
    laid_out = self.LaidOutTensor(slices)
    return mtf.import_laid_out_tensor(mesh, laid_out, shape)

  def slicewise(self, fn: Callable, *inputs: object) -> object:
    """Applies `fn` to each device's slices of the inputs; returns slices."""
    inputs = mtf.ops.convert_args_to_laid_out_tensors(inputs)
    first, *others = (
      [
        x.tensor_list[i] if isinstance(x, self.LaidOutTensor) else x
        for x in inputs
      ]
      for i in range(len(self.devices))
    )
    # `fn` is called only for the first device. For the other devices its
    # operations are copied, which takes a fraction of the time of a call.
    num_before = tf.get_default_graph().num_operations()
    with tf.device(self.devices[0]):
      results = [fn(*first)]
    if others:
      results += self._repeat(fn, first, others, results[0], num_before)
    if isinstance(results[0], tuple):
      return tuple(
        map(self.LaidOutTensor, map(list, zip(*results, strict=True)))
      )
    return self.LaidOutTensor(results)

  def _repeat(self, fn, first, others, result, num_before):
    # Yields the results of `fn` on each device except the first. Copies the
    # first device's operations or, if a copy would be wrong, calls `fn` again.
    copies = OperationCopies(tf.get_default_graph(), num_before)
    can_copy = copies.can_be_made(self.devices[0]) and _is_plain(result)
    for device, arguments in zip(self.devices[1:], others, strict=True):
      replacements = _replacements(first, arguments) if can_copy else None
      if replacements is None:
        with tf.device(device):
          yield fn(*arguments)
      else:
        yield _replace(result, copies.make(device, replacements))

  def einsum(self, equation, *slices):
    """Computes the einsum of one device's slices."""
    # tf.einsum is not used, because some CPUs cannot multiply bfloat16 numbers.
    return einsum(equation, *slices)

  def allreduce(self, x, mesh_axes, reduction_fn_string):
    """Reduces x by Mesh TensorFlow's ring, in the same order in each run."""
    with collective_scope(ALL_REDUCE, self.shape, mesh_axes):
      return super().allreduce(x, mesh_axes, reduction_fn_string)

  def allconcat(self, x, mesh_axis, concat_axis):
    """All-gathers x; each device gets all parts, joined along `concat_axis`."""

    def gather(xs, devices):
      return all_gather_direct(xs, devices, concat_axis)

    with collective_scope(ALL_GATHER, self.shape, [mesh_axis]):
      return self._collective_with_groups(x, [mesh_axis], gather)

  def alltoall(self, x, mesh_axis, split_axis, concat_axis):
    """Cuts x along `split_axis`; joins received parts along `concat_axis`."""

    def exchange(xs, devices):
      # Mesh TensorFlow's default sends parts around a ring: more bytes.
      return mtf.placement_mesh_impl.alltoall_pointtwise(
        xs, devices, split_axis, concat_axis
      )

    with collective_scope(ALL_TO_ALL, self.shape, [mesh_axis]):
      return self._collective_with_groups(x, [mesh_axis], exchange)

  def reduce_scatter(self, x, mesh_axis: int, split_axis: int):
    """Sums x over a mesh axis; each device gets a part along `split_axis`."""

    def scatter(xs, devices):
      return reduce_scatter_ring(xs, devices, split_axis)

    with collective_scope(REDUCE_SCATTER, self.shape, [mesh_axis]):
      return self._collective_with_groups(x, [mesh_axis], scatter)

  def delay(self, x, signal):
    """Returns x, but lets nothing read it before `signal`, to save memory."""
    return self.slicewise(wait_for, x, signal)

  def assign_if_finite(
    self, variable: LaidOut, value: LaidOut, is_finite: LaidOut
  ) -> list[tf.Operation]:
    """Assigns `value`, in the stored dtype, if `is_finite`, [] bool, is true.

    If `is_finite` is false, the operations raise InvalidArgumentError, because
    keeping the old value by tf.where would cost a pass over memory. (XLA's
    programs cannot raise errors, so they write the old value again.)
    """
    checked = self._check(is_finite)
    return self.slicewise(_assign_after, variable, value, checked).all_slices

  def update_if_finite(
    self,
    fn: Callable[..., Sequence[tf.Tensor]],
    variables: Sequence[LaidOut],
    operands: Sequence[LaidOut],
    is_finite: LaidOut,
  ) -> list[tf.Operation]:
    """Updates variables of one shape if `is_finite`; see `assign_if_finite`.

    `fn` is defined in a module, because `fused_update` compiles each function
    object once.
    """
    num = len(variables)

    def update(checked, *others):
      with tf.control_dependencies([checked]):
        return fused_update(fn)(others[:num], *others[num:]).op

    checked = self._check(is_finite)
    return self.slicewise(update, checked, *variables, *operands).all_slices

  def _check(self, is_finite):
    if is_finite not in self._checked:  # one check per device for all updates
      self._checked[is_finite] = self.slicewise(_raise_unless, is_finite)
    return self._checked[is_finite]

  def add(
    self, accumulator: LaidOut, value: LaidOut, is_first: tf.Tensor
  ) -> list[tf.Operation]:
    """Adds `value`, of any float dtype, to a float32 sum over microbatches.

    `is_first`, [] bool on `cpu`, begins a new sum with `value` if it is true.
    """
    return self.slicewise(_add, accumulator, value, is_first).all_slices

  class LaidOutVariable:
    """Slices of one SlicedVariable; mtf.Variable looks up the class by name."""

    def __init__(self, variable: SlicedVariable, mesh_impl: "CpuGpuPlacement"):
      size, name = mesh_impl.slice_shape(variable.shape), variable.name
      self.slices: list[Slice] = []
      for pnum, region in enumerate(regions_of(variable, mesh_impl)):
        device = mesh_impl.devices[pnum]

        # Each device draws its slice's initial value, so that none is sent.
        def make_value(region: Region = region) -> tf.Tensor:
          value = variable.initializer.slice_value(
            name, variable.sizes, region.begin, region.sizes
          )
          return pad_to(tf.cast(value, variable.slice_dtype), size)

        of_device = keep_variable(f"{name}/slice_{pnum}", device, make_value)
        self.slices.append(
          Slice(**vars(region), names=[name], variable=of_device, near=device)
        )
      self.laid_out_tensor = mesh_impl.LaidOutTensor(
        [x.variable for x in self.slices]
      )


def _raise_unless(is_finite: tf.Tensor) -> tf.Tensor:
  check = tf.raw_ops.Assert(condition=is_finite, data=[is_finite])
  return wait_for(is_finite, check)


def _assign_after(variable, value, checked) -> tf.Operation:
  # If the check raises, the step ends before anything is assigned.
  with tf.control_dependencies([checked]):
    return variable.assign(value, read_value=False)


def _add(accumulator, value, is_first) -> tf.Operation:
  value = tf.cast(value, accumulator.dtype)
  # The first value is assigned, not added to accumulator * 0, because the
  # accumulator may be uninitialized or NaN.
  return tf.cond(
    is_first,
    lambda: accumulator.assign(value, read_value=False),
    lambda: accumulator.assign_add(value, read_value=False),
  )


def _replacements(
  first: Sequence[object], others: Sequence[object]
) -> dict[int, object] | None:
  """Maps id(first device's argument) to the other device's argument.

  Returns None if operations must not be copied: two arguments differ but are
  neither tensors nor variables, or an argument would need two replacements.
  """
  replacements = {}
  for x, other in zip(first, others, strict=True):
    pairs = [(x, other)]
    if hasattr(x, "handle"):  # a variable; operations read its handle
      x, other = x.handle, other.handle
      pairs.append((x, other))
    if x is other:
      continue
    if not (isinstance(x, tf.Tensor) and isinstance(other, tf.Tensor)):
      return None
    for each, another in pairs:
      if replacements.setdefault(id(each), another) is not another:
        return None
    # Control dependencies are on operations, so map the tensor's operation too.
    replacements.setdefault(id(x.op), other.op)
  return replacements


def _is_plain(results: object) -> bool:
  """Returns whether all results are tensors, operations, variables or None."""
  if isinstance(results, tuple):
    return all(map(_is_plain, results))
  is_variable = hasattr(results, "handle")
  plain = (tf.Tensor, tf.Operation, type(None))
  return is_variable or isinstance(results, plain)


def _replace(results: object, made: Mapping[int, object]) -> object:
  # Returns the copies of `results`; `made` is {id(x): the copy of x}.
  if isinstance(results, tuple):
    return tuple(_replace(x, made) for x in results)
  return made.get(id(results), results)


class Devices(Protocol):
  """The devices of all pods (copies of the model), by TensorFlow's names."""

  @property
  def client(self) -> str:
    """CPU of the client process, which feeds and fetches tensors."""

  @property
  def pods(self) -> Sequence[Sequence[str]]:
    """Devices of each pod: stage after stage, each in the mesh's order."""

  def of_pod(self, pod: int) -> "Devices":
    """Returns the devices of one pod, for programs of this pod only."""


@dataclasses.dataclass(frozen=True)
class CpuGpuDevices:
  """`Devices` that are CPUs or GPUs, of this process or of servers."""

  client: str
  pods: Sequence[Sequence[str]]
  # Threads per C++ operation; 0 if any process that has these devices lacks the
  # C++ operations.
  native_threads: int = 0
  first_pod: int = 0  # number of the first of `pods` among all pods of the run

  def of_pod(self, pod: int) -> "CpuGpuDevices":
    """Returns the devices of one pod."""
    return dataclasses.replace(self, pods=[self.pods[pod]], first_pod=pod)

  def placement(
    self, mesh: DeviceMesh, pod: int, stage: int = 0
  ) -> CpuGpuPlacement:
    """Returns a pipeline stage's placement, on the stage's share of devices."""
    first = stage * mesh.num_devices
    devices = self.pods[pod][first : first + mesh.num_devices]
    return CpuGpuPlacement(mesh, devices, self.native_threads)


def local_devices(num_devices: int, num_pods: int = 1) -> CpuGpuDevices:
  """Returns devices of this process: `num_devices` for each pod.

  Raises UserError if this machine has GPUs, but fewer than the pods need.
  """
  gpus = len(tf.config.list_physical_devices("GPU"))
  needed = num_devices * num_pods
  if 0 < gpus < needed:
    raise UserError(
      f"MESH_SHAPE and NUM_PODS need {num_devices} x {num_pods} = {needed} "
      f"devices, and TensorFlow sees {gpus} GPUs here. Use at most {gpus}, or "
      "set CUDA_VISIBLE_DEVICES=-1 for virtual devices on the CPU."
    )
  # CPU devices are virtual; `session_config` makes as many as needed.
  kind = "gpu" if gpus else "cpu"
  names = [f"/device:{kind}:{i}" for i in range(needed)]
  starts = range(0, needed, num_devices)
  return CpuGpuDevices(
    client="/device:cpu:0",
    pods=[names[i : i + num_devices] for i in starts],
    native_threads=0 if gpus else threads_here(),
  )


def collective_scope(
  kind: str, shape: mtf.Shape, mesh_axes: Sequence[int]
) -> contextlib.AbstractContextManager:
  """Returns the name scope of a collective over axes of a mesh of `shape`."""
  if not mesh_axes:  # no collective
    return contextlib.nullcontext()
  # tools/traffic.py parses the name, such as "all_reduce.data.model".
  return tf.name_scope(".".join([kind, *(shape[x].name for x in mesh_axes)]))


# In the two functions below, device i holds xs[i]; all xs have the same shape
# and dtype. After a reduce-scatter, device i holds part i of the sum.


def reduce_scatter_ring(
  xs: Sequence[tf.Tensor], devices: Sequence[str], axis: int
) -> list[tf.Tensor]:
  """Returns the sum of xs, cut along `axis` into one part per device."""
  n = len(xs)
  if n == 1:
    return list(xs)
  # parts[d][i] is part i of the tensor on device d.
  parts = mtf.parallel(devices, lambda x: tf.split(x, n, axis), xs)
  sums = []
  # The sum of part i goes once around the ring, from device i + 1 to device i,
  # and each device adds its own part i. At each hop every device sends and
  # receives one part. Each sum has a fixed order, so that its bits never vary.
  for part in range(n):
    total = parts[(part + 1) % n][part]
    for distance in range(2, n + 1):
      place = (part + distance) % n
      with tf.device(devices[place]):
        total = tf.add(total, parts[place][part])
    sums.append(total)
  return sums


def all_gather_direct(
  xs: Sequence[tf.Tensor], devices: Sequence[str], axis: int
) -> list[tf.Tensor]:
  """Returns, on each device, all of xs concatenated along `axis`."""
  if len(xs) == 1:
    return list(xs)
  whole = []
  # Each device reads every other device's part. Mesh TensorFlow's ring would
  # move the same bytes, but with one operation for each hop of each part.
  for device in devices:
    with tf.device(device):
      whole.append(tf.concat(xs, axis))
  return whole
