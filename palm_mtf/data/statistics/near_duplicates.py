# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Exact and near duplicates among documents, found in one pass.

Exact duplicates have the same text. Near duplicates are different texts whose
sets of word 5-grams have a Jaccard similarity of about 0.8 or more. Pairs of
near duplicates are merged into groups. The probability that a pair is found:

  similarity    0.60   0.65   0.70   0.75   0.80   0.85   0.90   0.95
  probability  0.000  0.000  0.005  0.089  0.495  0.934  1.000  1.000

The order of the documents has no effect. Memory: 281 bytes per document of any
length, and some 900 more while groups are made.
"""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.sources.document import VALIDATION, Document
from palm_mtf.data.statistics.ngrams import (
  hash_document,
  hash_ngrams,
  hash_words,
)

MIN_SIMILARITY = 0.8
_NGRAM_WORDS = 5  # a text of fewer words is one n-gram
# MinHash (Broder 1997): two texts of similarity J share each MinHash value with
# probability J. Two texts are compared if they share all values of a band.
_BANDS, _ROWS = 16, 8  # number of bands, and of values per band
NUM_VALUES = _BANDS * _ROWS
# Maximum number of comparisons per text and band. Only huge groups have more
# pairs, and a part of the pairs suffices to merge such a group.
_NEIGHBORS = 32
_PAIRS_AT_ONCE = 1 << 16
_NGRAMS_AT_ONCE = 256  # 256 x 128 values fit into a core's cache

# A MinHash value is the minimum of factor * x + addend mod 2 ** 32 over the
# hashes x of a text's n-grams. Factors and addends are hashes, because hashes
# have no pattern.
_FACTORS, _ADDENDS = (
  hash_words(np.arange(2 * NUM_VALUES)).astype(np.uint32).reshape(2, NUM_VALUES)
)
_FACTORS |= 1  # odd, so that factor * x + addend is one to one


class Group(NamedTuple):
  """Documents with the same text, or texts that are near duplicates."""

  size: int  # number of these documents, or of these texts
  digest: bytes  # Document.digest() of one member, in any order of documents


@dataclasses.dataclass(frozen=True)
class Duplicates:
  """The number and size of duplicates in a corpus, and the largest groups."""

  num_texts: int  # different texts
  exact_documents: int  # all documents minus one per text
  exact_bytes: int  # size of these documents
  exact_across: int  # held-out documents with the text of a training document
  near_groups: int  # groups of two or more different texts
  near_texts: int  # texts in these groups, minus one per group
  near_bytes: int  # size of the groups' texts, minus the largest per group
  # Held-out documents in a group with a training document, except the documents
  # that exact_across counts.
  near_across: int
  largest_exact: list[Group]  # texts with the most documents, at least 2
  largest_near: list[Group]  # groups with the most texts, at least 2


class Sketches:
  """The hash, MinHash values, size and split of each document of a source."""

  def __init__(self):
    self._digests = bytearray()
    self._values = bytearray()
    self._sizes = array("q")
    self._held_out = bytearray()

  def add(self, document: Document, split: str) -> None:
    """Adds a document of `split`."""
    digest = document.digest()
    self._digests += digest
    self._values += minhash(document, digest).tobytes()
    self._sizes.append(document.num_bytes)
    self._held_out.append(split == VALIDATION)

  def columns(self) -> tuple[np.ndarray, ...]:
    """Returns digests, MinHash values, sizes, and which documents are held out.

    Each array has an entry per document. The arrays are views: while they
    exist, `add` fails.
    """
    return (
      np.frombuffer(self._digests, np.uint64).reshape(-1, 2),
      np.frombuffer(self._values, np.uint16).reshape(-1, NUM_VALUES),
      np.frombuffer(self._sizes, np.int64),
      np.frombuffer(self._held_out, np.bool_),
    )


def find_duplicates(
  sketches: Sequence[Sketches], num_largest: int = 3
) -> Duplicates:
  """Returns the duplicates within and across sources.

  `largest_exact` and `largest_near` have at most `num_largest` groups.
  """
  columns = zip(*(each.columns() for each in sketches), strict=True)
  digests, values, sizes, held_out = map(np.concatenate, columns)
  # Sort by digest, so that equal texts become neighbors and the result does not
  # depend on the order of documents. Below, texts are numbered in this order.
  order = np.lexsort(digests.T)
  digests, held_out = digests[order], held_out[order]
  is_first = begins_run(digests)
  text = np.cumsum(is_first) - 1
  first = order[is_first]
  digests, text_sizes = digests[is_first], sizes[first]
  copies = np.bincount(text)
  held_out_copies = np.bincount(text, held_out).astype(np.int64)
  is_trained = held_out_copies < copies

  group = group_similar(values[first])
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


def begins_run(rows: np.ndarray) -> np.ndarray:
  """Returns whether each row differs from the row before, [rows], bool."""
  begins = np.ones(len(rows), bool)
  begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
  return begins


def minhash(document: Document, digest: bytes) -> np.ndarray:
  """Returns the MinHash values of a document, [NUM_VALUES], uint16.

  Without words, a document is no near duplicate: returns `digest`, repeated.
  """
  words = hash_document(document)
  if not len(words):
    return np.frombuffer(digest * (2 * NUM_VALUES // len(digest)), np.uint16)
  ngrams = hash_ngrams(words, min(_NGRAM_WORDS, len(words))).astype(np.uint32)
  smallest = np.full(NUM_VALUES, 0xFFFFFFFF, np.uint32)
  for start in range(0, len(ngrams), _NGRAMS_AT_ONCE):
    block = ngrams[start : start + _NGRAMS_AT_ONCE, np.newaxis] * _FACTORS
    block += _ADDENDS
    np.minimum(smallest, block.min(axis=0), out=smallest)
  # The highest bits of a minimum are often 0. So mix the bits, then keep 16.
  return (smallest * 0x9E3779B1 >> 16).astype(np.uint16)


def group_similar(values: np.ndarray) -> np.ndarray:
  """Returns each text's group: the index of the group's first text, [texts].

  Args:
    values: MinHash values of each text, [texts, NUM_VALUES], uint16. If texts
      are sorted by hash, the groups do not depend on the order of documents.
  """
  # Union-find: groups[text] is the text itself or an earlier text of its group.
  groups = np.arange(len(values))
  for one, other in _pairs_in_a_band(values):
    apart = groups[one] != groups[other]
    for a, b in _similar_pairs(values, one[apart], other[apart]):
      first, last = sorted((_find_first(groups, a), _find_first(groups, b)))
      groups[last] = first
    while not np.array_equal(further := groups[groups], groups):
      groups = further  # until every text points to its group's first text
  return groups


def _find_first(groups: np.ndarray, text: int) -> int:
  """Returns the first text in the group of `text`; shortens the path to it."""
  while (parent := groups[text]) != text:
    groups[text] = groups[parent]
    text = parent
  return text


def _similar_pairs(
  values: np.ndarray, one: np.ndarray, other: np.ndarray
) -> Iterator[tuple[int, int]]:
  """Yields the pairs (one[i], other[i]) that have MIN_SIMILARITY or more."""
  for start in range(0, len(one), _PAIRS_AT_ONCE):
    a = one[start : start + _PAIRS_AT_ONCE]
    b = other[start : start + _PAIRS_AT_ONCE]
    similar = (values[a] == values[b]).mean(axis=1) >= MIN_SIMILARITY
    yield from zip(a[similar].tolist(), b[similar].tolist(), strict=True)


def _pairs_in_a_band(
  values: np.ndarray,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (one, other): texts one[i], other[i] share all values of a band."""
  for band in range(_BANDS):
    rows = values[:, band * _ROWS : (band + 1) * _ROWS]
    # Hash the two halves of a text's band into one key, and sort texts by key.
    halves = np.ascontiguousarray(rows).view(np.uint64)
    keys = halves[:, 0] * 0xD1342543DE82EF95 + halves[:, 1]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    for distance in range(1, _NEIGHBORS + 1):
      near = np.flatnonzero(keys[distance:] == keys[:-distance])
      if not len(near):
        break
      yield order[near], order[near + distance]
