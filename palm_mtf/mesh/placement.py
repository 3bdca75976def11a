# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A mesh of devices, each named, that holds its slices of every variable.

`Devices` names all of them, of the client and of each pod. `SlicePlacement` is
Mesh TensorFlow's `PlacementMeshImpl` for CPUs and GPUs, but its variables
(ops/variables.py) have no master: a slice is made and initialized where it
lives. A slice that several devices repeat is saved once, from the first of
them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

from palm_mtf._tf import mtf, tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.errors import UserError
from palm_mtf.mesh.collectives import (
  ALL_GATHER,
  ALL_REDUCE,
  REDUCE_SCATTER,
  all_gather_direct,
  reduce_scatter_ring,
  scope_of,
)
from palm_mtf.mesh.device_copies import OperationCopies
from palm_mtf.ops.bfloat16 import einsum
from palm_mtf.ops.variables import SlicedVariable, device_variable


@dataclasses.dataclass(frozen=True)
class Devices:
  """TensorFlow's names of the devices of a program.

  Attributes:
    client: the CPU of the process that feeds, fetches, and reads files.
    pods: devices of each pod, in the order of its mesh.
    assignments: for each pod of TPUs, where on its torus each of its devices
      lies; none of others.
  """

  client: str
  pods: Sequence[Sequence[str]]
  assignments: Sequence[tf.tpu.experimental.DeviceAssignment] = ()


@dataclasses.dataclass(frozen=True)
class Slice:
  """One device's part of a variable, or of several that are alike.

  Attributes:
    names: names of the variables, in a checkpoint.
    variable: the tf.Variable, of the dtype that is stored. Where there are
      several names it is a stack, with a row for each: so it is on TPUs.
    spec: TensorFlow's shape-and-slice text of each, "8 4 0,4:0,4": the whole
      shape, then begin,size of each dimension; "" when the slice is the whole,
      None when all of it is padding, which no checkpoint holds.
    sizes: sizes of what a checkpoint holds of each, from its beginning.
    is_first: False when an earlier device holds the same part.
  """

  names: Sequence[str]
  variable: tf.Variable
  spec: str | None
  sizes: list[int]
  is_first: bool

  @property
  def near(self) -> str:
    """Where its value is read and computed with, outside of a program.

    That is where it lives; but beside a TPU, which runs programs only.
    """
    device = self.variable.device
    return host_of(device) if "/device:TPU:" in device else device

  def read(self) -> tf.Tensor:
    """Returns its value, with padding."""
    with tf.device(self.variable.device):
      return self.variable.read_value()

  def rows(self, value: tf.Tensor) -> list[tf.Tensor]:
    """Returns what a value of `variable` has of each of `names`."""
    return tf.unstack(value) if len(self.names) > 1 else [value]

  def of_rows(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the value of `variable` that has these, of each of `names`."""
    return tf.stack(values) if len(self.names) > 1 else values[0]


def names_of(slices: Mapping[str, Sequence[Slice]]) -> list[str]:
  """Returns the names of all variables that slices are of, in their order."""
  return [name for parts in slices.values() for name in parts[0].names]


class SlicePlacement(mtf.placement_mesh_impl.PlacementMeshImpl):
  """Places one slice of everything on each device.

  Attributes:
    host: the CPU beside the first device: what it is fed from.
  """

  def __init__(self, mesh: MeshLayout, devices: Sequence[str]):
    """Lays tensors out by the rules of `mesh` over `devices`, in mesh order."""
    shape = mtf.Shape([mtf.Dimension(*axis) for axis in mesh.axes.items()])
    super().__init__(shape, list(mesh.rules.items()), list(devices))
    self.host = host_of(devices[0])

  def slicewise(self, fn, *inputs):
    """Mesh TensorFlow's; `fn` is called for the first device alone.

    What it made is copied for the others, unless it made a variable, or its
    arguments differ in something else than tensors and variables: then it is
    called for each, as Mesh TensorFlow does it.
    """
    inputs = mtf.ops.convert_args_to_laid_out_tensors(inputs)
    first, *others = (
      [
        x.tensor_list[i] if isinstance(x, self.LaidOutTensor) else x
        for x in inputs
      ]
      for i in range(len(self.devices))
    )
    num_before = tf.get_default_graph().num_operations()
    with tf.device(self.devices[0]):
      results = [fn(*first)]
    if others:
      results += self._repeated(fn, first, others, results[0], num_before)
    if isinstance(results[0], tuple):
      return tuple(
        map(self.LaidOutTensor, map(list, zip(*results, strict=True)))
      )
    return self.LaidOutTensor(results)

  def _repeated(self, fn, first, others, result, num_before):
    """Returns what `fn` gives of each of `others`, as `result` of `first`."""
    copies = OperationCopies(tf.get_default_graph(), num_before)
    can_copy = copies.can_be_made(self.devices[0]) and _is_plain(result)
    for device, arguments in zip(self.devices[1:], others, strict=True):
      replacements = _replacements(first, arguments) if can_copy else None
      if replacements is None:
        with tf.device(device):
          yield fn(*arguments)
      else:
        yield _replaced(result, copies.make(device, replacements))

  def einsum(self, equation, *slices):
    """Mesh TensorFlow's, in dtypes that the devices lack too."""
    return einsum(equation, *slices)

  def allreduce(self, x, mesh_axes, reduction_fn_string):
    """Mesh TensorFlow's, under the name of what it moves."""
    with self._moving(ALL_REDUCE, mesh_axes):
      return super().allreduce(x, mesh_axes, reduction_fn_string)

  def allconcat(self, x, mesh_axis, concat_axis):
    """An all-gather: joins the parts of x over a mesh axis, on each device."""

    def gather(xs, devices):
      return all_gather_direct(xs, devices, concat_axis)

    with self._moving(ALL_GATHER, [mesh_axis]):
      return self._collective_with_groups(x, [mesh_axis], gather)

  def reduce_scatter(self, x, mesh_axis: int, split_axis: int):
    """Adds up x over a mesh axis; each device keeps its part of the sum.

    Args:
      x: laid out: what each device adds.
      mesh_axis: number of the mesh axis.
      split_axis: axis of x along which the parts are cut.
    """

    def scatter(xs, devices):
      return reduce_scatter_ring(xs, devices, split_axis)

    with self._moving(REDUCE_SCATTER, [mesh_axis]):
      return self._collective_with_groups(x, [mesh_axis], scatter)

  def _moving(self, kind: str, mesh_axes: Sequence[int]):
    names = [self.shape[axis].name for axis in mesh_axes]
    return tf.name_scope(scope_of(kind, names)) if names else nullcontext()

  def assign(self, slot: tf.Variable, value: tf.Tensor, clip: tf.Tensor):
    """Returns what assigns; there is a value only if the step is finite.

    Args:
      slot: slot of a variable.
      value: its next.
      clip: the clip factor of the step (optim/clip.py).
    """
    del clip
    return slot.assign(value, read_value=False)

  def add(
    self, slot: tf.Variable, value: tf.Tensor, is_first: tf.Tensor
  ) -> tf.Operation:
    """Returns what adds to an accumulator in place.

    Args:
      slot: slot of the accumulator, float32.
      value: any float dtype.
      is_first: [], bool; where it is true the sum begins anew with `value`.
    """
    value = tf.cast(value, slot.dtype)
    # Not slot * 0: the accumulator may hold nothing yet, or what is no number.
    return tf.cond(
      is_first,
      lambda: slot.assign(value, read_value=False),
      lambda: slot.assign_add(value, read_value=False),
    )

  class LaidOutVariable:
    """The slices of one SlicedVariable; Mesh TensorFlow looks for this name."""

    def __init__(self, variable: SlicedVariable, mesh_impl: "SlicePlacement"):
      size = mesh_impl.slice_shape(variable.shape)
      self.slices: list[Slice] = []
      for pnum, part in enumerate(parts_of(variable, mesh_impl)):
        with tf.device(mesh_impl.devices[pnum]):
          value = variable.initializer.part_value(
            variable.name, variable.sizes, part
          )
          value = tf.cast(value, variable.slice_dtype)
          of_device = device_variable(
            padded(value, size), f"{variable.name}/slice_{pnum}"
          )
        self.slices.append(
          Slice(
            [variable.name], of_device, part.spec, part.sizes, part.is_first
          )
        )
      self.laid_out_tensor = mesh_impl.LaidOutTensor(
        [part.variable for part in self.slices]
      )


def _replacements(
  first: Sequence[object], others: Sequence[object]
) -> dict[int, object] | None:
  """Returns one device's tensors and variables by the id() of the first's.

  None where it takes more than other tensors to do the same.
  """
  replacements = {}
  for x, other in zip(first, others, strict=True):
    pairs = [(x, other)]
    if hasattr(x, "handle"):  # a variable
      x, other = x.handle, other.handle
      pairs.append((x, other))
    if x is other:
      continue
    if not (isinstance(x, tf.Tensor) and isinstance(other, tf.Tensor)):
      return None
    for each, another in pairs:
      if replacements.setdefault(id(each), another) is not another:
        return None
    # What waits for a tensor, waits for its operation.
    replacements.setdefault(id(x.op), other.op)
  return replacements


def _is_plain(results: object) -> bool:
  """Whether results are known by their id() alone."""
  if isinstance(results, tuple):
    return all(map(_is_plain, results))
  is_variable = hasattr(results, "handle")
  plain = (tf.Tensor, tf.Operation, type(None))
  return is_variable or isinstance(results, plain)


def _replaced(results: object, made: Mapping[int, object]) -> object:
  """Returns results with what another device has in place of the first's."""
  if isinstance(results, tuple):
    return tuple(_replaced(x, made) for x in results)
  return made.get(id(results), results)


@dataclasses.dataclass(frozen=True)
class Part:
  """What one device holds of a variable.

  Attributes:
    begin: its first number, in each dimension.
    sizes: sizes of its dimensions, without padding (Slice).
    spec: TensorFlow's shape-and-slice text (Slice).
    is_first: whether it is the first of those that hold these numbers (Slice).
  """

  begin: list[int]
  sizes: list[int]
  spec: str | None
  is_first: bool

  def cut(self, x: tf.Tensor) -> tf.Tensor:
    """Returns the part of x, the whole variable, without padding."""
    if 0 in self.sizes:
      return tf.zeros(self.sizes, x.dtype)
    if self.sizes == x.shape.as_list():
      return x
    return tf.slice(x, self.begin, self.sizes)


def parts_of(
  variable: SlicedVariable, mesh_impl: mtf.MeshImpl
) -> Iterator[Part]:
  """Yields the part of each device, in the order of the mesh."""
  size = mesh_impl.slice_shape(variable.shape)
  seen = set()
  for pnum in range(mesh_impl.size):
    begin = mesh_impl.slice_begin(variable.shape, pnum)
    held = [
      max(0, min(n, whole - first))
      for n, whole, first in zip(size, variable.sizes, begin, strict=True)
    ]
    spec = _slice_spec(variable.sizes, begin, held)
    yield Part(begin, held, spec, spec not in seen)
    seen.add(spec)


def _slice_spec(
  sizes: list[int], begin: list[int], held: list[int]
) -> str | None:
  if held == sizes:
    return ""
  if 0 in held:
    return None
  shape = " ".join(map(str, sizes))
  parts = ":".join(f"{b},{s}" for b, s in zip(begin, held, strict=True))
  return f"{shape} {parts}"


def padded(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
  """Returns x with zeros behind it, of shape `sizes`."""
  more = [[0, n - had] for n, had in zip(sizes, x.shape, strict=True)]
  return tf.pad(x, more) if any(n for _, n in more) else x


def host_of(device: str) -> str:
  """Returns the CPU beside a device: itself, if it is one."""
  task, _, name = device.rpartition("/device:")
  return device if name.startswith("cpu:") else f"{task}/device:cpu:0"


def local_devices(num_devices: int, num_pods: int = 1) -> Devices:
  """Returns devices of this process for pods of `num_devices` each.

  GPUs where there are any, else virtual CPU devices, of which `session_config`
  makes as many.

  Raises:
    UserError: there are GPUs, and fewer than that.
  """
  gpus = len(tf.config.list_physical_devices("GPU"))
  needed = num_devices * num_pods
  if 0 < gpus < needed:
    raise UserError(
      f"MESH_SHAPE and NUM_PODS need {num_devices} x {num_pods} = {needed} "
      f"devices, and TensorFlow sees {gpus} GPUs here. Use at most as many, or "
      "set CUDA_VISIBLE_DEVICES=-1 for virtual devices on the CPU."
    )
  kind = "gpu" if gpus else "cpu"
  names = [f"/device:{kind}:{i}" for i in range(needed)]
  return Devices(
    client="/device:cpu:0",
    pods=[
      names[i : i + num_devices] for i in range(0, len(names), num_devices)
    ],
  )
