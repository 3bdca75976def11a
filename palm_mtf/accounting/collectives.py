# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that the collectives of a pod move in a step, by layout.

The formulas are those of steps without dropout and without loss weights.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping

from palm_mtf.accounting.memory import (
  ParameterSlice,
  distinct_slices,
  gradient_bytes,
  summed_bytes,
)
from palm_mtf.accounting.optimizer_state import DTYPE_BYTES, row_rank
from palm_mtf.accounting.params import parameter_dims
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.parameter_names import parsed

_FLOAT32 = DTYPE_BYTES["float32"]


@dataclasses.dataclass
class _Traffic:
  """Sums the bytes of collectives by kind and axes."""

  mesh: MeshLayout
  bytes_moved: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )

  def add(
    self,
    kind: str,
    axes: tuple[str | None, ...],
    num_bytes: int,
    times: int = 1,
  ) -> None:
    """Adds collectives over `axes` of a tensor of `num_bytes` on each device.

    The tensor is whole: input of a reduce-scatter, output of an all-gather.
    """
    sizes = self.mesh.axes
    axes = tuple(a for a in sizes if a in axes and sizes[a] > 1)
    n = math.prod(sizes[axis] for axis in axes)
    if n == 1 or not times:
      return
    # As in mesh/collectives.py: each of n devices sends n - 1 n-ths, and an
    # all-reduce is a reduce-scatter and an all-gather.
    each = (n - 1) * num_bytes * (2 if kind == "all_reduce" else 1)
    groups = self.mesh.num_devices // n
    self.bytes_moved[kind, axes] += groups * each * times


def step_bytes(
  config: PalmConfig,
  mesh: MeshLayout,
  optimizer: AdafactorConfig,
  *,
  pod_batch_size: int,
  num_pods: int = 1,
) -> collections.Counter[tuple[str, tuple[str, ...]]]:
  """Returns the bytes of a step that all devices of a pod move together.

  Args:
    config: architecture.
    mesh: devices and layout rules of a pod.
    optimizer: optimizer settings.
    pod_batch_size: sequences of a step in a pod.
    num_pods: NUM_PODS.

  Returns:
    Bytes by kind ("all_reduce", "reduce_scatter" or "all_gather") and axes, in
    the order of the mesh.
  """
  axes = mesh.rules
  micro_batch_size = pod_batch_size // mesh.num_microbatches
  rows = micro_batch_size // mesh.axis_size_of("batch")
  tokens = rows * config.sequence_length
  traffic = _Traffic(mesh)
  _add_activations(traffic, axes, config, tokens)
  _add_stored(traffic, axes, config)
  for key in traffic.bytes_moved:
    traffic.bytes_moved[key] *= mesh.num_microbatches
  # Gradients once a step. With d_model_stored over the axis of the batch each
  # microbatch has reduce-scattered them already.
  for name, each, count in distinct_slices(config, mesh):
    width = gradient_bytes(name, config, mesh)
    summed = _summed_axes(name, axes, config)
    if num_pods > 1:
      _add_exchanged(traffic, summed, each, width, count)
    else:
      over = tuple(summed.difference(each.axes))
      traffic.add("all_reduce", over, width * each.size, count)
  _add_update(traffic, config, optimizer)
  # Nats and weights of the loss.
  traffic.add("all_reduce", (axes.get("batch"),), _FLOAT32, times=2)
  return traffic.bytes_moved


def _summed_axes(
  name: str, axes: Mapping[str, str], config: PalmConfig
) -> set[str]:
  """Returns the axes over which a parameter's gradient is a sum."""
  dims = ["batch"]
  # A device has the gradients of k and v from its own heads alone.
  shared = parsed(name).part in ("attention/k", "attention/v")
  if shared and config.attention == "multi_query":
    dims.append("heads")
  return {axes[dim] for dim in dims if dim in axes}


def _add_activations(
  traffic: _Traffic, axes: Mapping[str, str], config: PalmConfig, tokens: int
) -> None:
  """Adds the activations of a microbatch, [batch, length, d_model] a device."""
  width = DTYPE_BYTES[config.activation_dtype]
  heads, d_ff, vocab, residual = (
    axes.get(dim) for dim in ("heads", "d_ff", "vocab", "d_model_residual")
  )
  of_stream = tokens * config.d_model * width
  layers = config.num_layers
  again = layers if config.remat == "layer" else 0

  # The end of a branch is a sum over its axis: a reduce-scatter, not an
  # all-reduce, where the residual stream is split over the same axis.
  def ends(axis, times):
    kind = "reduce_scatter" if axis == residual else "all_reduce"
    traffic.add(kind, (axis,), of_stream, times)

  is_parallel = config.block == "parallel"
  # Forward a sum at the end of each branch, backward one at its beginning. Both
  # branches of a parallel block are one sum where one axis splits them.
  if is_parallel and heads == d_ff:
    ends(heads, layers)
    traffic.add("all_reduce", (heads,), of_stream, layers)
  elif is_parallel:
    # Two sums over different axes are finished before they are added.
    for axis in (heads, d_ff):
      traffic.add("all_reduce", (axis,), of_stream, 2 * layers)
  else:
    ends(heads, layers + again)
    ends(d_ff, layers)
    for axis in (heads, d_ff):
      traffic.add("all_reduce", (axis,), of_stream, layers)
  ends(vocab, 1)  # embedded tokens
  traffic.add("all_reduce", (vocab,), of_stream)  # backward, from the logits
  traffic.add("all_reduce", (vocab,), tokens * _FLOAT32, 3)  # softmax
  # A split residual stream is gathered where a branch begins: forward, the
  # final norm too; again with REMAT; and backward, the embedding too.
  norms = 1 if is_parallel else 2
  gathers = norms * (2 * layers + again) + 2
  traffic.add("all_gather", (residual,), of_stream, gathers)


def _add_stored(
  traffic: _Traffic, axes: Mapping[str, str], config: PalmConfig
) -> None:
  """Adds the weights of a microbatch, and their gradients."""
  stored = axes.get("d_model_stored")
  if stored is None:
    return
  # Slices of a device whose d_model is whole.
  rules = {k: v for k, v in axes.items() if k != "d_model_stored"}
  text = ",".join(f"{dim}:{axis}" for dim, axis in rules.items())
  whole = dataclasses.replace(traffic.mesh, layout=text)
  for name, each, count in distinct_slices(config, whole):
    is_scale = parsed(name).is_scale
    width = DTYPE_BYTES["float32" if is_scale else config.activation_dtype]
    num_bytes = width * each.size
    # Gathered forward and again backward, the embedding for its two uses. A
    # norm scale stays in between, unless REMAT computes its layer again.
    is_kept = is_scale and (
      config.remat != "layer" or name == "final_norm/scale"
    )
    times = count if is_kept else 2 * count
    traffic.add("all_gather", (stored,), num_bytes, times)
    if axes.get("batch") == stored:
      uses = 2 if name == "embedding" else 1
      num_bytes = summed_bytes(name, config, traffic.mesh) * each.size
      traffic.add("reduce_scatter", (stored,), num_bytes, uses * count)


def _add_exchanged(
  traffic: _Traffic,
  summed: set[str],
  each: ParameterSlice,
  width: int,
  count: int,
) -> None:
  """Adds gradients of which each device exchanges its own part with pods."""
  sizes = traffic.mesh.axes
  replicated = [a for a in sizes if a not in each.axes]
  # Padded to equal parts. Axes over which replicas are equal come first: there
  # a device takes its part without a message.
  numbers = each.num_replicas * -(-each.size // each.num_replicas)
  for axis in sorted(replicated, key=lambda axis: axis in summed):
    if axis in summed:
      traffic.add("reduce_scatter", (axis,), width * numbers, count)
    # The sum over pods, gathered again.
    traffic.add("all_gather", (axis,), _FLOAT32 * numbers, count)
    numbers //= sizes[axis]


def _add_update(
  traffic: _Traffic,
  config: PalmConfig,
  optimizer: AdafactorConfig,
) -> None:
  """Adds the optimizer's sums over the slices of a parameter."""
  rules = traffic.mesh.rules
  # The gradients' squares, for clipping. Mesh TensorFlow adds one parameter's
  # sum to the next: it all-reduces the first ones, split alike, as one.
  slices = distinct_slices(config, traffic.mesh)
  split = [each.axes for _, each, _ in slices]
  num_alike = len(list(itertools.takewhile(lambda x: x == split[0], split)))
  if num_alike == len(slices):
    traffic.add("all_reduce", split[0], _FLOAT32)
  else:
    for i, (axes, (*_, count)) in enumerate(zip(split, slices, strict=True)):
      # The first ones are those of the first layer.
      joined = i < num_alike - 1
      traffic.add("all_reduce", axes, _FLOAT32, count - joined)
  dims_of = parameter_dims(dataclasses.replace(config, num_layers=1))
  for name, each, count in slices:
    dims = dims_of[name]
    # Squares of the update, for its clipping, and of the parameter, its scale.
    traffic.add("all_reduce", each.axes, _FLOAT32, 2 * count)
    if optimizer.second_moment != "factored" or len(dims) == 1:
      continue
    over = [
      rules.get("d_model_stored" if dim == "d_model" else dim) for dim in dims
    ]
    rank = row_rank(name)
    of_rows, of_columns = tuple(over[:rank]), tuple(over[rank:])
    num_rows = math.prod(each.sizes[:rank])
    num_columns = math.prod(each.sizes[rank:])
    # Means of squares of rows and of columns, and the mean of the rows' means.
    traffic.add("all_reduce", of_columns, _FLOAT32 * num_rows, count)
    traffic.add("all_reduce", of_rows, _FLOAT32 * num_columns, count)
    traffic.add("all_reduce", of_rows, _FLOAT32, count)
