# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Communication in a step: bytes and seconds, within a pod and between pods.

On a torus (TPUs), a mesh axis uses the links of the torus dimensions that it
spans; a dimension without wrap-around has half the bandwidth. On a switch
(GPUs), a device uses all its links; devices on different switches communicate
over the network. In an all-to-all, most bytes cross several links of a torus.

Collectives that only dropout or loss weights need are not counted.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf.accounting import memory
from palm_mtf.accounting.flops import forward_flops, train_flops_per_token
from palm_mtf.accounting.memory import Activations
from palm_mtf.accounting.newton_schulz import orthogonalized
from palm_mtf.accounting.optimizer_state import (
  DTYPE_BYTES,
  parameter_slots,
  row_rank,
)
from palm_mtf.accounting.work import ParameterSlice, Work
from palm_mtf.architecture import parameters
from palm_mtf.architecture.adapter import PROMPT, VIRTUAL, base_part
from palm_mtf.architecture.block import (
  ROUTER_BIAS,
  Branch,
  Experts,
  Kind,
  Layer,
  model_of,
)
from palm_mtf.config import HardwareConfig, MeshLayout
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.steps.plan import AllSum, Send, plan_step

_FLOAT32 = DTYPE_BYTES["float32"]
# Pods exchange this many numbers besides gradients: sums over tokens of loss
# weights, nats and log(z)^2.
_TOKEN_SUMS = 3
# The delays of three messages add up in a step: the client's request to a
# remote pod, the last gradient between the pods, and the reply to the client.
_MESSAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """A pod's network link to the other pods."""

  bits_per_sec: float = math.inf  # in each direction; infinity means no limit
  delay_secs: float = 0.0  # in each direction


def dcn_bytes(work: Work) -> int:
  """Returns the bytes that all pods together send to each other in a step."""
  edges = plan_step(work.mesh, work.pods, work.exchange).edges
  return sum(edge_bytes(x, work) for x in edges if isinstance(x, AllSum))


def edge_bytes(edge: Send | AllSum, work: Work) -> int:
  """Returns the bytes that all devices send along an edge in a step.

  `work` is that of a whole pod, with all stages. The bytes of syncs are their
  mean over steps.
  """
  num_devices = work.mesh.num_devices
  if isinstance(edge, Send):
    stream = Activations(work).stream_bytes()
    return work.mesh.num_microbatches * num_devices * stream
  num_pods = len(edge.targets)
  if work.exchange.is_diloco:
    in_round = num_pods * (num_pods - 1) * round_bytes(work)
    return round(in_round / work.exchange.outer_steps)
  to_each = sum(sent_bytes(work).values())
  to_each += num_devices * _TOKEN_SUMS * _FLOAT32
  return num_pods * (num_pods - 1) * to_each


def round_bytes(work: Work) -> int:
  """Returns the bytes that a pod sends to one other pod in OUTER_STEPS steps.

  Of the devices that hold the same slice, one sends it (programs/outer.py).
  """
  return sum(
    work.mesh.num_devices
    // each.num_replicas
    * memory.coded_bytes(name, each.size, work.exchange.outer_dtype)
    * n
    for name, each, n in work.trained_slices
  )


def sync_secs(
  work: Work, compute_secs: float, link: Link
) -> tuple[float, float]:
  """Returns a step's mean seconds of syncs: those exposed, and those hidden.

  `compute_secs` is the time of a step without other pods, which hides the
  exchange for OVERLAP_STEPS steps.
  """
  exchange = work.exchange
  sent = (work.pods.num_pods - 1) * round_bytes(work) / exchange.fragments
  secs = 8 * sent / link.bits_per_sec + _MESSAGES * link.delay_secs
  hidden = min(secs, exchange.overlap_steps * compute_secs)
  return (secs - hidden) / exchange.period, hidden / exchange.period


def sent_bytes(work: Work) -> dict[str, int]:
  """Returns {parameter: bytes of gradients that a pod sends to one other pod}.

  The bytes are those of one step. The first layer of a kind stands for all such
  layers. The value of its parameter is a sum over these layers, without those
  in which FROZEN matches the parameter.
  """
  # Devices that hold the same slice divide it into parts, padded to equal
  # sizes. Each device sends its part to one device of the other pod.
  return {
    name: work.mesh.num_devices
    * -(-each.size // each.num_replicas)
    * DTYPE_BYTES[parameters.sent_dtype(name, work.pods.dcn_dtype)]
    * n
    for name, each, n in work.trained_slices
  }


def exchange_secs(work: Work, link: Link) -> tuple[float, float]:
  """Returns the seconds that a pod takes to send gradients to all other pods.

  The first result is for the gradient of the embedding, which the backward pass
  computes last, so that nothing hides the time to send it. The second result is
  for all other gradients.
  """
  sent = sent_bytes(work)
  secs_per_byte = (work.pods.num_pods - 1) * 8 / link.bits_per_sec
  embedding = sent.pop("embedding", 0)
  return embedding * secs_per_byte, sum(sent.values()) * secs_per_byte


def step_secs(
  work: Work, compute_secs: float, link: Link, *, overlaps: bool = True
) -> float:
  """Returns the predicted seconds of a step.

  Args:
    compute_secs: seconds of a step in which pods send nothing to each other.
    link: each pod's link to the other pods.
    overlaps: whether gradients are sent during the backward pass of the last
      microbatch; otherwise they are sent after it.
  """
  embedding_secs, others_secs = exchange_secs(work, link)
  # The embedding's gradient is ready only at the end of the backward pass, so
  # no computation hides the time to send it.
  in_all = train_flops_per_token(work.model, work.frozen)
  backward = in_all - sum(forward_flops(work.model).values())
  backward_secs = backward / in_all * compute_secs / work.mesh.num_microbatches
  if not overlaps:
    backward_secs = 0.0
  exposed_secs = max(0.0, others_secs - backward_secs) + embedding_secs
  return compute_secs + exposed_secs + _MESSAGES * link.delay_secs


class _Traffic:
  """Adds up the bytes that a pod's devices send to each other in a step."""

  def __init__(self, work: Work):
    config, mesh = work.model, work.mesh
    self._work, self._config, self._mesh = work, config, mesh
    self._rules, self._width = mesh.rules, work.width
    self._dims = {
      x.name: x.dims for x in parameters.distinct_parameters(config)
    }
    self._layers = {x.first: x.layer for x in model_of(config).kinds}
    self._trained, self._visited = work.trained, work.visited
    # {(kind of collective, its mesh axes): bytes sent by all devices}
    self.bytes_moved = collections.Counter()

  def add(
    self,
    kind: str,
    axes: tuple[str | None, ...],
    num_bytes: int,
    times: int = 1,
  ) -> None:
    """Adds the bytes that all devices send in `times` collectives over `axes`.

    `num_bytes` is the size on one device of an all-gather's output, or of the
    input of any other collective.
    """
    sizes = self._mesh.axes
    axes = tuple(a for a in sizes if a in axes and sizes[a] > 1)
    n = math.prod(sizes[axis] for axis in axes)
    if n == 1 or not times:
      return
    # Each of the n devices along `axes` sends (n - 1) / n of the tensor. An
    # all-reduce sends this twice, in a reduce-scatter and in an all-gather.
    each = (n - 1) * num_bytes * (2 if kind == "all_reduce" else 1)
    groups = self._mesh.num_devices // n
    self.bytes_moved[kind, axes] += groups * each * times

  def summed_axes(self, name: str) -> set[str]:
    """Returns the mesh axes over which a step sums a parameter's gradient."""
    layer, part = parameters.parse_name(name)
    if (
      part == parameters.RELATIVE
    ):  # `add_activations` counts this gradient, summed in each microbatch
      return set()
    dims = ["batch"]
    if kernel := base_part(name):
      # Devices with other columns, or rows, of the adapted kernel have other
      # terms of the gradient of a factor that they all have.
      kept = {*self._dims[name], "d_model"}
      dims += [x for x in self._dims[kernel] if x not in kept]
      name, part = kernel, parameters.parse_name(kernel).part
    # A device computes gradients from its own heads only. Therefore the
    # gradients of parameters that all heads share, such as k and v of
    # multi-query attention, are summed over the axis that splits `heads` too.
    if part.startswith("attention/"):
      output = self._layers[layer].attention.output
      is_split = not {"heads", "kv_heads"}.isdisjoint(self._dims[name])
      # For keys and values of virtual positions, `add_activations` counts that.
      others = (output.part, output.bias)
      if not (part in others or is_split or part.endswith(VIRTUAL)):
        dims.append("heads")
    return {axis for axis in map(self._mesh.axis_of, dims) if axis}

  def _split_axes(self, branch: Branch) -> tuple[str, ...]:
    """Returns the mesh axes that split a branch's heads, experts or d_ff."""
    dims = branch.output.inputs
    if self._mesh.moves_tokens:  # after the moves, no sum over experts is open
      dims = tuple(x for x in dims if x != "experts")
    return tuple(dict.fromkeys(x for x in map(self._mesh.axis_of, dims) if x))

  def add_activations(self, tokens: int) -> None:
    """Adds the collectives of activations for `tokens` tokens per device."""
    config, width = self._config, self._width
    vocab, residual = map(self._rules.get, ("vocab", "d_model_residual"))
    of_stream = tokens * config.d_model * width
    for kind in model_of(config).kinds:
      self._add_blocks(kind, tokens, of_stream, residual)
      for each in kind.layer.attention.inputs:
        if each.has_virtual and each.outputs == ("d_kv",):
          # The gradient of keys that all heads share, before rows are taken.
          numbers = tokens * config.d_kv
          visited = self._visited[kind.layer]
          axes = (self._rules.get("heads"),)
          self.add("all_reduce", axes, numbers * width, visited)
      # Transformer-XL's positions: in each layer, devices sum the gradient of
      # the vectors (one per distance) over the axis that splits the batch.
      if kind.layer.attention.mixer.score_positions == "transformer_xl":
        heads = config.num_heads // self._mesh.axis_size_of("heads")
        numbers = config.sequence_length * heads * config.d_kv
        batch = self._rules.get("batch")
        name = f"{parameters.layer_name(kind.first)}/{parameters.RELATIVE}"
        times = self._trained.get(name, 0)
        self.add("all_reduce", (batch,), numbers * width, times)
    # Each device looks up rows in its slice of the embedding; then devices sum
    # the rows. Learned positions and trained prompts need rows with all of
    # d_model; therefore they make this sum an all-reduce.
    is_scattered = vocab == residual and config.positions != "learned"
    is_scattered &= config.adapter != "prompt"
    self.add(_kind_of_sum(is_scattered), (vocab,), of_stream)
    self.add("all_reduce", (vocab,), of_stream)  # gradient of logits' input
    self.add("all_reduce", (vocab,), tokens * _FLOAT32, 3)  # max, sum, target
    # If an axis splits the residual stream, the final norm and, in the backward
    # pass, the embedding need a gather each.
    gathers = 1 + (not {"embedding", PROMPT}.isdisjoint(self._trained))
    self.add("all_gather", (residual,), of_stream, gathers)

  def _add_blocks(
    self, kind: Kind, tokens: int, of_stream: int, residual: str | None
  ) -> None:
    """Adds the collectives of activations in a kind of layers.

    `of_stream` is the number of bytes of the residual stream, before `residual`
    splits it.
    """
    layers, sums = kind.count, kind.layer.sums
    visited = self._visited[kind.layer]  # by the backward pass
    again = visited if self._config.remat == "layer" else 0
    # The forward pass adds outputs of one or more branches to the residual
    # stream. The backward pass adds up gradients of a norm's output from all
    # branches that read the norm. If one axis splits all these branches, one
    # collective sums over devices. Otherwise each branch needs an all-reduce.
    for each in sums:
      # REMAT = "layer" does not repeat a layer's last sum, because nothing in
      # the layer reads this sum, except for a norm.
      is_repeated = each != sums[-1] or each.output_norm is not None
      times = layers + (again if is_repeated else 0)
      every = {self._split_axes(x): None for x in each.branches}
      for axes in every:
        # A branch (attention or MLP) ends in a sum over the axis that splits
        # its heads or d_ff. If this axis also splits the residual stream, the
        # sum is a reduce-scatter, but a norm of the sum needs all of d_model.
        is_scattered = axes == (residual,) and len(every) == 1
        is_scattered &= each.output_norm is None
        self.add(_kind_of_sum(is_scattered), axes, of_stream, times)
      for read in each.reads:
        for axes in {self._split_axes(x): None for x in read.branches}:
          self.add("all_reduce", axes, of_stream, visited)
        if read.sparse:  # all-reduces the gradients of the gates
          axes = self._split_axes(read.sparse)
          chosen = read.sparse.experts.per_token
          self.add("all_reduce", axes, tokens * chosen * _FLOAT32, visited)
          if self._mesh.moves_tokens:
            times = 2 * (layers + visited) + again * (1 + is_repeated)
            self._add_moves(read.sparse.experts, of_stream, times, visited)
    # If an axis splits the residual stream, each sum needs a gather: in the
    # forward pass, in REMAT's repetition, and in the backward pass.
    gathers = len(sums) * (layers + visited + again)
    self.add("all_gather", (residual,), of_stream, gathers)

  def _add_moves(
    self, experts: Experts, of_stream: int, times: int, visited: int
  ) -> None:
    """Adds the all-to-alls of a layer whose tokens move to their experts.

    In the forward pass, rows of d_model numbers move to their experts, and the
    results move back. In the backward pass, the gradients of the results move
    to the experts, and the gradients of the rows move back; so do the gates and
    their gradients, one number per row.
    """
    axis = self._mesh.axis_of("experts")
    of_rows = round(of_stream * self._work.expert_rows(experts))
    self.add("all_to_all", (axis,), of_rows, times)
    of_gates = of_rows // (self._config.d_model * self._width) * _FLOAT32
    self.add("all_to_all", (axis,), of_gates, 2 * visited)

  def add_stored(self) -> None:
    """Adds the gathers of split weights, and the sums of their gradients."""
    config, stored = self._config, self._rules.get("d_model_stored")
    if stored is None:
      return
    # The layout without the rule d_model_stored gives sizes after the gather.
    rules = {k: v for k, v in self._rules.items() if k != "d_model_stored"}
    text = ",".join(f"{dim}:{axis}" for dim, axis in rules.items())
    whole = dataclasses.replace(self._mesh, layout=text)
    is_tied = parameters.logits_table(config) == "embedding"
    for name, each, count in dataclasses.replace(self._work, mesh=whole).slices:
      if "d_model_stored" not in self._mesh.stored(self._dims[name]):
        continue
      parameter = parameters.parse_name(name)
      if parameter.part == parameters.RELATIVE:
        # One gather; no sum, because all devices hold the same gradient.
        self.add("all_gather", (stored,), self._width * each.size, count)
        continue
      is_vector, is_table = parameter.is_vector, parameter.kind == "embedding"
      num_bytes = (_FLOAT32 if is_vector else self._width) * each.size
      # A kernel is gathered twice, once for each pass. An embedding is gathered
      # once per use. A norm's scale is gathered once, because the backward pass
      # reuses the result; but twice if REMAT recomputes the layer of the norm.
      uses = 2 if name == "embedding" and is_tied else 1
      layer = self._layers.get(parameter.layer)
      is_kept = is_vector and (
        config.remat != "layer"
        or layer is None
        or parameter.part in _added_last(layer)
      )
      times = uses * count if is_table else count
      if not is_table and not is_kept:  # the backward pass gathers it again
        times += self._visited[layer] if layer else 1
      self.add("all_gather", (stored,), num_bytes, times)
      if self._rules.get("batch") == stored:
        num_bytes = self._work.summed_bytes(name) * each.size
        times = uses * self._trained.get(name, 0)
        self.add("reduce_scatter", (stored,), num_bytes, times)

  def add_exchanged(
    self, summed: set[str], each: ParameterSlice, width: int, count: int
  ) -> None:
    """Adds the collectives within a pod for gradients that pods exchange.

    `count` gradients have slices like `each`, with `width` bytes per element.
    """
    sizes = self._mesh.axes
    replicated = [a for a in sizes if a not in each.axes]
    # Devices that hold the same slice divide it into equal parts. Axes that
    # need no sum come first: along them, devices hold equal gradients and take
    # their parts without a message, so the later reduce-scatters move less.
    numbers = each.num_replicas * -(-each.size // each.num_replicas)
    for axis in sorted(replicated, key=lambda axis: axis in summed):
      if axis in summed:
        self.add("reduce_scatter", (axis,), width * numbers, count)
      # Once the parts are summed over pods, devices gather them in float32.
      self.add("all_gather", (axis,), _FLOAT32 * numbers, count)
      numbers //= sizes[axis]

  def add_update(self) -> None:
    """Adds the optimizer's all-reduces: sums over the slices of parameters."""
    # To clip by the global norm, Mesh TensorFlow computes the sum of squares of
    # each gradient, and adds up these sums in the order of the parameters. The
    # sums share one all-reduce up to the first parameter that is not split by
    # the same axes as the embedding.
    slices = [
      x
      for x in self._work.trained_slices
      if not parameters.parse_name(x[0]).is_state
    ]
    split = [each.axes for _, each, _ in slices]
    num_alike = len(list(itertools.takewhile(lambda x: x == split[0], split)))
    if num_alike == len(split):
      self.add("all_reduce", split[0], _FLOAT32)
    else:
      for i, (_, each, count) in enumerate(slices):
        # The embedding and layer 0 come first. So the shared all-reduce has at
        # most one of a parameter's `count` sums: the sum of layer 0.
        joined = i < num_alike - 1
        self.add("all_reduce", each.axes, _FLOAT32, count - joined)
    for name, each, count in slices:
      dims = self._dims[name]
      # Two sums of squares: of the update, for UPDATE_CLIP, and of the
      # parameter, because the parameter's root mean square scales the update.
      self.add("all_reduce", each.axes, _FLOAT32, 2 * count)
      slots = parameter_slots(name, len(dims), self._work.optimizer)
      if "second_moment_row" not in {x.name for x in slots}:
        continue
      over = [*map(self._mesh.axis_of, self._mesh.stored(dims))]
      rank = row_rank(name)
      of_rows, of_columns = tuple(over[:rank]), tuple(over[rank:])
      num_rows = math.prod(each.sizes[:rank])
      num_columns = math.prod(each.sizes[rank:])
      # Three all-reduces give the mean square of each row of the gradient, of
      # each column, and the mean over all rows.
      self.add("all_reduce", of_columns, _FLOAT32 * num_rows, count)
      self.add("all_reduce", of_rows, _FLOAT32 * num_columns, count)
      self.add("all_reduce", of_rows, _FLOAT32, count)
    for kernel in orthogonalized(self._work):
      for axis, numbers in kernel.gathers:
        self.add("all_gather", (axis,), _FLOAT32 * numbers, kernel.count)
      num_bytes = _FLOAT32 * kernel.shares.count * kernel.shares.first**2
      times = kernel.steps * kernel.count
      self.add("all_reduce", kernel.summed, num_bytes, times)


def _added_last(layer: Layer) -> set[str]:
  """Returns the names of the biases that are added last in a layer.

  REMAT = "layer" does not gather these biases again, because no gradient needs
  the layer's result.
  """
  last = layer.sums[-1]
  if last.output_norm:
    return {f"{last.output_norm}/bias"}
  return {x.output.bias for x in last.branches}


def _kind_of_sum(is_scattered: bool) -> str:
  return "reduce_scatter" if is_scattered else "all_reduce"


def step_bytes(work: Work) -> collections.Counter[tuple[str, tuple[str, ...]]]:
  """Returns the bytes that all devices of a pod send to each other per step.

  A key is a kind of collective ("all_reduce", "reduce_scatter", "all_gather" or
  "all_to_all") and its mesh axes, in the order of MESH_SHAPE.
  """
  mesh, traffic = work.mesh, _Traffic(work)
  traffic.add_activations(Activations(work).tokens)
  traffic.add_stored()
  for key in traffic.bytes_moved:
    traffic.bytes_moved[key] *= mesh.num_microbatches
  # Gradients are all-reduced once per step. If one axis splits d_model_stored
  # and the batch, each microbatch reduce-scatters its gradients over this axis
  # instead; `add_stored` has counted these bytes.
  for name, each, count in work.trained_slices:
    width = work.gradient_bytes(name)
    summed = traffic.summed_axes(name)
    is_bias = parameters.parse_name(name).part == ROUTER_BIAS
    if work.pods.num_pods > 1:
      traffic.add_exchanged(summed, each, width, count)
    elif not is_bias or mesh.num_microbatches > 1:
      # With one microbatch, router_load and router_bias share one all-reduce of
      # counts, which is added for router_load.
      over = tuple(summed.difference(each.axes))
      traffic.add("all_reduce", over, width * each.size, count)
  traffic.add_update()
  # The loss needs two sums over all tokens: nats and log(z)^2.
  traffic.add("all_reduce", (mesh.rules.get("batch"),), _FLOAT32, times=2)
  return traffic.bytes_moved


def axes_bandwidth(
  mesh: MeshLayout, axes: tuple[str, ...], device: HardwareConfig, kind: str
) -> float:
  """Returns how many bytes/s a device sends in collectives along mesh axes.

  `kind` is the kind of collective, such as "all_to_all".
  """
  if device.chip_link_dims:
    spans = [x for axis in axes for x in _spans(mesh, device)[axis]]
    total = min(sum(x.rings for x in spans), device.chip_link_dims)
    if kind == "all_to_all":
      # Leave out what a device sends to itself, which `_Span` counts too.
      others = 1 - 1 / math.prod(mesh.axes[axis] for axis in axes)
      total = min(total, *(others * x.of_all_to_all for x in spans))
    return device.chip_link_bandwidth * total / device.chip_link_dims
  joined = device.chip_link_chips or mesh.num_devices
  # Device numbers change fastest along the last mesh axis. If the devices along
  # `axes` are on several switches, their traffic crosses the network. Then the
  # devices on one switch use all of their network links together.
  names = list(mesh.axes)
  inner = math.prod(mesh.axes[x] for x in names[names.index(axes[-1]) + 1 :])
  size = math.prod(mesh.axes[axis] for axis in axes)
  if inner * size <= joined:
    return device.chip_link_bandwidth
  # In an all-to-all, each device sends its own bytes over its own link.
  links = 1 if kind == "all_to_all" else max(1, joined // inner)
  network = links * device.chip_dcn_bandwidth
  return min(device.chip_link_bandwidth, network)


class _Span(NamedTuple):
  """A dimension of a torus that a mesh axis spans.

  Both rates are relative to the bandwidth of the two links that a device has
  along a ring.
  """

  # Rate of a collective that sends from neighbour to neighbour; 0.5 if the axis
  # spans only a part of the ring.
  rings: float
  # Rate of an all-to-all: 4 / n on a ring of n devices, where a byte crosses
  # n / 4 links on average; 2 / n on a line, where half of all bytes cross the
  # link in the middle.
  of_all_to_all: float


def _spans(
  mesh: MeshLayout, device: HardwareConfig
) -> dict[str, Sequence[_Span]]:
  """Returns {mesh axis: the torus dimensions that it spans}."""
  if not mesh.tpu:
    return _spans_of_any_slice(mesh, device)
  *outer, inner = mesh.axes
  where = tpu_slice(mesh.tpu)
  left = mesh.axes[inner] // math.gcd(mesh.axes[inner], where.devices_of_chip)
  spans: dict[str, list[_Span]] = {axis: [] for axis in mesh.axes}
  for size in where.chips:
    # The last mesh axis spans a box of chips, with `part` chips along this
    # dimension (`tpu_places` in executors/xla/tpu_places.py).
    part = math.gcd(left, size)
    left //= part
    if part > 1:
      is_ring = part == size
      spans[inner].append(
        _Span(1.0, 4 / size) if is_ring else _Span(0.5, 2 / part)
      )
    if part < size and outer:
      spans[outer[0]].append(_Span(1.0 if part == 1 else 0.5, 4 / size))
  # An axis within one chip counts as 0.5, because its bandwidth must not be 0.
  return {axis: x or [_Span(0.5, 0.5)] for axis, x in spans.items()}


def _spans_of_any_slice(
  mesh: MeshLayout, device: HardwareConfig
) -> dict[str, Sequence[_Span]]:
  """Returns what `_spans` returns for the fastest slice if TPU names none."""
  *outer, inner = (axis for axis, size in mesh.axes.items() if size > 1)
  dims = device.chip_link_dims
  counts = {inner: dims}
  if outer:
    longest = (device.chip_link_chips or math.inf) ** (1 / dims)
    of_inner = 1
    while of_inner < dims - 1 and mesh.axes[inner] > longest**of_inner:
      of_inner += 1
    counts = {inner: of_inner, outer[0]: dims - of_inner}
  return {
    axis: [_Span(1.0, 4 / mesh.axes[axis] ** (1 / n))] * n
    for axis, n in counts.items()
  }
