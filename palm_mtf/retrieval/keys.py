# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model mixed with the nearest keys of texts (Khandelwal et al. 2020).

  p(token) = KNN_WEIGHT p_knn(token) + (1 - KNN_WEIGHT) p_model(token)

Each token of the texts is an entry of the index. Its key is the vector by which
the model predicts the token: the last hidden state, after the last norm. p_knn
is proportional to the sum of exp(-distance^2 / KNN_TEMPERATURE) over those of
the KNN_NEIGHBOURS nearest keys that have this token.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from palm_mtf.config import DecodeConfig, ModelConfig
from palm_mtf.errors import UserError, check_library
from palm_mtf.model_dir import foreign_files

# [entries, d_model] float16, and [entries] int32.
KEYS, TOKENS = "keys.npy", "tokens.npy"
_SEARCH = "search.faiss"
_BLOCK = 2**14  # keys that are compared at once
_SCORES = 2**26  # comparisons whose results are in memory
_ROUNDING = 1e-5  # of a float32 product, per sum of the squares of its vectors
_FEWEST_ENTRIES = 10_000  # to train an approximate search
# Maximum number of inverted lists, and how many a search reads; the paper's.
_LISTS, _PROBES = 4096, 32


def check_approximate(entries: int) -> None:
  """Raises UserError if faiss is missing, or there are too few entries."""
  given = "--search = 'approximate'"
  check_library("faiss", "retrieval", given)
  if entries < _FEWEST_ENTRIES:
    raise UserError(
      f"{given}: needs texts of at least {_FEWEST_ENTRIES:,} tokens, and these "
      f"have {entries:,}; leave it out."
    )


def write_approximate(folder: str, keys: np.ndarray) -> None:
  """Writes inverted lists of codes of the keys, 4 bits per number, by faiss."""
  import faiss

  entries, size = keys.shape
  lists = min(_LISTS, entries // 256)
  search = faiss.index_factory(size, f"IVF{lists},SQ4")
  search.nprobe = _PROBES
  step = entries // max(64 * lists, _FEWEST_ENTRIES)
  search.train(keys[::step].astype(np.float32))
  for start in range(0, entries, _BLOCK):
    search.add(keys[start : start + _BLOCK].astype(np.float32))
  faiss.write_index(search, f"{folder}/{_SEARCH}")


def describe_index(decode: DecodeConfig) -> dict[str, str]:
  """Returns the hash of the content of KNN_INDEX; {} without a whole index."""
  if path := decode.knn_index:
    with contextlib.suppress(OSError, ValueError):
      path = os.path.expanduser(path)
      return {
        "index": foreign_files.read_sealed(f"{path}/{foreign_files.MANIFEST}")[
          1
        ]
      }
  return {}


def find_shares(squares: np.ndarray, temperature: float) -> np.ndarray:
  """Returns p_knn of neighbours, the nearest first, by squared distances."""
  shares = np.exp((squares[:1] - squares) / temperature)
  return shares / shares.sum()


class KeyIndex:
  """Keys and tokens in files, which are mapped into memory."""

  def __init__(self, decode: DecodeConfig, checkpoint: str, model: ModelConfig):
    """Opens KNN_INDEX; UserError unless it is whole and of this checkpoint.

    `checkpoint` is the hash that identifies the weights of `model`.
    """
    given = f"KNN_INDEX = {decode.knn_index!r}"
    path, is_whole = os.path.expanduser(str(decode.knn_index)), False
    with contextlib.suppress(OSError, ValueError, LookupError, EOFError):
      # A changed key would change probabilities without an error.
      self.manifest, _ = foreign_files.open_folder(path)
      self.keys, self._tokens = (
        np.load(f"{path}/{x}", mmap_mode="r") for x in (KEYS, TOKENS)
      )
      is_other = self.manifest["checkpoint"] != checkpoint
      kinds = f"{self.keys.dtype} {self._tokens.dtype}"
      is_whole = is_other or (
        kinds == "float16 int32"
        and self.keys.shape == (*self._tokens.shape, model.d_model)
        and 0 <= self._tokens.min() <= self._tokens.max() < model.vocab_size
      )
    if not is_whole:
      raise UserError(
        f"{given}: has no whole index; make one with palm_mtf index build."
      )
    if is_other:
      raise UserError(
        f"{given}: is of the checkpoint with the hash "
        f"{self.manifest['checkpoint']}, and this has {checkpoint}; build an "
        "index of this model with palm_mtf index build."
      )
    self._count, self._weight = decode.knn_neighbours, decode.knn_weight
    self._temperature = decode.knn_temperature
    if self._count > len(self.keys):
      raise UserError(
        f"KNN_NEIGHBOURS = {self._count:,}: the index has {len(self.keys):,} "
        "entries; give at most as many."
      )
    self._faiss = None
    if self.manifest["search"] == "approximate":
      check_library("faiss", "retrieval", given)
      import faiss

      # So that which lists are read does not depend on other queries.
      faiss.cvar.distance_compute_blas_threshold = 2**30
      self._faiss = faiss.read_index(f"{path}/{_SEARCH}")

  def nearest(
    self, queries: np.ndarray
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields squared distances (float64) and tokens of each query's neighbours.

    `queries` are [queries, d_model], float32. The nearest key is first. An
    approximate search may find fewer than KNN_NEIGHBOURS.
    """
    # Choose from more keys than wanted by distances from the stored keys,
    # because products of many queries are rounded differently, and an
    # approximate search has only distances from codes.
    found: Iterable[np.ndarray] = self._compare_all(queries)
    if self._faiss:
      _, found = self._faiss.search(queries, 2 * self._count)
    for query, entries in zip(queries, found, strict=True):
      entries = np.sort(entries[entries >= 0])
      keys = self.keys[entries].astype(np.float64)
      squares = np.square(keys - query).sum(1)
      # Of equal distances, the first entries count.
      order = np.argsort(squares, kind="stable")[: self._count]
      yield squares[order], self._tokens[entries[order]]

  def _compare_all(self, queries: np.ndarray) -> Iterator[np.ndarray]:
    # Yields, per query, all entries that rounding may make one of the nearest.
    entries, last = len(self.keys), self._count - 1
    for some in np.array_split(queries, -(-len(queries) * entries // _SCORES)):
      scores, longest = np.empty([len(some), entries], np.float32), 0.0
      for start in range(0, entries, _BLOCK):
        keys = self.keys[start : start + _BLOCK].astype(np.float32)
        squares = np.square(keys).sum(1)
        longest = max(longest, squares.max())
        scores[:, start : start + _BLOCK] = squares - 2 * some @ keys.T
      limits = np.partition(scores, last)[:, last]
      limits += _ROUNDING * (np.square(some).sum(1) + longest)
      yield from map(np.flatnonzero, scores <= limits[:, np.newaxis])

  def _shares(self, keys: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    for squares, tokens in self.nearest(keys):
      yield self._weight * find_shares(squares, self._temperature), tokens

  def log_p(
    self, log_p: np.ndarray, keys: np.ndarray, targets: Sequence[int]
  ) -> np.ndarray:
    """Returns log p of targets, [targets] float64; -inf if p is 0.

    `log_p`, [targets], is the model's, and `keys` are [targets, d_model].
    """
    # Not a sum of p, because p of an unlikely token may underflow.
    found = zip(targets, self._shares(keys), strict=True)
    p_knn = [shares[near == target].sum() for target, (shares, near) in found]
    with np.errstate(divide="ignore"):
      own = np.log(1 - self._weight) + log_p.astype(np.float64)
      return np.logaddexp(own, np.log(p_knn))

  def mix(self, logits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns logits whose softmax is p; both are [rows, vocab], float32."""
    # Not log p, because a repetition penalty depends on the sign of a logit.
    greatest = logits.max(1, keepdims=True).astype(np.float64)
    mixed = np.exp(logits - greatest)
    total = mixed.sum(1, keepdims=True)
    mixed *= (1 - self._weight) / total
    for row, (shares, tokens) in enumerate(self._shares(keys)):
      np.add.at(mixed[row], tokens, shares)
    # Not -inf, because sampling multiplies, and forbids other tokens.
    mixed = np.log(np.maximum(mixed, np.finfo(np.float64).tiny))
    return (mixed + greatest + np.log(total)).astype(np.float32)
