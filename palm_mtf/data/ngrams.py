# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds duplicates and contamination by 64-bit hashes of word n-grams.

The words are `text.lower().split()`, or token ids if a task makes ids. Equal
n-grams have equal hashes in every text and process. Two different n-grams share
a hash with a probability of about 2 ** -64.

Evaluation examples in training text are found by 8-grams (PaLM, section 8;
PaLM does not say what a gram is). An example is its inputs followed by its
text:

ContaminationSearch: which examples are contaminated? At least 70% of such an
example's 8-grams occur anywhere in the training text.

ContainedExamples: does a document contain any example, and which examples does
a text contain? At least 70% of such an example's 8-grams occur in the document
or text, however long it is. An example of fewer than 8 words has no 8-gram, so
nothing contains it. Memory: 24 bytes per 8-gram, 8 of them in `table`.

Exact duplicates have the same text. Near duplicates are different texts whose
sets of word 5-grams have a Jaccard similarity of about 0.8 or more. Pairs of
near duplicates are merged into groups. The probability that a pair is found:

  similarity    0.60   0.65   0.70   0.75   0.80   0.85   0.90   0.95
  probability  0.000  0.000  0.005  0.089  0.495  0.934  1.000  1.000

The order of the documents has no effect. Memory: 281 bytes per document of any
length, and some 900 more while groups are made.
"""

import dataclasses
import functools
import heapq
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.sources.document import VALIDATION, Document, Text, mix_bits

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


def find_hashes(table: np.ndarray, hashes: np.ndarray) -> np.ndarray:
  """Returns the indices in `table` of the `hashes` that `table` contains.

  Both are [n], uint64; the hashes of `table` are distinct and sorted.
  """
  if not len(table):
    return np.empty(0, np.int64)
  hashes = np.sort(hashes)  # makes searchsorted 4 times as fast
  places = np.searchsorted(table, hashes)
  places[places == len(table)] = 0
  return places[table[places] == hashes]


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


NGRAM_WORDS = 8
MIN_SHARE = 0.7
# Number of n-grams (13 MB of text, 136 MB of memory) that Examples keeps. If an
# evaluation set has more, Examples keeps a random sample of the examples.
_MAX_NGRAMS = 1 << 21


@dataclasses.dataclass(frozen=True)
class Contamination:
  """How many examples an evaluation set has, and how many are contaminated."""

  examples: int
  judged: int  # examples whose n-grams were searched for: all, or a sample
  # `judged` examples of fewer than 8 words, counted separately because short
  # examples often occur in the training text by chance.
  short: int
  contaminated: int
  contaminated_short: int
  ngram_share: float  # share of `judged` examples' n-grams that was found


class Examples:
  """The n-grams of an evaluation set, or of a random sample of its examples."""

  def __init__(self, max_ngrams: int = _MAX_NGRAMS):
    """Keeps examples up to `max_ngrams` n-grams in all, but at least one."""
    self.count = 0  # number of examples added
    self._max_ngrams = max_ngrams
    self._num_ngrams = 0
    # A heap of (-Document.rank, number of the example, number of words, hashes
    # of n-grams). The sample is the examples of the lowest ranks, so that the
    # order in which examples are added has no effect.
    self.kept: list[tuple[float, int, int, np.ndarray]] = []
    self._limit = 2.0  # examples of this rank or above are not in the sample

  def add(self, example: Document) -> None:
    """Counts an example; keeps its n-grams if it belongs to the sample."""
    self.count += 1
    if example.rank >= self._limit:
      return
    words = hash_document(example)
    # An example of fewer than 8 words has one n-gram, with all its words. An
    # example without words has no n-gram, and is never contaminated.
    ngrams = hash_ngrams(words, max(1, min(NGRAM_WORDS, len(words))))
    item = (-example.rank, self.count, len(words), ngrams)
    heapq.heappush(self.kept, item)
    self._num_ngrams += len(ngrams)
    while self._num_ngrams > self._max_ngrams and len(self.kept) > 1:
      rank, _, _, ngrams = heapq.heappop(self.kept)
      self._num_ngrams -= len(ngrams)
      self._limit = min(self._limit, -rank)


class ContaminationSearch:
  """A search for the n-grams of an evaluation set in the training text.

  The memory that it takes does not grow with the training text.
  """

  def __init__(self, examples: Examples):
    """Copies `examples`; examples that are added later are ignored."""
    self._num_examples = examples.count
    self._words = np.array([words for _, _, words, _ in examples.kept], int)
    ngrams = [ngrams for _, _, _, ngrams in examples.kept]
    self._counts = np.array([len(each) for each in ngrams], np.int64)
    # _ngrams has each different n-gram once, sorted. _ngrams[_places] are the
    # n-grams of all examples, one after another.
    self._ngrams, self._places = np.unique(
      np.concatenate([np.empty(0, np.uint64), *ngrams]), return_inverse=True
    )
    self._found = np.zeros(len(self._ngrams), bool)
    lengths = np.minimum(self._words, NGRAM_WORDS)
    self._lengths = np.unique(lengths[lengths > 0]).tolist()

  def add(self, document: Document) -> None:
    """Looks for the evaluation set's n-grams in one training document."""
    if not self._lengths:
      return
    words = hash_document(document)
    for n in self._lengths:
      self._found[find_hashes(self._ngrams, hash_ngrams(words, n))] = True

  def result(self) -> Contamination:
    """Returns how many examples the documents passed to `add` contaminate."""
    found = self._found[self._places]
    ends = np.cumsum(self._counts)
    hits = np.concatenate([[0], np.cumsum(found)])
    shares = np.diff(hits[[0, *ends]]) / np.maximum(1, self._counts)
    contaminated = shares >= MIN_SHARE
    short = self._words < NGRAM_WORDS
    return Contamination(
      examples=self._num_examples,
      judged=len(self._words),
      short=int(short.sum()),
      contaminated=int(contaminated.sum()),
      contaminated_short=int((contaminated & short).sum()),
      ngram_share=float(found.sum() / max(1, len(found))),
    )


class ContainedExamples:
  """Finds evaluation examples in documents and texts by their 8-grams."""

  def __init__(self, examples: Iterable[Document]):
    ngrams = [np.empty(0, np.uint64)]  # at least one array, for concatenate
    ngrams += [hash_ngrams(hash_document(x), NGRAM_WORDS) for x in examples]
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
    return bool((hits / self._counts[examples] >= MIN_SHARE).any())

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
    return shares[1:] >= MIN_SHARE  # index 0 is the empty array, no example


def find_ngrams(table: np.ndarray, document: Document) -> np.ndarray:
  """Returns the indices in `table` of a document's 8-grams: distinct, sorted.

  `table` has the hashes of 8-grams, distinct and sorted, [ngrams], uint64.
  """
  ngrams = hash_ngrams(hash_document(document), NGRAM_WORDS)
  return np.unique(find_hashes(table, ngrams))


MIN_SIMILARITY = 0.8
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


class Group(NamedTuple):
  """Documents with the same text, or texts that are near duplicates."""

  # Number of documents with the same text, or of near-duplicate texts.
  size: int
  # Document.digest() of one document, by which a command finds a text to show.
  digest: bytes


@dataclasses.dataclass(frozen=True)
class Duplicates:
  """The number and size of duplicates in a corpus, and the largest groups."""

  num_texts: int  # number of different texts
  exact_documents: int  # documents, except one for each different text
  exact_bytes: int  # size of the documents that exact_documents counts
  exact_across: int  # held-out documents with the text of a training document
  near_groups: int  # groups of near duplicates: two or more different texts
  near_texts: int  # texts in near groups, except one per group
  near_bytes: int  # size of texts in near groups, except each group's largest
  # Held-out documents in a near group with a training document, except the
  # documents that exact_across counts.
  near_across: int
  largest_exact: list[Group]  # texts with the most documents, at least 2
  largest_near: list[Group]  # near groups with the most texts, at least 2


class Sketches:
  """Keeps each document's hashes, size and split for `find_duplicates`."""

  def __init__(self):
    self._digests = bytearray()
    self._values = bytearray()
    self._sizes = array("q")
    self._held_out = bytearray()

  def add(self, document: Document, split: str) -> None:
    """Adds a document that `find_duplicates` compares; `split`: see SPLITS."""
    digest = document.digest()
    self._digests += digest
    self._values += minhash(document, digest).tobytes()
    self._sizes.append(document.num_bytes)
    self._held_out.append(split == VALIDATION)

  def columns(self) -> tuple[np.ndarray, ...]:
    """Returns digests, MinHash values, sizes in bytes, and whether held out.

    Each array has an item per document. The arrays are views: while they exist,
    `add` raises BufferError, because it would move the memory.
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
  # depend on the order of documents. Texts are numbered in the sorted order.
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
  """Yields pairs (one[i], other[i]) that share MIN_SIMILARITY of the values."""
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
