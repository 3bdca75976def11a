# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The placement of a pod on accelerators: operations of one of its devices.

All devices of a pod run one program. Mesh TensorFlow's `SimdMeshImpl` builds
the operations of a device; parts.py makes them a function that JAX compiles.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh

from palm_mtf._tf import gen_xla_ops, mtf, tf
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.executors.xla.collectives import (
  all_gather,
  all_reduce,
  all_to_all,
  permute,
  reduce_scatter,
)
from palm_mtf.ops.variables import SlicedVariable

# If a reduce-scatter gives a device fewer columns, the TPU's compiler may turn
# it into an all-reduce, which sends twice the bytes. 256 columns are enough for
# PaLM 8B on a v4-4x4x4; 128 are too few for PaLM 62B on a v4-8x8x8.
_WIDE = 256
_CHANNELS = 2**16  # more than the collectives of a function
_TILE_COLUMNS = 128  # columns per tile of a TPU's memory
# Name under which `XlaPlacement.values` has the state of random operations, [4]
# int32: the step, the microbatch's first row, and two unused numbers.
RANDOM_STATE = "random_state"
# TensorFlow's random functions, and those that take their state as an argument.
_RANDOM = {
  tf.random.uniform: tf.random.stateless_uniform,
  tf.random.normal: tf.random.stateless_normal,
  tf.random.truncated_normal: tf.random.stateless_truncated_normal,
}


class XlaPlacement(mtf.simd_mesh_impl.SimdMeshImpl):
  """Builds the operations of one device; all devices of a pod run them.

  It has the members of `CpuGpuPlacement` (mesh/cpu_gpu.py) that models use.

  Attributes:
    platform: kind of devices in lowered programs: "cpu", "tpu" or "cuda".
    lock: held by a thread that builds operations with the attributes below,
      because the pods of a process share this object.
    index: the device's number in the mesh, [] int32.
    values: the device's slice of each variable that operations read, by name.
    assigned: the next values of variables that operations assign, by name.
    num_functions: number of functions whose operations this object builds.
    num_draws: number of random operations that the function has so far.
    in_scan: whether JAX scans the operations over the layers, which decides the
      memory layout of the sums that `reduce_scatter` returns.
  """

  native_threads = 0
  cpu = ""  # no device for tf.device, because JAX chooses devices

  def __init__(self, mesh: DeviceMesh, platform: str):
    """Takes the mesh, and the kind of its devices: "cpu", "tpu" or "cuda"."""
    self.platform = platform
    shape = mtf.Shape([mtf.Dimension(*axis) for axis in mesh.axes.items()])
    super().__init__(shape, list(mesh.rules.items()))
    self.index: tf.Tensor | None = None
    self.values: dict[str, tf.Tensor] = {}
    self.assigned: dict[str, tf.Tensor] = {}
    self.num_functions = self.num_draws = self._num_collectives = 0
    self._function = 0
    self.in_scan = False
    self.lock = threading.Lock()
    self._groups: dict[tuple[int, ...], list[list[int]]] = {}

  class LaidOutVariable:
    """A device's slice of a variable; Mesh TensorFlow requires this name."""

    def __init__(self, variable: SlicedVariable, mesh_impl: "XlaPlacement"):
      self.laid_out_tensor = mesh_impl.LaidOutTensor(
        [mesh_impl.values[variable.name]]
      )
      self.laid_out_tensor.variable = variable.name

  def begin(
    self,
    index: tf.Tensor,
    *,
    function: int = 0,
    values: Mapping[str, tf.Tensor] = MappingProxyType({}),
    in_scan: bool = False,
  ) -> None:
    """Begins to build a function; resets all attributes of the last one.

    `function` is the function's number among those of a program. The other
    arguments are attributes.
    """
    self.index, self.values, self.in_scan = index, dict(values), in_scan
    self.assigned, self.num_draws = {}, 0
    self._function, self._num_collectives = function, 0

  def _new_channel(self) -> int:
    # All hosts of a pod must build the same program, so channels are numbered
    # by function, not in the order in which this process builds functions. JAX
    # gives channel 1 to its own collectives.
    self._num_collectives += 1
    return (self._function + 1) * _CHANNELS + self._num_collectives

  @property
  def pnum_tensor(self) -> tf.Tensor:
    """The device's number in the mesh; Mesh TensorFlow needs this name."""
    return self.index

  def lower(self, placements: Mapping[mtf.Mesh, Any]) -> mtf.Lowering:
    """Lowers a graph without variables, such as a decoding function's."""
    (mesh,) = placements
    return mtf.Lowering(mesh.graph, placements, autostack=False)

  def make_slices(self, x: tf.Tensor, shape: mtf.Shape) -> list[tf.Tensor]:
    """Cuts the device's slice out of x; each device has a copy of all of x."""
    return self.slice(x, shape).tensor_list

  def combine_slices(
    self, slices: list[tf.Tensor], shape: mtf.Shape
  ) -> tf.Tensor:
    """All-gathers the slices of a tensor; each device gets the whole tensor."""
    (x,) = slices
    whole = self.LaidOutTensor([tf.cast(x, tf.int32) if x.dtype.is_bool else x])
    for place, axis in enumerate(
      self.tensor_layout(shape).tensor_axis_to_mesh_axis
    ):
      if axis is not None:
        whole = self.allconcat(whole, axis, place)
    return tf.cast(whole.one_slice, x.dtype)

  def make_mesh(self, devices: Sequence[Any]) -> Mesh:
    """Returns JAX's mesh of a pod; `devices` are in the order of the mesh."""
    dims = self.shape.dims
    shape = [dim.size for dim in dims] or [1]
    names = [dim.name for dim in dims] or ["one"]
    return Mesh(np.array(devices).reshape(shape), names)

  def find_index(self) -> jax.Array:
    """Returns, inside of `jax.shard_map`, the device's number, [] int32."""
    index = jnp.int32(0)
    for dim in self.shape.dims:
      index = index * dim.size + lax.axis_index(dim.name)
    return index

  def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor) -> Any:
    """Returns the device's slice of `tf_x`, which is all of x."""
    # `tf_x` may be in another tf.Graph, the one in which the Mesh TensorFlow
    # operations were made, so copy its value or the operations that compute it.
    value = tf.get_static_value(tf_x)
    if value is not None:
      copy = tf.constant(value, tf_x.dtype)
    else:
      graph = tf_x.graph.as_graph_def()
      needed = tf.graph_util.extract_sub_graph(graph, [tf_x.op.name])
      (copy,) = tf.import_graph_def(
        needed, return_elements=[tf_x.name], name=""
      )
    return self.slice(copy, x.shape)

  def random(self, shape: mtf.Shape, tf_fn: Callable, kwargs: Mapping) -> Any:
    """Draws the device's slice; devices with equal slices draw the same.

    The numbers depend on RANDOM_STATE, and on how many were drawn before, so
    that every step, microbatch and pod has its own numbers.
    """
    if tf_fn not in _RANDOM:
      raise NotImplementedError(
        "draw by mtf.random_uniform or mtf.random_normal"
      )
    if tf.get_default_graph() is not self.index.graph:
      raise NotImplementedError("draw random numbers outside of loops")
    step, first_row, *_ = tf.unstack(self.values[RANDOM_STATE])
    self.num_draws += 1
    seed = tf.stack([step, first_row])
    part = self.laid_out_slice_num(shape).one_slice
    for number in (self.num_draws, part):
      seed = tf.random.experimental.stateless_fold_in(seed, number)
    drawn = _RANDOM[tf_fn](self.slice_shape(shape), seed, **kwargs)
    return self.LaidOutTensor([drawn])

  def delay(self, x: Any, signal: Any) -> Any:
    """Returns x, but lets nothing read it before `signal`, to save memory."""
    return self.slicewise(_delay, x, signal)

  def assign_if_finite(self, variable, value, is_finite) -> list[tf.Operation]:
    """Assigns `value` if `is_finite`; otherwise keeps the old value."""
    return self.update_if_finite(
      lambda _, value: [value], [variable], [value], is_finite
    )

  def update_if_finite(
    self,
    fn: Callable[..., Sequence[tf.Tensor]],
    variables: Sequence[Any],
    operands: Sequence[Any],
    is_finite: Any,
  ) -> list[tf.Operation]:
    """Sets variables to what `fn` returns if `is_finite`; else keeps them."""
    old = [x.one_slice for x in variables]
    operands = mtf.ops.convert_args_to_laid_out_tensors(list(operands))
    (is_finite,) = mtf.ops.convert_args_to_laid_out_tensors([is_finite])
    values = fn(old, *(x.one_slice for x in operands))
    for variable, before, value in zip(variables, old, values, strict=True):
      self.assigned[variable.variable] = tf.where_v2(
        is_finite.one_slice, tf.cast(value, before.dtype), before
      )
    return []

  def allreduce(self, x, mesh_axes, reduction_fn_string):
    """All-reduces x over `mesh_axes` by XLA's sum, maximum or minimum."""
    x = x.to_laid_out_tensor()
    axes = [axis for axis in mesh_axes if self.shape[axis].size > 1]
    if not axes:
      return x
    groups, channel = self._find_groups(axes), self._new_channel()
    return self.LaidOutTensor(
      [all_reduce(x.one_slice, groups, reduction_fn_string, channel)]
    )

  def allconcat(self, x, mesh_axis, concat_axis, stack=False):
    """All-gathers x; each device gets all parts, joined along `concat_axis`."""
    assert not stack
    x = x.to_laid_out_tensor()
    if self.shape[mesh_axis].size == 1:
      return x
    groups, channel = self._find_groups([mesh_axis]), self._new_channel()
    return self.LaidOutTensor(
      [all_gather(x.one_slice, groups, concat_axis, channel)]
    )

  def receive(self, x, mesh_axis, source_pcoord):
    """Returns the slice of device `source_pcoord[i]` of a group; None: zeros.

    i is the receiving device's coordinate along `mesh_axis`.
    """
    x = x.to_laid_out_tensor()
    pairs = [
      (group[source], group[i])
      for group in self._find_groups([mesh_axis])
      for i, source in enumerate(source_pcoord)
      if source is not None
    ]
    return self.LaidOutTensor(
      [permute(x.one_slice, pairs, self._new_channel())]
    )

  def alltoall(self, x, mesh_axis, split_axis, concat_axis):
    """Cuts x along `split_axis`; joins received parts along `concat_axis`."""
    x = x.to_laid_out_tensor()
    groups, channel = self._find_groups([mesh_axis]), self._new_channel()
    moved = all_to_all(x.one_slice, groups, split_axis, concat_axis, channel)
    return self.LaidOutTensor([moved])

  def reduce_scatter(self, x, mesh_axis: int, split_axis: int):
    """Sums x over a mesh axis; device i gets part i along `split_axis`."""
    x = x.to_laid_out_tensor()
    if self.shape[mesh_axis].size == 1:
      return x
    groups, channel = self._find_groups([mesh_axis]), self._new_channel()
    whole = x.one_slice
    sizes = whole.shape.as_list()
    before, after = sizes[:split_axis], sizes[split_axis + 1 :]
    if before and after:
      part = reduce_scatter(whole, groups, split_axis, channel)
      return self.LaidOutTensor([part])
    # XLA chooses the memory layout only of matrices, so reshape x to a matrix,
    # which is possible if the split dimension is first or last.
    rows = math.prod(before) if before else sizes[0]
    matrix = tf.reshape(whole, [rows, -1])
    if before and sizes[-1] // len(groups[0]) < _WIDE:
      part = self._scatter_columns(matrix, groups, channel)
    else:
      part = reduce_scatter(matrix, groups, int(bool(before)), channel)
    return self.LaidOutTensor([tf.reshape(part, [*before, -1, *after])])

  def _scatter_columns(
    self, matrix: tf.Tensor, groups: Sequence[Sequence[int]], channel: int
  ) -> tf.Tensor:
    """Reduce-scatters a matrix into parts of fewer than _WIDE columns."""
    # For so few columns, XLA keeps a reduce-scatter only if the split dimension
    # is outermost in memory; otherwise XLA makes it an all-reduce and a slice.
    rows, columns = matrix.shape.as_list()
    num_parts = len(groups[0])
    if self.in_scan and columns == num_parts * _TILE_COLUMNS:
      # A scan joins the parts of all layers in one array, which decides each
      # part's layout: columns are not outermost. So make tiles outermost. This
      # costs no copy, because the product that computes the matrix can write
      # tiles in any order. (Not if an array is added, as to some gradients.)
      tiles = tf.reshape(matrix, [rows, num_parts, _TILE_COLUMNS])
      part = reduce_scatter(tf.transpose(tiles, [1, 0, 2]), groups, 0, channel)
      return tf.reshape(part, [rows, _TILE_COLUMNS])
    part = reduce_scatter(tf.transpose(matrix), groups, 0, channel)
    return tf.transpose(part)

  def _find_groups(self, mesh_axes: Sequence[int]) -> list[list[int]]:
    """Returns the groups of devices that differ only along `mesh_axes`."""
    axes = tuple(mesh_axes)
    if axes not in self._groups:
      sizes = [dim.size for dim in self.shape.dims]
      numbers = np.arange(self.size).reshape(sizes)
      others = [i for i in range(len(sizes)) if i not in axes]
      moved = numbers.transpose([*others, *axes])
      size = int(np.prod([sizes[i] for i in axes]))
      self._groups[axes] = moved.reshape(-1, size).tolist()
    return self._groups[axes]


def _delay(x: tf.Tensor, signal: tf.Tensor) -> tf.Tensor:
  # XLA ignores control dependencies, but not optimization barriers.
  return gen_xla_ops.xla_optimization_barrier([x, signal])[0]
