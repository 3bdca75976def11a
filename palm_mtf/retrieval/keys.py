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
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.config import DecodeConfig
from palm_mtf.errors import UserError, check_library
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.foreign_files import read_sealed, seal

# [entries, d_model] float16, and [entries] int32.
KEYS, TOKENS = "keys.npy", "tokens.npy"
_SEARCH, _MANIFEST = "search.faiss", "manifest.json"
_BLOCK = 2**14  # keys that are compared at once
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


def write_manifest(folder: str, content: Mapping[str, object]) -> None:
  """Writes what an index is; its other files are complete."""
  sizes = {x: os.path.getsize(f"{folder}/{x}") for x in os.listdir(folder)}
  with open(f"{folder}/{_MANIFEST}", "w", encoding="utf-8") as file:
    file.write(json_text(seal({**content, "sizes": sizes})))


def find_shares(squares: np.ndarray, temperature: float) -> np.ndarray:
  """Returns p_knn of neighbours, the nearest first, by squared distances."""
  shares = np.exp((squares[0] - squares) / temperature)
  return shares / shares.sum()


def _smallest(x: np.ndarray, count: int) -> np.ndarray:
  """Returns the columns of the smallest numbers of each row, in any order."""
  return np.argpartition(x, min(count, x.shape[1]) - 1)[:, :count]


class KeyIndex:
  """Keys and tokens in files, which are mapped into memory."""

  def __init__(self, decode: DecodeConfig, checkpoint: str):
    """Opens KNN_INDEX; UserError unless it is whole and of this checkpoint.

    `checkpoint` is the hash that identifies its weights.
    """
    given = f"KNN_INDEX = {decode.knn_index!r}"
    path, sizes = os.path.expanduser(str(decode.knn_index)), None
    with contextlib.suppress(OSError, ValueError, KeyError):
      self.manifest, _ = read_sealed(f"{path}/{_MANIFEST}")
      names = self.manifest["sizes"]
      sizes = {x: os.path.getsize(f"{path}/{x}") for x in names}
    if sizes is None or sizes != names:
      raise UserError(
        f"{given}: has no whole index; make one with palm_mtf index build."
      )
    if self.manifest["checkpoint"] != checkpoint:
      raise UserError(
        f"{given}: is of the checkpoint with the hash "
        f"{self.manifest['checkpoint']}, and this has {checkpoint}; build an "
        "index of this model with palm_mtf index build."
      )
    self.keys, self._tokens = (
      np.load(f"{path}/{x}", mmap_mode="r") for x in (KEYS, TOKENS)
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
    if self._faiss:
      _, found = self._faiss.search(queries, 2 * self._count)
    else:
      found = self._compare_all(queries, self._count + 64)
    for query, entries in zip(queries, found, strict=True):
      entries = np.sort(entries[entries >= 0])
      keys = self.keys[entries].astype(np.float32)
      squares = np.square(keys - query).sum(1)
      order = np.argsort(squares, kind="stable")[: self._count]
      yield squares[order].astype(np.float64), self._tokens[entries[order]]

  def _compare_all(self, queries: np.ndarray, count: int) -> np.ndarray:
    best = np.zeros([len(queries), 0], np.float32)
    found = np.zeros([len(queries), 0], np.int64)
    for start in range(0, len(self.keys), _BLOCK):
      keys = self.keys[start : start + _BLOCK].astype(np.float32)
      scores = np.square(keys).sum(1) - 2 * queries @ keys.T
      near = _smallest(scores, count)
      found = np.hstack([found, start + near])
      best = np.hstack([best, np.take_along_axis(scores, near, 1)])
      kept = _smallest(best, count)
      best, found = (np.take_along_axis(x, kept, 1) for x in (best, found))
    return found

  def _shares(self, keys: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    for squares, tokens in self.nearest(keys):
      yield self._weight * find_shares(squares, self._temperature), tokens

  def log_p(
    self, log_p: np.ndarray, keys: np.ndarray, targets: Sequence[int]
  ) -> np.ndarray:
    """Returns log p of targets, [targets] float64; -inf if p is 0.

    `log_p`, [targets], is the model's, and `keys` are [targets, d_model].
    """
    mixed = (1 - self._weight) * np.exp(log_p.astype(np.float64))
    for i, (shares, tokens) in enumerate(self._shares(keys)):
      mixed[i] += shares[tokens == targets[i]].sum()
    with np.errstate(divide="ignore"):
      return np.log(mixed)

  def mix(self, logits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns log p of all tokens; both are [rows, vocab], float32."""
    mixed = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    mixed *= (1 - self._weight) / mixed.sum(1, keepdims=True)
    for row, (shares, tokens) in enumerate(self._shares(keys)):
      np.add.at(mixed[row], tokens, shares)
    # Not -inf, because sampling multiplies, and forbids other tokens.
    mixed = np.log(np.maximum(mixed, np.finfo(np.float64).tiny))
    return mixed.astype(np.float32)
