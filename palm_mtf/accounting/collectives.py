# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that the devices of one pod send each other in a step, by layout.

For each microbatch, with activations [batch, length, d_model] of one device:

  heads, d_ff  a sum of each branch's end, and one of its beginning on the way
               back; the two of a parallel block are one where both are split
               over one axis. Multi-query attention sums dk and dv besides
  vocab        a sum of the embedded tokens, one on the way back from the
               logits, and three numbers a token of the softmax
  d_model_residual   a branch's end is reduce-scattered, not all-reduced, if it
               is a sum over the same axis, and gathered where the next begins
  d_model_stored     each kernel is gathered for the way forward and again for
               the way back, the embedding for its two uses, a norm scale once,
               or twice with REMAT = "layer"; gradients are reduce-scattered

and once a step the gradients of what is split over `batch` and not over
d_model_stored, two sums of the loss, and three sums of squares of each weight
that is split, with a factored second moment its rows and columns too. Between
pods gradients are exchanged in parts, which an all-gather puts together.

Without dropout, and without loss weights. Sizes of collectives are those of
mesh/collectives.py.
"""

import collections
import dataclasses
import itertools
import math

from palm_mtf.accounting.memory import (
  ParameterSlice,
  gradient_bytes,
  parameter_slices,
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
  """Adds up what collectives move."""

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
    """Adds collectives of `num_bytes` on each device, uncut, over `axes`."""
    sizes = self.mesh.axes
    axes = tuple(a for a in sizes if a in axes and sizes[a] > 1)
    n = math.prod(sizes[axis] for axis in axes)
    if n == 1 or not times:
      return
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
  """Returns the bytes that each kind of collective moves over which axes.

  Args:
    config: the architecture.
    mesh: devices and layout rules of a pod.
    optimizer: the run's optimizer settings.
    pod_batch_size: sequences of a step in one pod.
    num_pods: NUM_PODS.

  Returns:
    All devices of one pod together, of one step, by kind ("all_reduce",
    "reduce_scatter" or "all_gather") and axes, in the order of the mesh.
  """
  traffic = _Traffic(mesh)
  axes = {dim: mesh.rules.get(dim) for dim in mesh.rules}
  micro_batch_size = pod_batch_size // mesh.num_microbatches
  rows = micro_batch_size // mesh.axis_size_of("batch")
  tokens = rows * config.sequence_length
  for _ in range(mesh.num_microbatches):
    _add_activations(traffic, axes, config, tokens)
    _add_stored(traffic, axes, config)
  slices = parameter_slices(config, mesh)
  for name, each in slices.items():
    width = gradient_bytes(name, config, mesh)
    if num_pods > 1:
      _add_exchanged(traffic, axes, each, width)
    elif axes.get("batch") not in each.axes:
      traffic.add("all_reduce", (axes.get("batch"),), width * each.size)
  _add_update(traffic, config, optimizer, slices)
  traffic.add("all_reduce", (axes.get("batch"),), _FLOAT32, times=2)
  return traffic.bytes_moved


def _add_activations(
  traffic: _Traffic, axes: dict[str, str], config: PalmConfig, tokens: int
) -> None:
  """Adds what one microbatch moves of its activations."""
  width = DTYPE_BYTES[config.activation_dtype]
  heads, d_ff, vocab, residual = (
    axes.get(dim) for dim in ("heads", "d_ff", "vocab", "d_model_residual")
  )
  of_stream = tokens * config.d_model * width
  layers = config.num_layers
  again = layers if config.remat == "layer" else 0

  def ends(axis, times):
    kind = "reduce_scatter" if axis == residual else "all_reduce"
    traffic.add(kind, (axis,), of_stream, times)

  is_parallel = config.block == "parallel"
  is_multi_head = config.attention == "multi_head"
  if is_parallel and heads == d_ff:
    ends(heads, layers)
    traffic.add("all_reduce", (heads,), of_stream, layers)  # the way back
  elif is_parallel:
    # Two sums over different axes are finished before they are added.
    for axis in (heads, d_ff):
      traffic.add("all_reduce", (axis,), of_stream, 2 * layers)
    traffic.add("all_reduce", (heads,), of_stream, layers * is_multi_head)
  else:
    ends(heads, layers + again)
    ends(d_ff, layers)
    for axis in (heads, d_ff):
      traffic.add("all_reduce", (axis,), of_stream, layers)
  if not is_multi_head:
    of_head = tokens * config.d_kv * width
    traffic.add("all_reduce", (heads,), of_head, 2 * layers)
  ends(vocab, 1)
  traffic.add("all_reduce", (vocab,), of_stream)  # back from the logits
  traffic.add("all_reduce", (vocab,), tokens * _FLOAT32, 3)
  norms = 1 if is_parallel else 2
  # Forward, the last norm too; again; and back, the embedding too.
  gathers = norms * (2 * layers + again) + 2
  traffic.add("all_gather", (residual,), of_stream, gathers)


def _add_stored(
  traffic: _Traffic, axes: dict[str, str], config: PalmConfig
) -> None:
  """Adds what one microbatch moves of weights and their gradients."""
  stored = axes.get("d_model_stored")
  if stored is None:
    return
  # What a device has when d_model is whole.
  rules = {k: v for k, v in axes.items() if k != "d_model_stored"}
  text = ",".join(f"{dim}:{axis}" for dim, axis in rules.items())
  whole = dataclasses.replace(traffic.mesh, layout=text)
  for name, each in parameter_slices(config, whole).items():
    is_scale = parsed(name).is_scale
    width = DTYPE_BYTES["float32" if is_scale else config.activation_dtype]
    num_bytes = width * each.size
    is_kept = is_scale and (
      config.remat != "layer" or name == "final_norm/scale"
    )
    traffic.add("all_gather", (stored,), num_bytes, 1 if is_kept else 2)
    if axes.get("batch") == stored:
      uses = 2 if name == "embedding" else 1
      traffic.add("reduce_scatter", (stored,), num_bytes, uses)


def _add_exchanged(
  traffic: _Traffic, axes: dict[str, str], each: ParameterSlice, width: int
) -> None:
  """Adds what own parts of one gradient move within a pod."""
  sizes = traffic.mesh.axes
  summed = {axes.get("batch")}
  copied = [a for a in sizes if a not in each.axes]
  # Padded to equal parts; cut first where all devices have it.
  numbers = each.copies * -(-each.size // each.copies)
  for axis in sorted(copied, key=lambda axis: axis in summed):
    if axis in summed:
      traffic.add("reduce_scatter", (axis,), width * numbers)
    traffic.add("all_gather", (axis,), _FLOAT32 * numbers)
    numbers //= sizes[axis]


def _add_update(
  traffic: _Traffic,
  config: PalmConfig,
  optimizer: AdafactorConfig,
  slices: dict[str, ParameterSlice],
) -> None:
  """Adds the sums that the optimizer takes over split weights."""
  rules = traffic.mesh.rules
  # Squares of gradients are added one after the other: the first ones that are
  # split alike while their sums are still open.
  split = [each.axes for each in slices.values()]
  alike = len(list(itertools.takewhile(lambda x: x == split[0], split)))
  for axes in split[alike - 1 :]:
    traffic.add("all_reduce", axes, _FLOAT32)
  for name, dims in parameter_dims(config).items():
    each = slices[name]
    # Of squares of its update and of itself.
    traffic.add("all_reduce", each.axes, _FLOAT32, 2)
    if optimizer.second_moment != "factored" or len(dims) == 1:
      continue
    over = [
      rules.get("d_model_stored" if dim == "d_model" else dim) for dim in dims
    ]
    rank = row_rank(name)
    of_rows, of_columns = tuple(over[:rank]), tuple(over[rank:])
    num_rows = math.prod(each.sizes[:rank])
    num_columns = math.prod(each.sizes[rank:])
    traffic.add("all_reduce", of_columns, _FLOAT32 * num_rows)
    traffic.add("all_reduce", of_rows, _FLOAT32 * num_columns)
    traffic.add("all_reduce", of_rows, _FLOAT32)
