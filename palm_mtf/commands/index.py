# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf index`: indexes of keys of texts, and of chunks of documents."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from palm_mtf.commands.export import check_new
from palm_mtf.commands.score import open_texts
from palm_mtf.config import CacheConfig, Config
from palm_mtf.console import print_results
from palm_mtf.data.batches.conversations import open_conversations
from palm_mtf.data.batches.neighbours import write_index
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.tokens.store import load_stores
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import log_dtype
from palm_mtf.model_dir.atomic_files import new_path
from palm_mtf.model_dir.foreign_files import seal_folder
from palm_mtf.retrieval.keys import (
  KEYS,
  TOKENS,
  KeyIndex,
  check_approximate,
  find_shares,
  write_approximate,
)

_WEIGHTS = np.arange(20) / 20
_SAMPLE = 1000  # keys that tell which distances are usual


def build(
  *, output: str, search: str, as_json: bool = False, **given: Any
) -> None:
  """Writes the key and the token of each token of the texts."""
  output = os.path.abspath(os.path.expanduser(output))
  check_new(output)
  content, tokens, windows = _open(**given)
  shape = len(tokens), given["config"].model.d_model
  if search == "approximate":
    check_approximate(len(tokens))
  with new_path(output, 2 * math.prod(shape), make_way=check_new) as folder:
    os.makedirs(folder)
    np.save(f"{folder}/{TOKENS}", tokens)
    keys = np.lib.format.open_memmap(
      f"{folder}/{KEYS}", "w+", np.float16, shape
    )
    for at, _, found in windows:
      if np.abs(found).max() > np.finfo(np.float16).max:
        raise UserError("the model's last norm gives numbers beyond float16.")
      keys[at : at + len(found)] = found
    if search == "approximate":
      write_approximate(folder, keys)
    seal_folder(folder, {**content, "search": search})
  print_results({"index": output, "entries": len(tokens)}, as_json)


def chunks(*, model_dir: str, config: CacheConfig, as_json: bool) -> None:
  """Writes NEIGHBOUR_INDEX from the training documents of a run."""
  model, data = config.model, config.data
  output = os.path.abspath(os.path.expanduser(data.neighbour_index or ""))
  if data.neighbour_index is None or os.path.lexists(output):
    raise UserError(
      f"NEIGHBOUR_INDEX = {data.neighbour_index!r}: give the path of the index "
      "to make, where nothing is yet, and NEIGHBOURS."
    )
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  sources = open_filtered(model_dir, data, model.sequence_length)
  conversations = open_conversations(data, sources, vocabulary)
  stores = load_stores(model_dir, data, sources, vocabulary, conversations)
  splits = [x.train.tokens for x in stores]
  if not any(map(len, splits)):
    raise UserError(
      f"VALIDATION_SHARE = {data.validation_share}: leaves no document for "
      "training; give more text, or lower it."
    )
  with new_path(output, 64 * sum(map(len, splits))) as folder:
    given = folder, splits, model.chunk_length, vocabulary.sha256
    found = {"index": output, "chunks": write_index(*given)}
  print_results(found, as_json)


def tune(*, config: Config, as_json: bool = False, **given: Any) -> None:
  """Prints the perplexity of texts for many weights and temperatures."""
  if config.decode.knn_index is None:
    raise UserError("KNN_INDEX = None: give the index to tune.")
  content, tokens, windows = _open(config=config, **given)
  index = KeyIndex(config.decode, content["checkpoint"], config.model)
  if known := {*content["texts"]} & {*index.manifest["texts"]}:
    raise UserError(
      f"KNN_INDEX = {config.decode.knn_index!r}: has {len(known):,} of these "
      "texts, which would find themselves; give other texts."
    )
  some = index.keys[:: 1 + len(index.keys) // _SAMPLE].astype(np.float64)
  usual = some.var(0).sum()
  temperatures = [float(f"{usual * 2.0**x:.2g}") for x in range(-12, 4)]
  sums = np.zeros([len(temperatures), len(_WEIGHTS)])
  for at, losses, keys in windows:
    for i, (squares, near) in enumerate(index.nearest(keys)):
      hits = near == tokens[at + i]
      p = [find_shares(squares, x)[hits].sum() for x in temperatures]
      mixed = _WEIGHTS * np.array(p)[:, np.newaxis]
      sums += np.log(mixed + (1 - _WEIGHTS) * math.exp(-losses[i]))
  perplexities = np.exp(-sums / len(tokens))
  row, column = np.unravel_index(perplexities.argmin(), sums.shape)
  results = {
    # By temperature, each with its best weight.
    "perplexities": {
      f"{x:g} {_WEIGHTS[y.argmin()]:g}": y.min()
      for x, y in zip(temperatures, perplexities, strict=True)
    },
    "without_index": perplexities[0, 0],
    "perplexity": perplexities[row, column],
    "knn_temperature": temperatures[row],
    "knn_weight": _WEIGHTS[column],
  }
  print_results(results, as_json)


def _open(
  config: Config, **given: Any
) -> tuple[dict[str, Any], np.ndarray, Iterator]:
  """Returns what a manifest says, all tokens of the texts, and their windows.

  Per window: the place of its first token, -log p of its tokens, their keys.
  """
  plain = dataclasses.replace(config.decode, knn_index=None)
  config = dataclasses.replace(config, decode=plain)
  opened = open_texts(config=config, **given)
  config, checkpoint, vocabulary, items, encoded = opened
  from palm_mtf.generation.inference.scorer import Example, make_scorer
  from palm_mtf.generation.inference.sessions import LoadedDecoder

  examples = [Example(*pair) for pairs in encoded for pair in pairs]
  starts = np.cumsum([0, *(len(x.targets) for x in examples)])

  def read() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    log_dtype(config.model, config.mesh_layout)
    with LoadedDecoder.of_run(checkpoint, config) as loaded:
      scorer = make_scorer(loaded, config, vocabulary)
      for i, first, found in scorer.read_windows(examples, "token_loss", "key"):
        yield starts[i] + first, *found

  contents = (json_text([x.inputs, x.targets]).encode() for x in items)
  hashes = [hashlib.blake2b(x, digest_size=16).hexdigest() for x in contents]
  tokens = np.concatenate([x.targets for x in examples]).astype(np.int32)
  return {"checkpoint": checkpoint.blake2b, "texts": hashes}, tokens, read()
