# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A decoder of Transformer blocks; PaLM's by default.

  parallel   y = x + MLP(norm(x)) + Attention(norm(x))
  serial     h = x + Attention(norm(x));   y = h + MLP(mlp_norm(h))

  MLP(x)       = (swish(x wi_gate) * (x wi)) wo
  Experts(x)   = sum over a token's experts e of gate_e(x) MLP_e(x)
  Attention(x) = self_attention(rotary(x q), rotary(x k), x v) o
  logits       = final_norm(x) embedding^T / sqrt(d_model)

Layers with NEIGHBOURS then attend to similar texts (neighbours.py).

(PaLM, section 2; Chowdhery et al. 2022.) Settings choose other norms, MLPs,
heads, positions and biases: architecture/block.py describes the block that this
forward pass computes. Training, validation, scoring and the prefill of decoding
use this forward pass; weights.py stores the weights and multiplies by them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import (
  ENCODER,
  NORMS,
  Attention,
  Branch,
  Layer,
  Sum,
  model_of,
)
from palm_mtf.architecture.parameters import layer_name
from palm_mtf.config import ModelConfig
from palm_mtf.config.neighbours import refuse_neighbours
from palm_mtf.model.attention import self_attention
from palm_mtf.model.dims import Dims
from palm_mtf.model.dropout import Dropout
from palm_mtf.model.layers import add_bias, norm, without_padding
from palm_mtf.model.neighbours import Neighbours
from palm_mtf.model.positions import rotary_tables
from palm_mtf.model.sharding import from_residual, to_residual
from palm_mtf.model.virtual import put_virtual
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.ops.recompute import recomputed

KeysAndValues = list[tuple[mtf.Tensor, mtf.Tensor]]


class Palm:
  """The forward pass of the model over tokens, [batch, length]."""

  def __init__(
    self,
    config: ModelConfig,
    dims: Dims,
    weights: TrainedWeights,
    dropout: Dropout | None = None,
    *,
    neighbours: mtf.Tensor | None = None,
    attention: Callable[..., mtf.Tensor] = self_attention,
    positions: tf.Tensor | None = None,
  ):
    """Makes the rotary tables, which the layers share.

    Args:
      weights: the parameters; for decoding, the joined kernels of
        generation/decode/forward.py.
      dropout: dropout of a training step; None drops nothing.
      neighbours: `Neighbours.tokens`, if layers attend to neighbours.
      attention: replaces `self_attention`.
      positions: positions to rotate by, [length] int32; None for 0, 1, 2, ...
    """
    self._config = config
    self._dims = dims
    self._weights = weights
    self._dropout = dropout
    # The tables' positions count from the start of the row even if the row has
    # several documents, because scores depend only on differences of positions.
    self._attention = attention
    given = positions, config.sequence_length
    self._angles = {
      rotary: rotary_tables(weights.mesh, dims.length, rotary, *given)
      for rotary in model_of(config).rotaries
    }
    self._neighbours = None
    if neighbours is None:
      refuse_neighbours(config, "this program")
    else:
      self._neighbours = Neighbours(config, neighbours)
      length = mtf.Dimension("length", 2 * config.chunk_length)
      self._neighbour_angles = {
        rotary: rotary_tables(weights.mesh, length, rotary)
        for rotary in self._angles
      }

  def logits(
    self,
    inputs: mtf.Tensor,
    segments: mtf.Tensor | None = None,
    prefix: mtf.Tensor | None = None,
  ) -> mtf.Tensor:
    """Returns the logits of the token that follows each token of `inputs`.

    Args:
      inputs: [batch, length], int32 in [0, vocab).
      segments: [batch, length], int32: number of the token's document in its
        row; any number for padding. None means one document per row.
      prefix: [batch, length], int32: 1 for tokens in the prefix of a prefix LM,
        which attend to one another in both directions, else 0. None means all
        0. A prefix requires `segments`.

    Returns:
      [batch, length, vocab], LOGITS_DTYPE.
    """
    return self.unembed(self.hidden(inputs, segments, prefix))

  def hidden(
    self,
    inputs: mtf.Tensor,
    segments: mtf.Tensor | None = None,
    prefix: mtf.Tensor | None = None,
    keys_and_values: KeysAndValues | None = None,
  ) -> mtf.Tensor:
    """Returns the normalized output of the last block.

    Args:
      inputs, segments, prefix: see `logits`.
      keys_and_values: None; or, to fill the cache of decoding, a list to which
        each layer appends the keys and values that its attention reads. With a
        list, REMAT must be "none"; there is no backward pass to recompute for.

    Returns:
      [batch, length, d_model], activation dtype.
    """
    layers = range(self._config.num_layers)
    x = self.embed(inputs, segments)
    x = self.run_blocks(x, layers, segments, prefix, keys_and_values)
    return self.last_norm(x)

  def embed(
    self, inputs: mtf.Tensor, segments: mtf.Tensor | None = None
  ) -> mtf.Tensor:
    """Returns the input of the first block; for arguments see `logits`."""
    x = self._drop(self._weights.embed(inputs, segments), 0)
    if self._neighbours:
      e = self._weights.embed(self._neighbours.tokens, None)
      x = mtf.concat([x, e], "length")
    return to_residual(x, self._dims)

  def run_blocks(
    self,
    x: mtf.Tensor,
    layers: Iterable[int],
    segments: mtf.Tensor | None = None,
    prefix: mtf.Tensor | None = None,
    keys_and_values: KeysAndValues | None = None,
  ) -> mtf.Tensor:
    """Returns the output of the last of `layers`; x is the input of the first.

    Input and output are [batch, length, d_model_residual], activation dtype.
    After the positions of the row, they have those of its neighbours, if any.
    For the other arguments see `hidden`.
    """

    def attend(name: str, branch: Branch, qkv: list[mtf.Tensor]):
      mixer = branch.mixer
      for i, each in enumerate(branch.inputs):
        for part, dims in each.virtual.items():
          table = self._weights.virtual(f"{name}/{part}", dims)
          angles = self._angles.get(each.rotary, [])
          given = qkv[i], table, segments
          qkv[i] = put_virtual(*given, each.rotary, angles)
      if keys_and_values is not None:
        keys_and_values.append((qkv[1], qkv[2]))
      return self._attention(
        *(*qkv, segments, prefix),
        mixer=mixer,
        extras=self._weights.score_extras(name, mixer, self._dims.length),
        keeps_weights=self._config.remat != "attention",
      )

    for layer in layers:
      block = functools.partial(self._block, layer=layer, attend=attend)
      is_recomputed = self._config.remat == "layer"
      x = recomputed(block, [x]) if is_recomputed else block(x)
    return x

  def last_norm(self, x: mtf.Tensor) -> mtf.Tensor:
    """Normalizes the output of the last block; see `hidden`."""
    # The last norm multiplies by the factor of the logits, because norms use
    # float32. Scaling bfloat16 logits would round the logits a second time.
    if self._neighbours:
      x, _ = self._neighbours.split(x)
    x = from_residual(x, self._dims)
    return self._norm(x, "final_norm", factor=self._config.logits_factor)

  def unembed(self, hidden: mtf.Tensor) -> mtf.Tensor:
    """Returns the logits for the output of `hidden`; see `logits`."""
    logits = self._weights.unembed(hidden)
    return without_padding(logits, self._config.vocab_size)

  def _block(
    self, x: mtf.Tensor, *, layer: int, attend: Callable[..., mtf.Tensor]
  ) -> mtf.Tensor:
    described, name = model_of(self._config).layers[layer], layer_name(layer)
    angles, own = self._angles.get(described.rotary, []), self._neighbours
    if own:
      x, e = own.split(x)
    x = self._add_sums(x, name, described.sums, angles, attend, 2 * layer + 1)
    if not own:
      return x
    if described.crosses:
      x, e = self._add_neighbours(x, e, name, described)
    return mtf.concat([x, e], "length")

  def _add_neighbours(
    self, x: mtf.Tensor, e: mtf.Tensor, name: str, layer: Layer
  ) -> tuple[mtf.Tensor, mtf.Tensor]:
    # Returns the streams of the row and of its neighbours' tokens.
    assert self._neighbours
    own, present = self._neighbours, self._neighbours.present()

    def attend(unused_name, branch, qkv):
      return self_attention(*qkv, present, present, mixer=branch.mixer)

    def cross(x, memory, each, mix):
      qkv = []
      for y, read in zip((x, memory), each.reads, strict=True):
        y = self._norm(from_residual(y, self._dims), f"{name}/{read.norm}")
        qkv += self._weights.project_in(y, name, read, ())
      branch = each.branches[0]
      scale = branch.mixer.factor(self._config.d_kv)
      mixed = {branch.output: mix(qkv, scale, layer.rotary)}
      y = self._weights.project_out(name, mixed)
      return x + to_residual(y, self._dims)

    angles = self._neighbour_angles.get(layer.rotary, [])
    given = f"{name}/{ENCODER}", layer.encoder, angles, attend
    e = mtf.reshape(self._add_sums(own.apart(e), *given), e.shape)
    e = cross(e, x, layer.crosses[0], own.condition)
    return cross(x, e, layer.crosses[1], own.attend), e

  def _add_sums(
    self,
    x: mtf.Tensor,
    name: str,
    sums: Sequence[Sum],
    angles: Sequence[mtf.Tensor],
    attend: Callable[..., mtf.Tensor],
    place: int | None = None,
  ) -> mtf.Tensor:
    # Returns x after the sums. `place` is that of the first sum for dropout.
    weights = self._weights
    for i, each in enumerate(sums):
      branches, sparse = {}, []
      for read in each.reads:
        y = from_residual(x, self._dims)
        y = self._norm(y, f"{name}/{read.norm}")
        if read.sparse:
          sparse.append(weights.run_experts(y, name, read.sparse))
        # One product multiplies the norm's output by all kernels that read it.
        found = weights.project_in(y, name, read, angles) if read.joined else []
        for branch in read.joined:
          mixed = found.pop(0)
          if isinstance(branch.mixer, Attention):
            qkv = [mixed, found.pop(0), found.pop(0)]
            mixed = attend(name, branch, qkv)
          branches[branch.output] = mixed
      # The products of all branches are added first and then share one
      # all-reduce (PaLM, section 2).
      y = weights.project_out(name, branches, sparse)
      if each.output_norm:
        for bias in weights.output_biases(name, branches, after=y):
          y = add_bias(y, bias)
        y = self._norm(y, f"{name}/{each.output_norm}")
        branches = {}  # the residual stream gets no more biases
      if place is not None:
        y = self._drop(y, place + i)
      x += to_residual(y, self._dims)
      for bias in weights.output_biases(name, branches, after=x):
        x = add_bias(x, to_residual(bias, self._dims))
    return x

  def _norm(self, x: mtf.Tensor, name: str, factor: float = 1.0) -> mtf.Tensor:
    vectors = self._weights.norm_vectors(name, after=x)
    config = self._config
    return norm(x, vectors, NORMS[config.norm], config.norm_epsilon, factor)

  def _drop(self, x: mtf.Tensor, place: int) -> mtf.Tensor:
    return self._dropout(x, place) if self._dropout else x
