# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Exact and near duplicates among documents, found in one pass.

Exact duplicates have the same text. Near duplicates are different texts whose
sets of 5-word runs are alike: their Jaccard similarity, shared runs over all
runs, is about 0.8 or more. A text of fewer than 5 words is one run; a text
without words is like no other. A document is kept as 128 MinHash values (Broder
1997): two texts of similarity J share each of them with probability J. Texts
that share all 8 values of one of 16 bands are compared, and are near duplicates
when they share 0.8 of all values. So a pair is found

  similarity    0.60   0.65   0.70   0.75   0.80   0.85   0.90   0.95
  probability  0.000  0.000  0.005  0.089  0.495  0.934  1.000  1.000

and what such pairs connect is a group. Nothing depends on the order of the
documents.

Memory: 281 bytes a document, however long it is, and some 900 more while groups
are made.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.sources.document import VALIDATION, Document, Text
from palm_mtf.data.statistics.ngrams import (
  hash_document,
  hash_ngrams,
  hash_words,
)

MIN_SIMILARITY = 0.8
_RUN_WORDS = 5
_BANDS, _ROWS = 16, 8
_VALUES = _BANDS * _ROWS
_DIGEST_BYTES = 16
# Of the texts that share a band, each is compared with so many others: all of
# them, but for huge groups, whose members are connected by fewer pairs too.
_NEIGHBORS = 32
_PAIRS_AT_ONCE = 1 << 16
_RUNS_AT_ONCE = 256  # times 128 values: what a core's cache holds

# 2 * 128 numbers without a pattern.
_FACTORS, _ADDENDS = (
  hash_words(np.arange(2 * _VALUES)).astype(np.uint32).reshape(2, _VALUES)
)
_FACTORS |= 1  # odd, so that a function is one to one


class Group(NamedTuple):
  """Documents with one text, or texts that are near duplicates.

  Attributes:
    size: how many.
    digest: `text_digest` of a member, the same in whatever order they came.
  """

  size: int
  digest: bytes


@dataclasses.dataclass(frozen=True)
class Duplicates:
  """How much of a corpus is there more than once.

  Attributes:
    num_texts: different texts.
    exact_documents: documents whose text came before: all but num_texts.
    exact_bytes: size of their text in UTF-8.
    exact_across: held-out documents whose text is a training document's too.
    near_groups: groups of two or more different texts.
    near_texts: texts in such groups but one of each.
    near_bytes: size of them in UTF-8, the one left out being the largest.
    near_across: held-out documents that are in a group with a training
      document, without those of exact_across.
    largest_exact: the texts with most documents, two or more.
    largest_near: the groups with most texts.
  """

  num_texts: int
  exact_documents: int
  exact_bytes: int
  exact_across: int
  near_groups: int
  near_texts: int
  near_bytes: int
  near_across: int
  largest_exact: list[Group]
  largest_near: list[Group]


class Sketches:
  """What is kept of each document of a source."""

  def __init__(self):
    self._digests = bytearray()
    self._values = bytearray()
    self._sizes = array("q")
    self._held_out = bytearray()

  def add(self, document: Document, split: str) -> None:
    """Keeps the hash and the MinHash values of a document of `split`."""
    digest = text_digest(document)
    self._digests += digest
    self._values += _minhash(document, digest).tobytes()
    self._sizes.append(document.num_bytes)
    self._held_out.append(split == VALIDATION)

  def columns(self) -> tuple[np.ndarray, ...]:
    """Returns digests, MinHash values, sizes and what is held out.

    Views of [documents, 2], uint64; [documents, 128], uint16; [documents],
    int64; and [documents], bool. While they live nothing can be added.
    """
    return (
      np.frombuffer(self._digests, np.uint64).reshape(-1, 2),
      np.frombuffer(self._values, np.uint16).reshape(-1, _VALUES),
      np.frombuffer(self._sizes, np.int64),
      np.frombuffer(self._held_out, np.bool_),
    )


def text_digest(document: Document) -> bytes:
  """Returns a hash of inputs and text, 16 bytes."""
  digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  if document.inputs is not None:
    digest.update(_bytes(document.inputs) + b"\0")
  digest.update(_bytes(document.text))
  return digest.digest()


def find_duplicates(
  sketches: Sequence[Sketches], num_largest: int = 3
) -> Duplicates:
  """Returns the duplicates within and among sources.

  Args:
    sketches: sketches of each source.
    num_largest: how many of the largest groups to name, at most.
  """
  columns = zip(*(each.columns() for each in sketches), strict=True)
  digests, values, sizes, held_out = map(np.concatenate, columns)
  order = np.lexsort(digests.T)  # the order of the documents is lost here
  digests, held_out = digests[order], held_out[order]
  is_first = np.ones(len(order), bool)
  is_first[1:] = (digests[1:] != digests[:-1]).any(axis=1)
  text = np.cumsum(is_first) - 1
  first = order[is_first]
  digests, text_sizes = digests[is_first], sizes[first]
  copies = np.bincount(text)
  held_out_copies = np.bincount(text, held_out).astype(np.int64)
  is_trained = held_out_copies < copies

  group = _connect(values[first])
  group_size = np.bincount(group, minlength=len(first))
  largest_bytes = np.zeros(len(first), np.int64)
  np.maximum.at(largest_bytes, group, text_sizes)
  meets_training = np.bincount(group, is_trained) > 0
  near_across = ~is_trained & meets_training[group]

  def largest(counts: np.ndarray) -> list[Group]:
    indices = np.argsort(-counts, kind="stable")[:num_largest]
    return [
      Group(int(counts[i]), digests[i].tobytes())
      for i in indices
      if counts[i] > 1
    ]

  return Duplicates(
    num_texts=len(first),
    exact_documents=len(order) - len(first),
    exact_bytes=int(sizes.sum() - text_sizes.sum()),
    exact_across=int(held_out_copies[is_trained].sum()),
    near_groups=int((group_size > 1).sum()),
    near_texts=len(first) - int((group_size > 0).sum()),
    near_bytes=int(text_sizes.sum() - largest_bytes.sum()),
    near_across=int(held_out_copies[near_across].sum()),
    largest_exact=largest(copies),
    largest_near=largest(group_size),
  )


def _bytes(text: Text) -> bytes:
  return text.encode() if isinstance(text, str) else text.tobytes()


def _minhash(document: Document, digest: bytes) -> np.ndarray:
  """Returns the MinHash values of a document, [128], uint16.

  The smallest value of each of 128 linear functions mod 2 ** 32 of the runs'
  hashes, folded to 16 bits.
  """
  words = hash_document(document)
  if not len(words):
    return np.frombuffer(digest * (2 * _VALUES // _DIGEST_BYTES), np.uint16)
  runs = hash_ngrams(words, min(_RUN_WORDS, len(words))).astype(np.uint32)
  smallest = np.full(_VALUES, 0xFFFFFFFF, np.uint32)
  for start in range(0, len(runs), _RUNS_AT_ONCE):
    block = runs[start : start + _RUNS_AT_ONCE, np.newaxis] * _FACTORS
    block += _ADDENDS
    np.minimum(smallest, block.min(axis=0), out=smallest)
  return (smallest * 0x9E3779B1 >> 16).astype(np.uint16)


def _connect(values: np.ndarray) -> np.ndarray:
  """Returns the group of every text, [texts], int64: its first text's index.

  Args:
    values: MinHash values of each text, [texts, 128], uint16.
  """
  groups = np.arange(len(values))
  for one, other in _pairs_in_a_band(values):
    apart = groups[one] != groups[other]
    for a, b in _similar_pairs(values, one[apart], other[apart]):
      first, last = sorted((_find(groups, a), _find(groups, b)))
      groups[last] = first
    while not np.array_equal(further := groups[groups], groups):
      groups = further
  return groups


def _find(groups: np.ndarray, text: int) -> int:
  """Returns the first text of a group, and shortens the way to it."""
  while (parent := groups[text]) != text:
    groups[text] = groups[parent]
    text = parent
  return text


def _similar_pairs(
  values: np.ndarray, one: np.ndarray, other: np.ndarray
) -> Iterator[tuple[int, int]]:
  """Yields those pairs of [pairs] and [pairs] that share 0.8 of all values."""
  for start in range(0, len(one), _PAIRS_AT_ONCE):
    a = one[start : start + _PAIRS_AT_ONCE]
    b = other[start : start + _PAIRS_AT_ONCE]
    similar = (values[a] == values[b]).mean(axis=1) >= MIN_SIMILARITY
    yield from zip(a[similar].tolist(), b[similar].tolist(), strict=True)


def _pairs_in_a_band(
  values: np.ndarray,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields indices of texts that share a band, [pairs] and [pairs]."""
  for band in range(_BANDS):
    rows = values[:, band * _ROWS : (band + 1) * _ROWS]
    halves = np.ascontiguousarray(rows).view(np.uint64)
    keys = halves[:, 0] * 0xD1342543DE82EF95 + halves[:, 1]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    for distance in range(1, _NEIGHBORS + 1):
      near = np.flatnonzero(keys[distance:] == keys[:-distance])
      if not len(near):
        break
      yield order[near], order[near + distance]
