# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Words and n-grams of a text as 64-bit hashes.

The words are `text.lower().split()`, or token ids if a task makes ids. Equal
n-grams have equal hashes in every text and process. Two different n-grams share
a hash with a probability of about 2 ** -64.
"""

import functools
import re
from collections.abc import Iterator

import numpy as np

from palm_mtf.data.sources.document import Document, Text, mix_bits

# Text is hashed in blocks, cut at white space, because hashing takes about 50
# bytes of memory per character of a block. The hashes take 8 bytes per word.
_BLOCK_CHARACTERS = 1 << 18
_SPACE = re.compile(r"\s")  # the characters at which str.split() splits
_LAST_SPACE = 0x3000  # no higher code point is white space
# The factors are odd, so that multiplication mod 2 ** 64 is one to one.
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

  Args:
    words: hashes of the words, [num_words], uint64.
    n: number of words in an n-gram, at least 1.
  """
  count = max(0, len(words) - n + 1)
  hashes = np.full(count, n, np.uint64)  # so that hashes of different n differ
  for i in range(n):
    hashes *= _WORD_FACTOR
    hashes += words[i : i + count]
  return mix_bits(hashes)


def find_hashes(table: np.ndarray, hashes: np.ndarray) -> np.ndarray:
  """Returns the indices in `table` of the `hashes` that `table` contains.

  Args:
    table: distinct hashes, sorted, [table], uint64.
    hashes: hashes in any order, [hashes], uint64.
  """
  if not len(table):
    return np.empty(0, np.int64)
  hashes = np.sort(hashes)  # sorted hashes are found four times as fast
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
  # Ask for the same number of powers for every block, so that they are computed
  # once. Only a block that ends in a huge word needs more.
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
