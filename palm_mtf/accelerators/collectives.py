# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives in TensorFlow functions that JAX compiles and runs.

TensorFlow has no operation for XLA's all-gather, and JAX cannot lower
TensorFlow's other collectives for CPUs and GPUs. So each collective here is an
XlaCallModule, whose StableHLO JAX copies into its own program unchanged.

In each function, `x` is float32, bfloat16 or int32, and has the same shape on
all devices. `groups` lists the numbers of the devices of each group. A device's
number is its index in `jax.sharding.Mesh.devices`, flattened. All groups have
the same size, which divides the size of a dimension that is cut. Parts are
joined in the order of the group.
"""

from collections.abc import Sequence

from palm_mtf._tf import gen_xla_ops, tf

Groups = Sequence[Sequence[int]]

_VERSION = 5  # format of the attributes that `_call` gives an XlaCallModule
_NAMES = {tf.float32: "f32", tf.bfloat16: "bf16", tf.int32: "i32"}
_REDUCTIONS = {"SUM": "add", "MAX": "maximum", "MIN": "minimum"}


def all_reduce(x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
  """Reduces x element-wise over each group; returns a tensor shaped like x.

  `reduction` is "SUM", "MAX" or "MIN".
  """
  region = _region(x, _REDUCTIONS[reduction])
  return _call("all_reduce", x, groups, [], x.shape.as_list(), region)


def reduce_scatter(x: tf.Tensor, groups: Groups, axis: int) -> tf.Tensor:
  """Sums x over each group; its device i gets part i of the sum on `axis`."""
  shape = x.shape.as_list()
  shape[axis] //= len(groups[0])
  attributes = [f"scatter_dimension = {axis} : i64"]
  return _call(
    "reduce_scatter", x, groups, attributes, shape, _region(x, "add")
  )


def all_gather(x: tf.Tensor, groups: Groups, axis: int) -> tf.Tensor:
  """Returns the parts x of all devices of a group, joined along `axis`."""
  shape = x.shape.as_list()
  shape[axis] *= len(groups[0])
  attributes = [f"all_gather_dim = {axis} : i64"]
  return _call("all_gather", x, groups, attributes, shape)


def all_to_all(
  x: tf.Tensor, groups: Groups, split_axis: int, concat_axis: int
) -> tf.Tensor:
  """Cuts x along `split_axis`; joins received parts along `concat_axis`.

  Device i of a group gets part i of each device.
  """
  count, shape = len(groups[0]), x.shape.as_list()
  shape[split_axis] //= count
  shape[concat_axis] *= count
  attributes = [
    f"split_dimension = {split_axis} : i64",
    f"concat_dimension = {concat_axis} : i64",
    f"split_count = {count} : i64",
  ]
  return _call("all_to_all", x, groups, attributes, shape)


def _region(x: tf.Tensor, reduction: str) -> str:
  number = f"tensor<{_NAMES[x.dtype]}>"
  return (
    f"({{ ^bb0(%a: {number}, %b: {number}): "
    f"%c = stablehlo.{reduction} %a, %b : {number} "
    f"stablehlo.return %c : {number} }})"
  )


def _call(
  name: str,
  x: tf.Tensor,
  groups: Groups,
  attributes: Sequence[str],
  shape: Sequence[int],
  region: str = "",
) -> tf.Tensor:
  """Runs StableHLO's collective `name` on x; the result has shape `shape`."""
  given, result = (
    f"tensor<{'x'.join([*map(str, each), _NAMES[x.dtype]])}>"
    for each in (x.shape.as_list(), shape)
  )
  rows = ",".join(f"[{','.join(map(str, x))}]" for x in groups)
  size = f"{len(groups)}x{len(groups[0])}"
  attributes = [
    *attributes,
    f"replica_groups = dense<[{rows}]> : tensor<{size}xi64>",
    # With a channel and use_global_device_ids, XLA takes the numbers in groups
    # for devices; without them, for replicas. For an all_to_all, the channel
    # suffices.
    "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>",
  ]
  if name != "all_to_all":
    attributes.append("use_global_device_ids")
  attributes = ", ".join(attributes)
  module = (
    f"module @{name} {{ func.func public @main(%x: {given}) -> {result} {{ "
    f'%y = "stablehlo.{name}"(%x) <{{{attributes}}}> {region} '
    f": ({given}) -> {result} return %y : {result} }} }}"
  )
  (y,) = gen_xla_ops.xla_call_module(
    [x],
    version=_VERSION,
    module=module,
    Sout=[shape],
    Tout=[x.dtype],
    platforms=[],
    dim_args_spec=[],
  )
  return y
