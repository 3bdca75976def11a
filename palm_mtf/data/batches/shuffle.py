# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A random permutation of 0 .. size - 1, computed per element from a key.

The permutation is not stored, so every element takes the same time, and a huge
permutation takes no memory.
"""

import functools
import hashlib

import numpy as np

from palm_mtf.data.sources.document import mix_bits

_ROUNDS = 8  # rounds of the Feistel network; too few would leave a pattern
# Minimum number of bits in each half of the Feistel network's input, so that
# the network shuffles at least 256 values. Fewer would leave a pattern. More
# would make small shuffles slower: a value of at least `size` is mapped again,
# about 100 times if `size` is 2.
_MIN_HALF_BITS = 4
# If the network shuffles at most this many values, first compute a table of all
# outputs (at most 32 KB), so that to map a value again is only a look-up.
_MAX_TABLE = 1 << 12


def shuffle(index: np.ndarray, size: int, key: str) -> np.ndarray:
  """Returns the place of each element in the shuffle of 0 .. size - 1.

  Args:
    index: elements in 0 .. size - 1, [...], integer.
    size: number of elements that are shuffled, at least 1.
    key: seed of the shuffle.

  Returns:
    Places in 0 .. size - 1, one to one with the elements, [...], int64.
  """
  if size == 1:
    return np.zeros(index.shape, np.int64)
  # A Feistel network over the bits of the index is a bijection, whatever
  # function mixes its halves (Luby and Rackoff 1988).
  digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
  round_keys = np.frombuffer(digest, "<u8").astype(np.uint64)
  half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
  image_of = functools.partial(
    _feistel, half_bits=np.uint64(half_bits), round_keys=round_keys
  )
  num_values = 1 << (2 * half_bits)
  if num_values <= _MAX_TABLE:
    image_of = image_of(np.arange(num_values, dtype=np.uint64)).take
  image = image_of(index.astype(np.uint64))
  # The network shuffles 0 .. num_values - 1. While an image is at least `size`,
  # map the image again. With this "cycle walking" (Black and Rogaway 2002), the
  # map is still a bijection.
  while (outside := image >= size).any():
    image[outside] = image_of(image[outside])
  return image.astype(np.int64)


def shuffle_epochs(
  numbers: np.ndarray, size: int, key: str
) -> tuple[np.ndarray, np.ndarray]:
  """Reads an endless series of shuffles of 0 .. size - 1, one per epoch.

  `numbers` are indices in this series. Returns the epoch that each index falls
  in, and the element of 0 .. size - 1 at this index. All are [n], int64.
  """
  epochs, places = np.divmod(numbers, size)
  found = np.empty_like(places)
  for epoch in np.unique(epochs).tolist():
    inside = epochs == epoch
    found[inside] = shuffle(places[inside], size, f"{key} epoch {epoch}")
  return epochs, found


def _feistel(
  value: np.ndarray, half_bits: np.uint64, round_keys: np.ndarray
) -> np.ndarray:
  mask = (np.uint64(1) << half_bits) - np.uint64(1)
  left, right = value >> half_bits, value & mask
  for round_key in round_keys:
    left, right = right, left ^ (mix_bits(right ^ round_key) & mask)
  return (left << half_bits) | right
