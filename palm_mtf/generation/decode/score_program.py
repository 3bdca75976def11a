# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Function that computes log p of given tokens in one forward pass."""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.generation.decode.forward import (
  build_palm,
  import_rows,
  make_masks,
  run_blocks,
  take_slices,
)
from palm_mtf.generation.decode.functions import (
  Built,
  DecodeFunction,
  Effect,
  Inputs,
)
from palm_mtf.generation.decode.rows import State, join_rows, split_rows
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.model.loss import cross_entropy
from palm_mtf.ops.placement import LaidOut
from palm_mtf.ops.slicewise import slice_offset, split_axes

NUM_LIKELIEST = 5  # number of likeliest tokens per position, as in OpenAI's API
_DTYPES = {
  "token_loss": tf.float32,
  "is_likeliest": tf.bool,
  "likeliest": tf.int32,
  "likeliest_loss": tf.float32,
  "log_p": tf.float32,
  "key": tf.float32,
}


@dataclasses.dataclass(frozen=True)
class ScoreRows(DecodeFunction):
  """Scores rows of one length, with decoding's weights and without a state.

  Inputs:
    inputs: [rows, length], int32: the token before each target.
    targets: [rows, length], int32: tokens to score.
    num_given: [rows], int32: the first `num_given` inputs attend to one another
      in both directions. Ignored if OBJECTIVE is "causal".
    neighbours: only if layers attend to neighbours: [rows, neighbour_tokens],
      int32: see `Neighbours` in model/neighbours.py.
    adapter: only if `has_adapter`: [], int32: number of the rows' adapter.

  Outputs (`names` lists the outputs to compute; k is NUM_LIKELIEST, or the
  vocabulary's size if that is smaller):
    token_loss: [rows, length], float32: -log p of each target.
    is_likeliest: [rows, length], bool: whether no token is likelier than the
      target.
    likeliest: [rows, length, k], int32: the k tokens with the largest log p at
      each target's position, likeliest first.
    likeliest_loss: [rows, length, k], float32: -log p of `likeliest`.
    log_p: [rows, length, vocab], float32: log p of all tokens.
    key: [rows, length, d_model], float32: the vectors that give the logits.
  """

  num_rows: int  # divisible by the number of slices of `batch`
  length: int  # at most the model's sequence_length
  names: Sequence[str]
  has_adapter: bool = False
  neighbour_tokens: int = 0

  effect = Effect.READS

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    rows = tf.TensorSpec([self.num_rows, self.length], tf.int32)
    num_given = tf.TensorSpec([self.num_rows], tf.int32)
    specs = {"inputs": rows, "targets": rows, "num_given": num_given}
    if size := self.neighbour_tokens:
      specs["neighbours"] = tf.TensorSpec([self.num_rows, size], tf.int32)
    if self.has_adapter:
      specs["adapter"] = tf.TensorSpec([], tf.int32)
    return specs

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output in `names`."""
    return {name: _DTYPES[name] for name in self.names}

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds one forward pass; returns the same state, and the outputs."""
    model = dataclasses.replace(model, adapter=inputs.get("adapter"))
    impl = model.placement
    mesh, shape, palm = build_palm(
      model, self.num_rows, self.length, inputs.get("neighbours")
    )
    num_given = split_rows(impl, inputs["num_given"])
    masks = make_masks(model, mesh, num_given, shape)
    tokens, wanted = (
      import_rows(model, mesh, inputs[x], shape) for x in ("inputs", "targets")
    )
    key = palm.last_norm(run_blocks(model, palm, palm.embed(tokens), masks))
    logits = palm.unembed(key)
    token_loss, log_z = cross_entropy(logits, wanted)
    # Summing `logits * is_target` over the vocabulary gives the target's logit.
    vocab = logits.shape.dims[-1]
    is_target = mtf.one_hot(wanted, vocab, dtype=logits.dtype)
    is_likeliest = mtf.greater_equal(
      mtf.reduce_sum(logits * is_target, reduced_dim=vocab),
      mtf.reduce_max(logits, reduced_dim=vocab),
    )
    token_loss, is_likeliest, log_z, logits, key = take_slices(
      model, mesh, [token_loss, is_likeliest, log_z, logits, key]
    )
    top, likeliest = _find_likeliest(model, logits)
    log_p = impl.slicewise(
      lambda z, x: tf.cast(x, tf.float32) - z[..., tf.newaxis], log_z, logits
    )
    for axis in split_axes(impl, [model.dims.vocab]):
      log_p = impl.allconcat(log_p, axis, 2)
    found = {
      "token_loss": token_loss,
      "is_likeliest": is_likeliest,
      "likeliest": likeliest,
      "likeliest_loss": impl.slicewise(
        lambda z, top: z[..., tf.newaxis] - top, log_z, top
      ),
      "log_p": impl.slicewise(
        lambda x: x[..., : model.config.vocab_size], log_p
      ),
      "key": impl.slicewise(lambda x: tf.cast(x, tf.float32), key),
    }
    return state, {name: join_rows(impl, found[name]) for name in self.names}


def _find_likeliest(
  model: DecodeModel, logits: LaidOut
) -> tuple[LaidOut, LaidOut]:
  """Returns the k largest logits, [rows, length, k] float32, and their ids."""
  impl, vocab = model.placement, model.dims.vocab
  # The k tokens never include a padding row of the embedding, because the logit
  # of a padding row is lower than the logits of all `vocab_size` tokens.
  count = min(NUM_LIKELIEST, model.config.vocab_size)

  def find(first, x):
    x = tf.cast(x, tf.float32)
    top, tokens = tf.math.top_k(x, min(count, x.shape[-1]))
    return top, tokens + first

  found = impl.slicewise(find, slice_offset(impl, vocab), logits)
  for axis in split_axes(impl, [vocab]):
    # Choose from the likeliest tokens of all slices of the vocabulary.
    top, tokens = (impl.allconcat(x, axis, 2) for x in found)

    def choose(top, tokens):
      top, at = tf.math.top_k(top, count)
      return top, tf.gather(tokens, at, batch_dims=2)

    found = impl.slicewise(choose, top, tokens)
  return found
