# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of one device: the bytes that a step keeps, and those that it moves.

A step keeps weights, optimizer slots, gradients, activations and buffers (of
one microbatch); decoding keeps weights and caches. A step moves the bytes that
its passes read and write. A pass is an operation other than a matrix product;
it reads each input once and writes each output once. Matrix products are bound
by arithmetic, so their bytes are not counted. Kinds of passes, with their work:

blocks     norms, residual sums, splits of joined products; the embedding
attention  the softmax of scores, and its gradient
loss       the cross entropy of logits, and its gradient
weights    casts, sums over microbatches, the update
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

from palm_mtf.accounting.optimizer_state import DTYPE_BYTES, slot_bytes
from palm_mtf.accounting.work import Slices, Work
from palm_mtf.architecture import parameters
from palm_mtf.architecture.attention_blocks import block_pairs
from palm_mtf.architecture.block import Experts, Layer, Mlp, model_of
from palm_mtf.config import ModelConfig

PASSES = ("blocks", "attention", "loss", "weights")

_FLOAT32 = DTYPE_BYTES["float32"]
_GROUP = 256  # numbers that share a scale, as in optim/outer.py

# Bytes of weights that are worth a thread in a decoding step: it reads them in
# about 0.2 ms. For fewer bytes, waiting for another thread takes longer than it
# saves (`python -m tools.bench decode`).
_BYTES_FOR_A_THREAD = 4_000_000

# Bytes per weight; in int4, 32 weights share a scale of 2 bytes. In the others,
# 32 weights share 2 bytes, and 256 weights 8 bytes.
_QUANTIZED_BYTES = {
  **{"int8": 1, "int4": 0.5 + 2 / 32},
  **{f"q{n}_k": n / 8 + 2 / 32 + 8 / 256 for n in (4, 5, 6)},
}


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
  """Bytes that training keeps on each device of a pipeline stage."""

  weights: int  # of the float32 weights that are trained
  slots: int  # the optimizer's variables, such as momentum
  gradients: int  # of a step: the sums over its microbatches
  frozen_weights: int = 0  # of the weights that are not trained


def device_bytes(work: Work) -> DeviceBytes:
  """Returns the bytes of weights, optimizer slots and gradients per device."""

  def stored(slices: Slices) -> int:
    return sum(work.stored_bytes(x) * each.size * n for x, each, n in slices)

  trained = work.trained_slices
  weights = stored(trained)
  return DeviceBytes(
    weights=weights,
    frozen_weights=stored(work.slices) - weights,
    slots=sum(
      slot_bytes({name: each.sizes}, work.optimizer) * n
      for name, each, n in trained
    ),
    gradients=sum(
      work.gradient_bytes(name) * each.size * n for name, each, n in trained
    ),
  )


@dataclasses.dataclass(frozen=True)
class _BlockSizes:
  """Sizes of a block's activations on one device, in elements per token."""

  columns: float  # products with the outputs of norms
  # q, k, v and the hidden layer, which are made from `columns`; a gated MLP
  # makes the hidden layer from two products.
  read: float
  # Attention scores. They are computed in blocks of queries: all blocks are
  # kept or moved, but working memory holds only the largest.
  scores: float
  block_scores: float  # scores of the largest block
  rows: float  # copies of tokens for their experts, d_model elements per copy
  # `rows` if they come from other devices, because the forward pass keeps them
  # for the backward pass; otherwise 0.
  kept_rows: float
  gates: int  # float32 factors of the experts' results
  num_norms: int  # number of norms that read the residual stream
  num_sums: int  # number of sums that are added to it
  num_output_norms: int  # number of norms of sums before they are added


def _block_sizes(work: Work, layer: Layer) -> _BlockSizes:
  config, mesh = work.model, work.mesh
  sizes_of = parameters.dimension_sizes(config)

  def slice_size(dims: Sequence[str]) -> int:  # on this device
    return math.prod(sizes_of[x] // mesh.axis_size_of(x) for x in dims)

  columns = read = rows = 0.0
  gates = 0
  for branch in layer.branches:
    inputs, mixer, times = branch.inputs, branch.mixer, 1.0
    if isinstance(mixer, Experts):
      gates += mixer.per_token
      times = rows = work.expert_rows(mixer)
      inputs, mixer = inputs[1:], mixer.mlp
    sizes = [slice_size(x.outputs) for x in inputs]
    columns += times * sum(sizes) + sum(
      x.low_rank.rank for x in inputs if x.low_rank
    )
    read += times * (sizes[-1] if isinstance(mixer, Mlp) else sum(sizes))
  heads, length = slice_size(["heads"]), config.sequence_length
  window = layer.attention.mixer.window
  pairs = block_pairs(length, config.has_prefix, window)
  return _BlockSizes(
    columns=columns,
    read=read,
    scores=heads * sum(pairs) / length,
    block_scores=heads * max(pairs) / length,
    rows=rows * config.d_model,
    kept_rows=rows * config.d_model if mesh.moves_tokens else 0,
    gates=gates,
    num_norms=len(layer.reads),
    num_sums=len(layer.sums),
    num_output_norms=sum(x.output_norm is not None for x in layer.sums),
  )


class Activations:
  """Sizes of a microbatch's activations on one device, and their traffic.

  Attributes:
    tokens: number of the microbatch's tokens on the device.
  """

  def __init__(self, work: Work):
    config, mesh, visited = work.model, work.mesh, work.visited
    self._work, self._config, self._width = work, config, work.width
    is_float32 = config.logits_dtype == "float32"
    self._logits_width = _FLOAT32 if is_float32 else self._width
    rows = work.rows // mesh.num_microbatches
    length = config.sequence_length
    self.tokens = rows // mesh.axis_size_of("batch") * length
    # The sizes below are elements per token.
    self._stream = config.d_model
    # The stream between blocks is smaller if a rule splits its d_model.
    self._residual = config.d_model // mesh.axis_size_of("d_model_residual")
    heads = config.num_heads // mesh.axis_size_of("heads")
    self._queries = heads * config.d_kv
    # Sizes of a kind of blocks, the number of these blocks, and how many of
    # them have a backward pass; only these keep activations.
    self._num_backward = sum(visited.values())
    self._kinds = [
      (_block_sizes(work, x.layer), x.count, visited[x.layer])
      for x in model_of(config).kinds
    ]
    padded = mesh.padded_vocab_size(config.vocab_size)
    self._vocab = padded // mesh.axis_size_of("vocab")

  def _kept_in_block(self, block: _BlockSizes) -> float:
    # For its backward pass, a block keeps per token the stream before each sum,
    # sums before their norms, the products with norm outputs, the result of
    # attention, the gates of experts, rows that came from other devices and,
    # unless REMAT recomputes them, attention weights. With REMAT = "layer", the
    # block recomputes all these, and keeps them only during its backward pass.
    num_streams = block.num_sums + block.num_output_norms
    kept = num_streams * self._stream + block.columns + self._queries
    kept += block.gates * _FLOAT32 / self._width + block.kept_rows
    return kept + (0 if self._config.remat == "attention" else block.scores)

  def kept_bytes(self) -> int:
    """Returns the bytes that all blocks keep for the backward pass."""
    if self._config.remat == "layer":  # only the inputs of blocks are kept
      kept: float = self._num_backward * self._residual
    else:
      kept = sum(n * self._kept_in_block(x) for x, _, n in self._kinds)
    return round(self.tokens * kept * self._width)

  def loss_bytes(self) -> int:
    """Returns the bytes of the last norm's input, logits and their gradient."""
    of_logits = self._vocab * (self._logits_width + self._width)
    return self.tokens * (self._stream * self._width + of_logits)

  def stream_bytes(self) -> int:
    """Returns the bytes of the residual stream between two blocks."""
    return self.tokens * self._residual * self._width

  def waiting_bytes(self) -> int:
    """Returns the bytes of tensors that wait for a stage or to be sent."""
    mesh = self._work.mesh
    # A stage without backward passes may be ahead by all microbatches.
    sent = 1 if self._num_backward else mesh.num_microbatches
    stream = (1 + sent) * self.stream_bytes()
    if self._work.stage or "embedding" not in self._work.trained:
      return stream
    # The head computes gradients of the embedding; those of at most one
    # microbatch per stage wait to be used.
    sizes = {name: x.size for name, x, _ in self._work.slices}
    of_microbatch = self._work.summed_bytes("embedding") * sizes["embedding"]
    return stream + min(mesh.stages, mesh.num_microbatches) * of_microbatch

  def working_bytes(self) -> int:
    """Returns the peak bytes of a backward pass, besides what blocks keep."""
    of_block = max(self._working_of_block(x) for x, *_ in self._kinds)
    if self._work.stage:
      return of_block
    of_loss = self.loss_bytes()
    if not self._num_backward:
      return of_loss
    # With stages, the head runs while stage 0 runs, so both need memory.
    is_staged = self._work.mesh.stages > 1
    return of_block + of_loss if is_staged else max(of_block, of_loss)

  def _working_of_block(self, block: _BlockSizes) -> int:
    # The backward pass of a block holds gradients (of attention weights,
    # scores, the joined product, its parts, and the stream) and recomputed
    # values (a norm's output, q, k, v and the hidden layer). Experts have rows
    # of inputs and outputs, and of the gradients of both.
    of_token = 2 * block.block_scores + 2 * block.columns + 2 * self._stream
    of_token += self._stream + block.read + 4 * block.rows
    if self._config.remat == "layer":
      of_token += self._kept_in_block(block)
    elif self._config.remat == "attention":
      of_token += block.block_scores
    return round(self.tokens * of_token * self._width)

  def block_passes(self) -> dict[str, float]:
    """Returns {kind of pass: elements that blocks read and write per token}.

    The kinds are "blocks" and "attention".
    """
    total: collections.Counter[str] = collections.Counter()
    for block, count, visited in self._kinds:
      for has_backward, n in ((True, visited), (False, count - visited)):
        of_block = self._passes_of_block(block, has_backward=has_backward)
        for kind, elements in of_block.items():
          total[kind] += n * elements
    return dict(total)

  def _passes_of_block(
    self, block: _BlockSizes, *, has_backward: bool
  ) -> dict[str, float]:
    norms, stream, residual = block.num_norms, self._stream, self._residual
    columns, read = block.columns, block.read
    of_results = block.num_output_norms
    # The forward pass computes norms, residual sums and the softmax, and splits
    # the one product of a norm into q, k, v and the hidden layer.
    forward = {
      "blocks": norms * (2 * stream + 3 * residual) + columns + read,
      "attention": 2 * block.scores,
    }
    forward["blocks"] += of_results * 2 * stream + 4 * block.rows
    if not has_backward:
      return forward
    # In the backward pass, a norm reads two tensors and writes a gradient,
    # which is added to the stream's gradient. The joined product's gradient is
    # computed from the product and the gradients of its parts (q, k, v and
    # hidden); the scores' gradient from the attention weights, the result of
    # attention, and the gradients of both.
    backward = {
      "blocks": norms * (3 * stream + 3 * residual) + 2 * columns + read,
      "attention": 3 * block.scores + 2 * self._queries,
    }
    backward["blocks"] += of_results * 3 * stream + 6 * block.rows
    # Even REMAT = "none" recomputes norms, q, k, v and the hidden layer
    # (ops/recompute.py).
    again = {"blocks": norms * 2 * stream + columns + read}
    repeated = {
      "none": again,
      "attention": {**again, "attention": forward["attention"]},
      "layer": forward,
    }[self._config.remat]
    return {x: forward[x] + backward[x] + repeated.get(x, 0) for x in forward}

  def traffic(self) -> dict[str, int]:
    """Returns {kind of pass: bytes of activations read and written per step}.

    The kinds are "blocks", "attention" and "loss".
    """
    width = self._width
    of_token = {
      kind: width * numbers for kind, numbers in self.block_passes().items()
    }
    # Outside the blocks, passes compute and recompute the last norm and compute
    # its gradient. They also look up rows of the embedding, and add up the
    # gradient of these rows in float32.
    of_token["blocks"] += self._stream * (7 * width + 3 * width)
    if "embedding" in self._work.trained:
      of_token["blocks"] += self._stream * 2 * _FLOAT32
    # The loss reads logits twice, once to sum over the vocabulary and once for
    # the gradient, and writes the gradient.
    of_token["loss"] = self._vocab * (2 * self._logits_width + width)
    tokens = self._work.mesh.num_microbatches * self.tokens
    return {kind: round(tokens * each) for kind, each in of_token.items()}


def weight_copy_bytes(work: Work) -> int:
  """Returns a device's bytes of cast, gathered and joined copies of weights.

  Counts the copies of one layer and, on stage 0, of the embedding, and also the
  full gradients before their reduce-scatter.
  """
  config, mesh, trained = work.model, work.mesh, work.trained
  layers = {x.first: x.layer for x in model_of(config).kinds}
  total = dict.fromkeys((None, *layers), 0)
  dims = {x.name: x.dims for x in parameters.distinct_parameters(config)}
  for name, each, _ in work.slices:
    parameter = parameters.parse_name(name)
    if parameter.is_vector:
      continue
    is_stored_split = "d_model_stored" in mesh.stored(dims[name])
    stored = mesh.axis_size_of("d_model_stored") if is_stored_split else 1
    copies = int(work.stored_bytes(name) != work.width)
    # A device that stores a part of each weight gathers the whole weight, and
    # makes its whole gradient before the reduce-scatter.
    wholes = 2 if name in trained else 1
    copies += wholes * stored if stored > 1 else 0
    if parameter.layer is not None:
      reads = layers[parameter.layer].reads
      is_joined = any(parameter.part in x.parts for x in reads)
      copies += stored if is_joined else 0
    total[parameter.layer] += copies * work.width * each.size
  return total.pop(None) + max(total.values())


def exchange_bytes(work: Work) -> int:
  """Returns a device's bytes to exchange gradients with other pods.

  They hold the gradients that other pods send, and the float32 sums.
  """
  pods, total = work.pods, 0
  if pods.num_pods == 1 or work.exchange.is_diloco:
    return 0
  for name, each, n in work.trained_slices:
    width = DTYPE_BYTES[parameters.sent_dtype(name, pods.dcn_dtype)]
    of_others = -(-each.size // each.num_replicas) * width * (pods.num_pods - 1)
    total += n * (of_others + each.size * _FLOAT32)
  return total


def coded_bytes(name: str, size: int, outer_dtype: str) -> int:
  """Returns the bytes of `size` numbers as OUTER_DTYPE sends them in a sync.

  A parameter that is a state of a router is sent in float32.
  """
  dtype = parameters.sent_dtype(name, outer_dtype)
  if dtype in DTYPE_BYTES:
    return DTYPE_BYTES[dtype] * size
  # Groups of numbers share a scale (optim/outer.py); e3m0 has 4 bits.
  of_group = _GROUP // (2 if dtype == "e3m0" else 1) + _FLOAT32
  return -(-size // _GROUP) * of_group


def outer_bytes(work: Work) -> int:
  """Returns a device's bytes of outer parameters and all that syncs keep.

  They are in the memory of hosts. On TPUs, that is not the devices' memory.
  """
  exchange = work.exchange
  if not exchange.is_diloco or work.mesh.tpu:
    return 0
  total = 0.0
  for name, each, n in work.trained_slices:
    coded = coded_bytes(name, each.size, exchange.outer_dtype)
    # What each pod sends, and their mean, of one fragment.
    of_sync = work.pods.num_pods * coded + each.size * _FLOAT32
    total += n * (2 * each.size * _FLOAT32 + of_sync / exchange.fragments)
  return round(total)


def weight_traffic(work: Work) -> int:
  """Returns the bytes of passes over weights per step, without the update.

  A device casts weights, and adds each microbatch's gradients to a sum.
  """
  num_forward = parameters.first_in_backward(work.model, work.frozen)
  num_microbatches, trained, total = work.mesh.num_microbatches, work.trained, 0
  for name, each, count in work.slices:
    numbers = 0
    stored = work.stored_bytes(name)
    if work.width != stored:  # casts; the backward pass casts kernels again
      is_kernel = parameters.parse_name(name).is_kernel
      passes = 2 * count - num_forward if is_kernel else count
      numbers += passes * (stored + work.width)
    if num_microbatches > 1:  # adds each gradient to the sum so far
      of_sum = 2 * _FLOAT32 + work.gradient_bytes(name)
      numbers += trained.get(name, 0) * of_sum
    total += numbers * each.size
  return num_microbatches * total


def update_traffic(kept: DeviceBytes) -> int:
  """Returns the bytes that a device's optimizer reads and writes per step."""
  # Gradients are read for the global norm, for the root mean square of the
  # update, and for the update. Weights are read for their root mean square.
  # The update reads and writes weights and slots. Frozen weights take no part.
  return 3 * kept.gradients + 3 * kept.weights + 2 * kept.slots


def decode_weight_bytes(config: ModelConfig, weight_dtype: str) -> int:
  """Returns the bytes of all weights; a decoding step reads each once."""
  is_quantized = weight_dtype != "activation"
  total = 0
  for each in parameters.distinct_parameters(config):
    is_kernel = parameters.parse_name(each.name).is_kernel
    dtype = weight_dtype if is_kernel else "activation"
    if each.name == parameters.logits_table(config) and is_quantized:
      # Decoding never has this kernel in int4.
      dtype = "q6_k" if weight_dtype.endswith("_k") else "int8"
    width = _QUANTIZED_BYTES.get(dtype, DTYPE_BYTES[config.activation_dtype])
    total += int(math.prod(each.shape) * width) * each.count
  return total


def cache_bytes_per_token(config: ModelConfig) -> int:
  """Returns the bytes of a token's keys and values in all layers."""
  sizes = parameters.dimension_sizes(config)
  width = DTYPE_BYTES[config.activation_dtype]
  return width * sum(
    kind.count * math.prod(sizes[dim] for dim in x.outputs)
    for kind in model_of(config).kinds
    for x in kind.layer.attention.inputs[1:]  # k and v
  )


def step_threads(config: ModelConfig, weight_dtype: str, cores: int) -> int:
  """Returns with how many threads, up to `cores`, decoding is fastest."""
  # Per layer, one product joins all kernels that read the same norm, and one
  # joins the output kernels of a sum. One more product gives the logits.
  products = 1 + sum(
    x.count * (len(x.layer.reads) + len(x.layer.sums))
    for x in model_of(config).kinds
  )
  mean = decode_weight_bytes(config, weight_dtype) / products
  return max(1, min(cores, int(mean / _BYTES_FOR_A_THREAD)))
