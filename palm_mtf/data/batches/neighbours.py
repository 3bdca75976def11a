# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""An index of training documents, in which the chunks of rows find neighbours.

Documents are cut into chunks of CHUNK_LENGTH tokens. A neighbour of a chunk is
a chunk of the index and as many tokens that follow it in its document. The
neighbours are those with the largest sums of weights of the terms (tokens, and
pairs of adjacent tokens) that are in both. A term in n of N chunks has the
weight 16 log2(N / n), rounded; if n is above both N / 16 and 64, it has none.
This is BM25 without lengths, because all chunks are equally long, and without
counts. Sums of whole numbers are exact, so that a batch has the same bits on
every machine.

A row finds no neighbours in documents that it has parts of, nor in equal ones,
because a chunk would find itself and the text to predict after it. Documents
are identified by a hash of their tokens.
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence

import numpy as np

from palm_mtf.data.tokens.shard import TokenArray
from palm_mtf.errors import UserError
from palm_mtf.model_dir.foreign_files import open_folder, seal_folder

_UNIT = 16  # of weights, per bit
# A term has no weight if it is in more than _FEW chunks and 1 / _SHARE of all.
_FEW, _SHARE = 64, 16
# {array of an index: its dtype, rank, and sizes of further dimensions}
_ARRAYS = {
  "tokens": ("<i4", 1),
  "chunks": ("<i8", 2, 2),
  "documents": ("<u8", 1),
  "firsts": ("<i8", 1),
  "terms": ("<i8", 1),
  "places": ("<i8", 1),
  "postings": ("<i4", 1),
}

Place = tuple[TokenArray, int, int]  # begin and end of a part of a row


def hash_tokens(ids: np.ndarray) -> int:
  """Returns a hash of a document, from its first token to its [eod]."""
  digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8)
  return int.from_bytes(digest.digest(), "little")


@functools.lru_cache(maxsize=1 << 12)  # above the number of a run's splits
def _spans(tokens: TokenArray) -> np.ndarray:
  return tokens.spans()[:, [0, 2]]


@functools.lru_cache(maxsize=1 << 16)
def _hash_document(tokens: TokenArray, document: int) -> int:
  return hash_tokens(tokens.read(*_spans(tokens)[document].tolist())[0])


def find_documents(places: Iterable[Place]) -> set[int]:
  """Returns the hashes of the documents of which a row has a part."""
  found = set()
  for tokens, start, stop in places:
    begins, ends = _spans(tokens).T
    first = int(np.searchsorted(ends, start, "right"))
    last = int(np.searchsorted(begins, stop, "left"))
    found |= {_hash_document(tokens, i) for i in range(first, last)}
  return found


def _find_terms(
  tokens: np.ndarray, chunks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns pairs (term, chunk that has it) as two arrays, sorted by both.

  `chunks` has the number of the chunk of each token.
  """
  ids = tokens.astype(np.int64)
  (first,) = np.nonzero(chunks[1:] == chunks[:-1])
  pairs = (1 + ids[first] << 32) + ids[first + 1]
  terms = np.concatenate([ids, pairs])
  chunks = np.concatenate([chunks, chunks[first]])
  order = np.lexsort([chunks, terms])
  terms, chunks = terms[order], chunks[order]
  is_new = np.diff(terms, prepend=-1) | np.diff(chunks, prepend=-1) != 0
  return terms[is_new], chunks[is_new]


def write_index(
  folder: str, splits: Sequence[TokenArray], chunk: int, vocabulary: str
) -> int:
  """Writes an index of the documents of `splits`; returns how many chunks.

  Equal documents are written once. `vocabulary` is the hash of the vocabulary.
  """
  found: dict[int, np.ndarray] = {}  # {hash of a document: its tokens}
  for split in splits:
    for begin, end in _spans(split).tolist():
      ids, _ = split.read(begin, end)
      found.setdefault(hash_tokens(ids), ids)
  tokens = np.concatenate([*found.values()])
  lengths = np.array([*map(len, found.values())])
  starts, counts = np.cumsum(lengths) - lengths, -(-lengths // chunk)
  firsts = np.cumsum([0, *counts])  # each document's first chunk
  of = np.repeat(np.arange(len(counts)), counts)  # each chunk's document
  numbers = np.arange(len(of))
  begins = starts[of] + chunk * (numbers - firsts[of])
  sizes = np.diff(begins, append=len(tokens))
  terms, postings = _find_terms(tokens, np.repeat(numbers, sizes))
  terms, at = np.unique(terms, return_index=True)
  arrays = {
    "tokens": tokens.astype(np.int32),
    # Where a chunk begins, and where its document ends.
    "chunks": np.stack([begins, (starts + lengths)[of]], 1),
    "documents": np.array([*found], np.uint64),
    "firsts": firsts,
    "terms": terms,
    "places": np.append(at, len(postings)),  # of each term's postings
    "postings": postings.astype(np.int32),  # the chunks that have a term
  }
  os.makedirs(folder)
  for name, values in arrays.items():
    np.save(f"{folder}/{name}.npy", values)
  seal_folder(folder, {"chunk_length": chunk, "vocabulary": vocabulary})
  return len(of)


def _fit_together(
  *, tokens, chunks, documents, firsts, terms, places, postings
) -> bool:
  """Returns whether arrays are as `write_index` writes them."""

  def divide(bounds, parts, whole):  # into parts that are not empty
    edges = [0, len(whole)]
    is_all = len(bounds) == len(parts) + 1 and bounds[[0, -1]].tolist() == edges
    return is_all and (np.diff(bounds) > 0).all()

  given = tokens, chunks, documents, firsts, terms, places, postings
  if [(x.dtype.str, x.ndim, *x.shape[1:]) for x in given] != [
    *_ARRAYS.values()
  ]:
    return False
  begins, ends = chunks.T
  return bool(
    divide(firsts, documents, chunks)
    and divide(places, terms, postings)
    and (np.diff(terms) > 0).all()
    and 0 <= begins.min()
    and (begins < ends).all()
    and ends.max() <= len(tokens)
    and 0 <= postings.min()
    and postings.max() < len(chunks)
    and tokens.min() >= 0
  )


class NeighbourIndex:
  """An index on the disk, mapped into memory.

  Attributes:
    given: the arguments, with which another process can open the index.
    digest: hash of the content.
  """

  def __init__(self, path: str, count: int, chunk: int, vocabulary: str):
    """Opens NEIGHBOUR_INDEX; UserError unless it is whole and fits.

    `count` is NEIGHBOURS, `chunk` CHUNK_LENGTH, and `vocabulary` the hash of
    the run's vocabulary.
    """
    what, path = f"NEIGHBOUR_INDEX = {path!r}", os.path.expanduser(path)
    self.given = os.path.abspath(path), count, chunk, vocabulary
    self._count, self._chunk, fault = count, chunk, "has no whole index"
    try:
      manifest, self.digest = open_folder(path)
      held = {
        x: np.lib.format.open_memmap(f"{path}/{x}.npy", "r")
        for x in _ARRAYS
        if manifest["hashes"][f"{x}.npy"]  # LookupError for an unsealed array
      }
      if manifest["vocabulary"] != vocabulary:
        fault = "has the tokens of another vocabulary"
      elif (length := manifest["chunk_length"]) != chunk:
        fault = f"has chunks of {length} tokens, not CHUNK_LENGTH = {chunk}"
      elif _fit_together(**held):
        fault = ""
    except (OSError, ValueError, LookupError, EOFError):
      pass
    if fault:
      raise UserError(
        f"{what}: {fault}; make one of this run with palm_mtf index chunks."
      )
    self._held, self._firsts = held, held["firsts"].tolist()
    self._numbers = {x: i for i, x in enumerate(held["documents"].tolist())}

  def find(self, inputs: np.ndarray, hidden: Iterable[int]) -> np.ndarray:
    """Returns the neighbours of a row, as in `Neighbours.tokens` of the model.

    `inputs` are [length]; `hidden` has hashes of documents in which the row
    finds none. The result is [chunks * count * 2 * CHUNK_LENGTH], int32.
    """
    chunks, size = inputs.reshape(-1, self._chunk), 2 * self._chunk
    found = np.full([len(chunks), self._count, size], -1, np.int32)
    numbers = [self._numbers[x] for x in hidden if x in self._numbers]
    for place, chunk in enumerate(chunks):
      for i, entry in enumerate(self._find_nearest(chunk, numbers)):
        begin, end = self._held["chunks"][entry]
        tokens = self._held["tokens"][begin : min(begin + size, end)]
        found[place, i, : len(tokens)] = tokens
    return found.ravel()

  def _find_nearest(self, chunk: np.ndarray, hidden: list[int]) -> list[int]:
    # Returns at most NEIGHBOURS chunks, none from the documents `hidden`.
    known, total = self._held["terms"], len(self._held["chunks"])
    terms, _ = _find_terms(chunk, np.zeros(len(chunk), np.int64))
    at = np.searchsorted(known, terms)
    at = at[known[np.minimum(at, len(known) - 1)] == terms]
    begins, ends = self._held["places"][at], self._held["places"][at + 1]
    is_rare = ends - begins <= max(_FEW, total // _SHARE)
    begins, ends = begins[is_rare], ends[is_rare]
    if not len(begins):
      return []
    lists = [
      self._held["postings"][x:y] for x, y in zip(begins, ends, strict=True)
    ]
    weights = np.rint(_UNIT * np.log2(total / (ends - begins)))
    scores = np.bincount(
      np.concatenate(lists), np.repeat(weights, ends - begins), total
    ).astype(np.int64)
    for number in hidden:
      scores[self._firsts[number] : self._firsts[number + 1]] = 0
    (near,) = np.nonzero(scores)
    ranks = near - scores[near] * total  # of equal scores, first chunks win
    if len(near) > self._count:
      best = np.argpartition(ranks, self._count - 1)[: self._count]
      near, ranks = near[best], ranks[best]
    return near[np.argsort(ranks)].tolist()
