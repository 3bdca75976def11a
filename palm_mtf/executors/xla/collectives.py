# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives in TensorFlow functions that JAX compiles and runs.

TensorFlow has no operation for XLA's all-gather, and JAX cannot lower
TensorFlow's other collectives for CPUs and GPUs. So each collective here is an
XlaCallModule, whose StableHLO JAX copies into its own program unchanged.

In each function, `x` has a dtype of _NAMES and the same shape on all devices.
`groups` has the device numbers of each group: indices in the flattened
`jax.sharding.Mesh.devices`. All groups have the same size, which divides each
dimension that is cut. Parts are joined in the order of the group. `channel` is
a positive number that no other collective of the program has: XLA may run
independent collectives at the same time, and on CPUs it takes those of one
channel for the same collective.
"""

from collections.abc import Sequence

from palm_mtf._tf import gen_xla_ops, tf

Groups = Sequence[Sequence[int]]

_VERSION = 5  # format of the attributes that `_call` gives an XlaCallModule
_NAMES = {
  **{tf.float32: "f32", tf.bfloat16: "bf16", tf.float16: "f16"},
  **{tf.float64: "f64", tf.int32: "i32", tf.int64: "i64", tf.bool: "i1"},
}
_REDUCTIONS = {"SUM": "add", "MAX": "maximum", "MIN": "minimum"}


def all_reduce(
  x: tf.Tensor, groups: Groups, reduction: str, channel: int
) -> tf.Tensor:
  """All-reduces x over each group; `reduction` is "SUM", "MAX" or "MIN"."""
  region = _region(x, _REDUCTIONS[reduction])
  shape = x.shape.as_list()
  return _call("all_reduce", x, groups, channel, [], shape, region)


def reduce_scatter(
  x: tf.Tensor, groups: Groups, axis: int, channel: int
) -> tf.Tensor:
  """Sums x over each group; the group's device i gets part i along `axis`."""
  shape = x.shape.as_list()
  shape[axis] //= len(groups[0])
  attributes = [f"scatter_dimension = {axis} : i64"]
  region = _region(x, "add")
  return _call("reduce_scatter", x, groups, channel, attributes, shape, region)


def all_gather(
  x: tf.Tensor, groups: Groups, axis: int, channel: int
) -> tf.Tensor:
  """Concatenates x of all devices of a group along `axis`."""
  shape = x.shape.as_list()
  shape[axis] *= len(groups[0])
  attributes = [f"all_gather_dim = {axis} : i64"]
  return _call("all_gather", x, groups, channel, attributes, shape)


def all_to_all(
  x: tf.Tensor, groups: Groups, split_axis: int, concat_axis: int, channel: int
) -> tf.Tensor:
  """Sends part i along `split_axis` to device i; joins on `concat_axis`."""
  count, shape = len(groups[0]), x.shape.as_list()
  shape[split_axis] //= count
  shape[concat_axis] *= count
  attributes = [
    f"split_dimension = {split_axis} : i64",
    f"concat_dimension = {concat_axis} : i64",
    f"split_count = {count} : i64",
  ]
  return _call("all_to_all", x, groups, channel, attributes, shape)


def permute(
  x: tf.Tensor, pairs: Sequence[tuple[int, int]], channel: int
) -> tf.Tensor:
  """Sends x of device i to device j for each (i, j); others get zeros."""
  shape = x.shape.as_list()
  return _call("collective_permute", x, pairs, channel, [], shape)


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
  channel: int,
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
  is_permute = name == "collective_permute"
  given_groups = "source_target_pairs" if is_permute else "replica_groups"
  attributes = [
    *attributes,
    f"{given_groups} = dense<[{rows}]> : tensor<{size}xi64>",
    # A channel and use_global_device_ids make XLA read `replica_groups` as
    # device numbers, not as replica numbers. Two collectives need no such flag.
    f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>",
  ]
  if name not in ("all_to_all", "collective_permute"):
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
