# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables on TPUs: a device stacks variables of a kind, such as "mlp/wi"."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.architecture import parse_name
from palm_mtf.mesh.slices import Region, Slice, pad_to, regions_of
from palm_mtf.ops.variables import Fill, SlicedVariable, keep_variable
from palm_mtf.ops.xla import function

# With thousands of devices and a hundred layers, it takes long to make, pass to
# programs and save each variable on each device. Therefore the variables of one
# kind are stacked. In a checkpoint each row of a stack is one layer's variable.
# A stack has at most _MAX_BYTES, because it is sent as one message, and gRPC
# counts the bytes of a message in 32 bits.
_MAX_BYTES = 2**30

_T = TypeVar("_T")


def cut_stacks(alike: Sequence[_T], num_bytes: int) -> list[Sequence[_T]]:
  """Splits values of `num_bytes` each into stacks of at most _MAX_BYTES."""
  num_rows = max(1, _MAX_BYTES // num_bytes)
  return [alike[i : i + num_rows] for i in range(0, len(alike), num_rows)]


def list_stacks(
  variable: SlicedVariable, mesh_impl: mtf.MeshImpl
) -> list[Sequence[SlicedVariable]]:
  """Groups the variables of all layers that are like `variable` into stacks."""
  alike = [
    x
    for x in variable.graph.all_variables
    if x.mesh is variable.mesh
    and parse_name(x.name).part == parse_name(variable.name).part
  ]
  size = mesh_impl.slice_size(variable.shape) * variable.slice_dtype.size
  return cut_stacks(alike, size)


class Stack:
  """Variables of one kind, such as mlp/wi of many layers.

  Attributes:
    name: name of the first variable.
    slices: on each device, the stack of the device's slices.
  """

  # A program reads a stack once, at the program's beginning, and writes the
  # stack once, at the end; between the two, a row is a tensor.

  def __init__(
    self,
    variables: Sequence[SlicedVariable],
    mesh_impl: mtf.MeshImpl,
    cpus: Sequence[str],
  ):
    # Makes one TensorFlow variable per device. `variables` have equal shapes,
    # dtypes and initializers; `cpus` has the CPU of each device's host.
    names = [each.name for each in variables]
    self.name = names[0]
    regions = list(regions_of(variables[0], mesh_impl))
    values = _make_first_values(variables, mesh_impl, regions, cpus)
    self.slices = []
    for pnum, region in enumerate(regions):
      of_device = keep_variable(  # host -> device
        f"{self.name}/slice_{pnum}",
        mesh_impl.devices[pnum],
        functools.partial(values.__getitem__, pnum),
      )
      self.slices.append(
        Slice(**vars(region), names=names, variable=of_device, near=cpus[pnum])
      )
    self._variable = mtf.tpu_variables.ReplicatedVariable(
      self.name, [x.variable for x in self.slices]
    )
    self.begin()

  def variables(self) -> dict[str, "StackedVariable"]:
    """Returns the variables by name."""
    return {
      name: StackedVariable(self, i)
      for i, name in enumerate(self.slices[0].names)
    }

  def begin(self, whole: tf.Tensor | None = None) -> None:
    """Begins a computation, or a round of a loop, without rows read or set.

    `whole` is the stack at the beginning; None means the TensorFlow variable.
    """
    self._before, self._is_changed = whole, whole is not None
    self._rows: list[tf.Tensor] = []
    self._next: dict[int, tf.Tensor] = {}

  def value(self, row: int) -> tf.Tensor:
    """Returns the value of a row at the beginning of the computation."""
    if not self._rows:  # unstacks all rows when the first row is read
      self._rows = self.slices[0].rows(self._beginning())
    return self._rows[row]

  def set(self, row: int, value: tf.Tensor) -> None:
    """Sets the value that a row has at the end of the computation."""
    self._next[row] = value
    self._is_changed = True

  def whole(self) -> tf.Tensor:
    """Returns the value of the stack at the end of the computation."""
    if not self._next:
      return self._beginning()
    rows = range(len(self.slices[0].names))
    return self.slices[0].stack_rows(
      [self._next[i] if i in self._next else self.value(i) for i in rows]
    )

  def end(self) -> list[tf.Operation]:
    """Returns the operation that writes the variable, if it has changed."""
    return [self._variable.assign(self.whole())] if self._is_changed else []

  def _beginning(self) -> tf.Tensor:
    if self._before is None:
      self._before = self._variable.read_value()
    return self._before


class StackedVariable:
  """One variable of a stack, in a computation; has the stored dtype."""

  def __init__(self, stack: Stack, row: int):
    self._stack, self._row = stack, row
    self.dtype = stack.slices[0].variable.dtype.base_dtype

  def __tf_tensor__(
    self, dtype: tf.DType | None = None, name: str | None = None
  ) -> tf.Tensor:
    # Even after an assignment, this is the value before the computation.
    del dtype, name
    return self._stack.value(self._row)

  def assign(self, value: tf.Tensor) -> tf.Tensor:
    """Sets the value that the variable has at the end of the computation."""
    self._stack.set(self._row, value)
    return value


# Returns, for each region, the stack of all variables' values in the region.
_First = Callable[[Sequence[Region]], list[tf.Tensor]]


def _make_first_values(
  variables: Sequence[SlicedVariable],
  mesh_impl: mtf.MeshImpl,
  regions: Sequence[Region],
  cpus: Sequence[str],
) -> list[tf.Tensor]:
  # Returns the initial value of each device's stack, on the device's host.
  of_cpus: dict[str, dict[tuple[int, ...], Region]] = {}
  for region, cpu in zip(regions, cpus, strict=True):
    of_cpus.setdefault(cpu, {})[tuple(region.begin)] = region
  is_filled = isinstance(variables[0].initializer, Fill)
  first = (_fill_stacks if is_filled else _draw_stacks)(variables, mesh_impl)
  values = {}
  # Each host makes the values of its devices' regions, once per region, so that
  # no host sends values. The values are the same as on meshes of CPUs.
  for cpu, of_cpu in of_cpus.items():
    with tf.device(cpu):
      made = first(list(of_cpu.values()))
      values[cpu] = dict(zip(of_cpu, made, strict=True))
  return [
    values[cpu][tuple(region.begin)]
    for region, cpu in zip(regions, cpus, strict=True)
  ]


def _fill_stacks(
  variables: Sequence[SlicedVariable], mesh_impl: mtf.MeshImpl
) -> _First:
  first = variables[0]
  rows = [len(variables)] if len(variables) > 1 else []
  sizes = [*rows, *mesh_impl.slice_shape(first.shape)]

  def filled(regions: Sequence[Region]) -> list[tf.Tensor]:
    by_sizes = {}
    for held in dict.fromkeys(tuple(region.sizes) for region in regions):
      value = first.initializer.full_value(first.name, [*rows, *held])
      by_sizes[held] = pad_to(tf.cast(value, first.slice_dtype), sizes)
    return [by_sizes[tuple(region.sizes)] for region in regions]

  return filled


def _draw_stacks(
  variables: Sequence[SlicedVariable], mesh_impl: mtf.MeshImpl
) -> _First:
  sizes = mesh_impl.slice_shape(variables[0].shape)

  @function
  def drawn(begins: tf.Tensor) -> list[tf.Tensor]:
    rows: list[list[tf.Tensor]] = []
    for each in variables:
      # Variables are drawn one by one, so that memory holds one whole variable.
      with tf.control_dependencies(rows[-1] if rows else []):
        whole = each.initializer.full_value(each.name, each.sizes)
        whole = tf.cast(whole, each.slice_dtype)
        whole = pad_to(whole, each.shape.to_integer_list)
        rows.append([tf.slice(whole, x, sizes) for x in tf.unstack(begins)])
    stacks = zip(*rows, strict=True)
    return [tf.stack(x) if len(x) > 1 else x[0] for x in stacks]

  return lambda regions: drawn(tf.constant([x.begin for x in regions]))
