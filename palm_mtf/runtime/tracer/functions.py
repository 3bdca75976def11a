# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions on virtual slices, in TensorFlow or Mesh TensorFlow."""

import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.mesh.cpu_gpu import CpuGpuLowering, CpuGpuPlacement
from palm_mtf.mesh.device_copies import OperationCopies
from palm_mtf.ops.variables import adopt_variables
from palm_mtf.runtime.tracer.shards import (
  Sharding,
  Shards,
  VirtualSlice,
  split_rows,
)
from palm_mtf.user_code import user_code


class Built(NamedTuple):
  """The tensors that a function on a slice has added to a graph."""

  nested: Any  # what the function returns
  outputs: list[Shards]  # shards of each tensor in `nested`
  held: list[Sharding]  # how the devices hold each tensor in `nested`
  can_fuse: bool = False  # whether devices send nothing, so XLA can fuse
  variables: Sequence[tf.Variable] = ()  # variables that the function reads


class Function:
  """A TensorFlow function that every device of a slice calls on its shards."""

  def __init__(self, fn: Callable[..., Any], name: str):
    self.name, self.fn = name, fn

  def on(self, slice_: VirtualSlice) -> Callable[..., Any]:
    """Returns the function on a slice.

    In a traced block it takes and returns traced values. Elsewhere it is its
    own program: it takes arrays and buffers, and returns buffers.
    """
    return functools.partial(slice_.owner.call, self, slice_)

  def read(self, slice_: VirtualSlice, inputs: Sequence[Any]) -> list[Sharding]:
    """Returns the shardings in which the function reads its inputs.

    Inputs have a shape and a dtype; UserError if the function takes others.
    """
    self._check(*inputs)
    return [
      split_rows(slice_, x.shape, x.dtype, f"input {i} of {self.name}")
      for i, x in enumerate(inputs)
    ]

  def build(
    self,
    slice_: VirtualSlice,
    read: Sequence[Sharding],
    inputs: Sequence[Shards],
  ) -> Built:
    """Adds the function to the current graph, for every device of a slice.

    Raises UserError if the function fails, or the shape of a result is unknown.
    """
    copies = _Copies(self.name, slice_.devices, inputs)
    token = _COPIES.set(copies)
    first = tf.DeviceSpec.from_string(slice_.devices[0]).to_string()

    def place(operation: tf.Operation) -> str:
      # Operations in a loop's body name no device, so that they run on the
      # device of whichever copy of the loop runs the body.
      return "" if operation.graph.building_function else first

    try:
      with user_code(self.name), tf.device(place):
        nested = tf.nest.map_structure(
          to_rows, self.fn(*[x[0] for x in inputs])
        )
    finally:
      _COPIES.reset(token)
    outputs = [copies.of(x) for x in tf.nest.flatten(nested)]
    held = []
    for x, *_ in outputs:
      if not x.shape.is_fully_defined():
        raise UserError(
          f"{self.name} returns a tensor of shape {x.shape}: return tensors "
          "whose shapes do not depend on values."
        )
      shape = (len(slice_.devices) * x.shape[0], *x.shape[1:])
      held.append(split_rows(slice_, shape, x.dtype, self.name))
    return Built(nested, outputs, held, can_fuse=not copies.num_sums)

  def _check(self, *inputs: object) -> None:
    try:
      inspect.signature(self.fn).bind(*inputs)
    except TypeError as error:
      raise UserError(
        f"{self.name}: {error}; give one input per argument."
      ) from None


def to_rows(x: object) -> tf.Tensor:
  """Converts a device's result to a tensor; a scalar becomes one row, [1]."""
  x = tf.convert_to_tensor(x)
  return x if x.shape.rank != 0 else tf.reshape(x, [1])


class _Copies:
  """Copies operations to other devices, so their function is called once."""

  def __init__(
    self, name: str, devices: Sequence[str], inputs: Sequence[Shards]
  ):
    self._name = name
    self._devices, self.graph = devices, tf.get_default_graph()
    self._num_copied, self.num_sums = self.graph.num_operations(), 0
    # For each device, {id(the first device's tensor): the device's tensor}.
    self._tensors = [
      {id(x[0]): x[i] for x in inputs} for i in range(len(devices))
    ]

  def of(self, x: tf.Tensor) -> Shards:
    """Makes missing copies of `x`; returns each device's `x`, in order."""
    copies = OperationCopies(self.graph, self._num_copied)
    if not copies.can_be_made(self._devices[0]):
      raise UserError(
        f"{self._name} makes a variable or chooses a device; make its state "
        "inputs and results, or write a mesh_function."
      )
    for i, device in enumerate(self._devices[1:], 1):
      self._tensors[i] = copies.make(device, self._tensors[i])
    self._num_copied = self.graph.num_operations()
    return [x, *(made.get(id(x), x) for made in self._tensors[1:])]

  def add_up(self, x: tf.Tensor) -> tf.Tensor:
    """Makes each device add up `x` and its copies; returns device 0's sum."""
    terms, sums = self.of(x), []
    for device in self._devices:
      with tf.device(device):
        sums.append(functools.reduce(tf.add, terms))
    for made, total in zip(self._tensors, sums, strict=True):
      made[id(sums[0])] = total
    self._num_copied = self.graph.num_operations()
    self.num_sums += 1
    return sums[0]


_COPIES: contextvars.ContextVar = contextvars.ContextVar("copies", default=None)


def all_sum(x: tf.Tensor) -> tf.Tensor:
  """Adds up the values that a slice's devices have for `x`, in their order.

  Every device gets the same bits. Call it only in a `runtime.function`.
  """
  copies = _COPIES.get()
  if not copies or copies.graph is not tf.get_default_graph():
    raise UserError(
      "all_sum is called outside of a function of a slice, or in a loop or "
      "branch of it; call it directly in a function that is passed to "
      "runtime.function."
    )
  return copies.add_up(tf.convert_to_tensor(x))


class MeshFunction(Function):
  """A Mesh TensorFlow function, which is lowered to the mesh of a slice."""

  def __init__(
    self, fn: Callable, name: str, dims: Sequence[str], layout: str, seed: int
  ):
    super().__init__(fn, name)
    self._layout, self._seed = layout, seed
    self._dims = [x.replace(",", " ").split() for x in dims]

  def read(self, slice_: VirtualSlice, inputs: Sequence[Any]) -> list[Sharding]:
    """Returns the shardings of the inputs, which `dims` and `layout` decide."""
    self._check(None, *inputs)  # None in place of the mesh, the first argument
    ranks = [len(x.shape) for x in inputs]
    if ranks != [*map(len, self._dims)]:
      raise UserError(
        f"{self.name} is called with inputs of {ranks} dimensions, and dims = "
        f"{[' '.join(x) for x in self._dims]}; name every dimension."
      )
    placement = self._place(slice_)
    with user_code(self.name):
      return [
        _shard(slice_, placement, _make_shape(names, x.shape), x.dtype)
        for names, x in zip(self._dims, inputs, strict=True)
      ]

  def build(
    self,
    slice_: VirtualSlice,
    read: Sequence[Sharding],
    inputs: Sequence[Shards],
  ) -> Built:
    """Lowers the function to every device of a slice."""
    placement, graph = self._place(slice_), mtf.Graph()
    mesh = mtf.Mesh(graph, self.name)
    with user_code(self.name):
      given = [
        mtf.import_laid_out_tensor(
          mesh, placement.LaidOutTensor(shards), _make_shape(names, x.shape)
        )
        for names, x, shards in zip(self._dims, read, inputs, strict=True)
      ]
      with adopt_variables(mesh, self._seed):
        nested = self.fn(mesh, *given)
      found = tf.nest.flatten(nested)
      for x in graph.all_variables:
        place = _shard(slice_, placement, x.shape, x.dtype).regions
        slice_.owner.keep_place(x.name, slice_.devices, place)
      lowering = CpuGpuLowering({mesh: placement})
    return Built(
      nested,
      [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in found],
      [_shard(slice_, placement, x.shape, x.dtype) for x in found],
      variables=[x.variable for y in lowering.slices[0].values() for x in y],
    )

  def _place(self, slice_: VirtualSlice) -> CpuGpuPlacement:
    mesh = DeviceMesh(mesh_shape=slice_.mesh_shape, layout=self._layout)
    return CpuGpuPlacement(mesh, slice_.devices)


def _make_shape(names: Sequence[str], sizes: Sequence[int]) -> mtf.Shape:
  return mtf.Shape([*map(mtf.Dimension, names, sizes)])


def _shard(
  slice_: VirtualSlice,
  placement: CpuGpuPlacement,
  shape: mtf.Shape,
  dtype: tf.DType,
) -> Sharding:
  begins = (placement.slice_begin(shape, i) for i in range(placement.size))
  sizes = tuple(placement.slice_shape(shape))
  whole = tuple(shape.to_integer_list)
  return Sharding(slice_, whole, dtype, sizes, tuple(map(tuple, begins)))


_NAMED: dict[str, Function] = {}


def function(fn: Callable[..., Any] | str, name: str = "") -> Function:
  """Makes a function on slices from a TensorFlow function, or looks one up.

  Every device of a slice calls `fn` with its rows of each array, and with
  scalars as they are. The rows that all devices return are the rows of the
  result; a scalar counts as one row.

  Args:
    fn: TensorFlow function, which may call `all_sum`; or the name of a
      registered function.
    name: name under which to register the function.

  Raises UserError if no function of this name is registered.
  """
  if callable(fn):
    return _register(Function(fn, name or fn.__name__), name)
  if fn not in _NAMED:
    raise UserError(
      f'there is no function "{fn}"{did_you_mean(fn, _NAMED)}; register it by '
      f'runtime.function(code, name="{fn}").'
    )
  return _NAMED[fn]


def mesh_function(
  fn: Callable[..., Any],
  *,
  dims: Sequence[str] = (),
  layout: str = "",
  seed: int = 0,
  name: str = "",
) -> Function:
  """Makes a function on slices from a Mesh TensorFlow function.

  It may read variables, which stay on the devices. All functions and training
  steps of a client share the variables that have the same name.

  Args:
    fn: maps a mesh and an mtf.Tensor per input to mtf.Tensors.
    dims: names of the dimensions of each input, as in ["batch length"].
    layout: rules that split dimensions over axes of the slice, as in "batch:x".
    seed: seed of the initial values of variables.
    name: name to register the function by.
  """
  made = MeshFunction(fn, name or fn.__name__, dims, layout, seed)
  return _register(made, name)


def _register(made: Function, name: str) -> Function:
  if name:
    _NAMED[name] = made
  return made
