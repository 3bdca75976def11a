# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds duplicates and contamination by 64-bit hashes of word n-grams.

The words are `text.lower().split()`, or token ids if a task makes ids. Equal
n-grams have equal hashes in every text and process. Two different n-grams share
a hash with a probability of about 2 ** -64.

Evaluation examples in training text are found by 8-grams (PaLM, section 8;
PaLM does not say what a gram is). An example is its inputs followed by its
text. A text contains an example if at least 70% of the example's 8-grams occur
in the text, however long it is. An example of fewer than 8 words has no 8-gram,
so nothing contains it. Memory: 24 bytes per 8-gram, 8 of them in `table`.

Exact duplicates have the same text. Near duplicates are different texts whose
sets of word 5-grams have a Jaccard similarity of about 0.8 or more. Pairs of
near duplicates are merged into groups. The probability that a pair is found:

  similarity    0.60   0.65   0.70   0.75   0.80   0.85   0.90   0.95
  probability  0.000  0.000  0.005  0.089  0.495  0.934  1.000  1.000

The order of the documents has no effect.
"""

import functools
import re
from collections.abc import Iterable, Iterator

import numpy as np

from palm_mtf.data.sources.document import Document, Text, mix_bits

# Text is hashed in blocks, cut at white space, because hashing takes about 50
# bytes of memory per character of a block. The hashes take 8 bytes per word.
_BLOCK_CHARACTERS = 1 << 18
_SPACE = re.compile(r"\s")  # the characters at which str.split() splits
_LAST_SPACE = 0x3000  # highest white-space code point; see `_space_table`
# Hashes are polynomials in these factors, mod 2 ** 64. The factors are odd, so
# that a multiplication loses no bits and has an inverse.
_CHARACTER_FACTOR = 0x9E3779B97F4A7C15
_WORD_FACTOR = 0xD1342543DE82EF95


def hash_document(document: Document) -> np.ndarray:
  """Returns a hash of each word, [num_words], uint64; inputs come first."""
  words = hash_words(document.text)
  if document.inputs is None:
    return words
  return np.concatenate([hash_words(document.inputs), words])


def hash_words(text: Text) -> np.ndarray:
  """Returns a hash of each word or token id in `text`, [num_words], uint64."""
  if isinstance(text, np.ndarray):
    return mix_bits(text.astype(np.uint64))
  blocks = [_hash_block(block) for block in _cut_blocks(text)]
  return np.concatenate([np.empty(0, np.uint64), *blocks])


def hash_ngrams(words: np.ndarray, n: int) -> np.ndarray:
  """Returns a hash of each n-gram, [max(0, num_words - n + 1)], uint64.

  `words` has the hashes of the words, [num_words], uint64; n is at least 1.
  """
  count = max(0, len(words) - n + 1)
  hashes = np.full(count, n, np.uint64)  # so that hashes of different n differ
  for i in range(n):
    hashes *= _WORD_FACTOR
    hashes += words[i : i + count]
  return mix_bits(hashes)


def _cut_blocks(text: str) -> Iterator[str]:
  start = 0
  while start < len(text):
    space = _SPACE.search(text, start + _BLOCK_CHARACTERS)
    end = space.start() if space else len(text)
    yield text[start:end]
    start = end


def _hash_block(block: str) -> np.ndarray:
  # A word's hash is `mix_bits` of the sum of (character[i] + 1) *
  # _CHARACTER_FACTOR ** i, mod 2 ** 64.
  content = block.lower().encode("utf-32-le")
  characters = np.frombuffer(content, "<u4")
  is_space = _space_table()[np.minimum(characters, _LAST_SPACE + 1)]
  before = np.concatenate([[True], is_space[:-1]])
  starts = np.flatnonzero(before & ~is_space)
  if not len(starts):
    return np.empty(0, np.uint64)
  # `_powers` caches only its latest result, so ask for as many powers in every
  # block. Only a block that ends in a huge word needs more powers.
  size = max(2 * _BLOCK_CHARACTERS, 1 << len(characters).bit_length())
  powers, inverses = _powers(size)
  terms = characters + np.uint64(1)
  terms[is_space] = 0
  terms *= powers[: len(terms)]
  # In the sums of reduceat, exponents count from the start of the block. An
  # inverse power makes them count from the start of the word.
  return mix_bits(np.add.reduceat(terms, starts) * inverses[starts])


@functools.cache
def _space_table() -> np.ndarray:
  """Returns whether each character is white space, [_LAST_SPACE + 2], bool."""
  return np.array([chr(i).isspace() for i in range(_LAST_SPACE + 2)])


@functools.lru_cache(maxsize=1)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns [count] powers of _CHARACTER_FACTOR, and of its inverse; uint64."""
  inverse = pow(_CHARACTER_FACTOR, -1, 1 << 64)
  powers = np.full((2, count), 1, np.uint64)
  powers[0, 1:], powers[1, 1:] = _CHARACTER_FACTOR, inverse
  np.cumprod(powers, axis=1, out=powers)
  return powers[0], powers[1]


_EXAMPLE_WORDS = 8  # per n-gram of an example
_MIN_SHARE = 0.7


class ContainedExamples:
  """Finds evaluation examples in documents and texts by their 8-grams."""

  def __init__(self, examples: Iterable[Document]):
    ngrams = [np.empty(0, np.uint64)]  # at least one array, for concatenate
    ngrams += [hash_ngrams(hash_document(x), _EXAMPLE_WORDS) for x in examples]
    self._counts = np.array([len(each) for each in ngrams], np.int64)
    self.num_examples = len(ngrams) - 1
    # Number of examples of fewer than 8 words, without the empty array.
    self.num_short = int((self._counts == 0).sum()) - 1
    # Hashes of distinct 8-grams, sorted, which `find_ngrams` looks up.
    self.table, index = np.unique(np.concatenate(ngrams), return_inverse=True)
    # _owners[_starts[i] : _starts[i + 1]]: the examples with 8-gram table[i].
    by_ngram = np.argsort(index, kind="stable")
    self._owners = np.repeat(np.arange(len(ngrams)), self._counts)[by_ngram]
    self._starts = np.searchsorted(
      index[by_ngram], np.arange(len(self.table) + 1)
    )

  def any_in(self, found: np.ndarray) -> bool:
    """Returns whether a document contains an example.

    `found` has the distinct indices of the document's 8-grams in `table`.
    """
    if not len(found):
      return False
    spans = zip(self._starts[found], self._starts[found + 1], strict=True)
    owners = np.concatenate([self._owners[a:b] for a, b in spans])
    examples, hits = np.unique(owners, return_counts=True)
    return bool((hits / self._counts[examples] >= _MIN_SHARE).any())

  def contained(self, found: np.ndarray) -> np.ndarray:
    """Returns which examples a text contains, [examples], bool.

    `found` says whether the text has each 8-gram of `table`, [ngrams], bool.
    """
    hits = np.bincount(
      self._owners,
      np.repeat(found, np.diff(self._starts)),
      minlength=len(self._counts),
    )
    shares = hits / np.maximum(1, self._counts)
    return shares[1:] >= _MIN_SHARE  # index 0 is the empty array, no example


def find_ngrams(table: np.ndarray, document: Document) -> np.ndarray:
  """Returns the indices in `table` of a document's 8-grams: distinct, sorted.

  `table` has the hashes of 8-grams, distinct and sorted, [ngrams], uint64.
  """
  if not len(table):
    return np.empty(0, np.int64)
  # Sorted, because this makes searchsorted 4 times as fast.
  ngrams = np.sort(hash_ngrams(hash_document(document), _EXAMPLE_WORDS))
  places = np.searchsorted(table, ngrams)
  places[places == len(table)] = 0
  return np.unique(places[table[places] == ngrams])


_MIN_SIMILARITY = 0.8
_NGRAM_WORDS = 5  # for near duplicates; a text of fewer words is one n-gram
# MinHash (Broder 1997): two texts of similarity J share each MinHash value with
# probability J. Two texts are compared if they share all values of a band.
_BANDS, _ROWS = 16, 8  # number of bands, and of MinHash values per band
NUM_VALUES = _BANDS * _ROWS
# Per band, a text is compared with at most this many texts that share its
# values. Only a huge group has more, and fewer comparisons suffice to merge it.
_NEIGHBORS = 32
_PAIRS_AT_ONCE = 1 << 16
_NGRAMS_AT_ONCE = 256  # 256 x NUM_VALUES uint32 values fit in a core's cache

# A MinHash value is the minimum of factor * x + addend mod 2 ** 32 over the
# hashes x of a text's n-grams. The factors and addends are hashes of 0, 1, ...:
# fixed numbers without a pattern.
_FACTORS, _ADDENDS = (
  hash_words(np.arange(2 * NUM_VALUES)).astype(np.uint32).reshape(2, NUM_VALUES)
)
_FACTORS |= 1  # odd, so that factor * x + addend is one to one


def begins_run(rows: np.ndarray) -> np.ndarray:
  """Returns whether each row begins a run of equal rows, [rows], bool."""
  begins = np.ones(len(rows), bool)
  begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
  return begins


def minhash(document: Document, digest: bytes) -> np.ndarray:
  """Returns the MinHash values of a document, [NUM_VALUES], uint16.

  A document without words has no n-grams. Its values repeat `digest`, the hash
  of its text, so that it is a near duplicate of no other text.
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
  # Keep 16 bits. Mix them first, because a minimum's highest bits are often 0.
  return (smallest * 0x9E3779B1 >> 16).astype(np.uint16)


def group_similar(values: np.ndarray) -> np.ndarray:
  """Returns each text's group: the index of the group's first text, [texts].

  `values` are MinHash values, [texts, NUM_VALUES], uint16. If texts are sorted
  by hash, the groups do not depend on the order of documents.
  """
  # Union-find: groups[text] is the text itself or an earlier text of its group.
  groups = np.arange(len(values))
  for one, other in _pairs_in_a_band(values):
    apart = groups[one] != groups[other]
    for a, b in _similar_pairs(values, one[apart], other[apart]):
      first, last = sorted((_find_first(groups, a), _find_first(groups, b)))
      groups[last] = first
    # Let every text point to its group's first text.
    while not np.array_equal(further := groups[groups], groups):
      groups = further
  return groups


def _find_first(groups: np.ndarray, text: int) -> int:
  while (parent := groups[text]) != text:
    groups[text] = groups[parent]
    text = parent
  return text


def _similar_pairs(
  values: np.ndarray, one: np.ndarray, other: np.ndarray
) -> Iterator[tuple[int, int]]:
  """Yields similar pairs (one[i], other[i])."""
  for start in range(0, len(one), _PAIRS_AT_ONCE):
    a = one[start : start + _PAIRS_AT_ONCE]
    b = other[start : start + _PAIRS_AT_ONCE]
    similar = (values[a] == values[b]).mean(axis=1) >= _MIN_SIMILARITY
    yield from zip(a[similar].tolist(), b[similar].tolist(), strict=True)


def _pairs_in_a_band(
  values: np.ndarray,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (one, other): texts one[i], other[i] share all values of a band."""
  for band in range(_BANDS):
    rows = values[:, band * _ROWS : (band + 1) * _ROWS]
    # Hash the 16 bytes of each text's band into a key. Sorting then puts texts
    # with the same band next to each other.
    halves = np.ascontiguousarray(rows).view(np.uint64)
    keys = halves[:, 0] * 0xD1342543DE82EF95 + halves[:, 1]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    for distance in range(1, _NEIGHBORS + 1):
      near = np.flatnonzero(keys[distance:] == keys[:-distance])
      if not len(near):
        break
      yield order[near], order[near + distance]
