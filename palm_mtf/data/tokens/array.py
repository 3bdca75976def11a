# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays of .npy files, mapped without a file descriptor each.

np.memmap keeps one open for each array: a store of many shards would have more
than a process may (`ulimit -n`).

The tokens of one split: arrays on disk, mapped, read like one array.
"""

import ctypes
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = (
  ctypes.c_void_p,
  ctypes.c_size_t,
  *(ctypes.c_int,) * 3,
  ctypes.c_long,
)
_C.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_C.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def map_array(path: str, *, is_random: bool = False) -> np.ndarray:
  """Returns the array of a .npy file; its pages are read when they are used.

  Args:
    path: path of the file.
    is_random: whether nothing is read ahead, where what is used is small and
      lies anywhere.

  Raises:
    OSError: the file cannot be mapped.
    ValueError: it has no header of an array.
  """
  with open(path, "rb") as file:
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    begin, count = file.tell(), math.prod(shape)
    if not count:  # nothing cannot be mapped
      return np.empty(shape, dtype)
    num_bytes = begin + count * dtype.itemsize
    content = _map(file.fileno(), num_bytes, path, is_random)
  values = np.frombuffer(content, dtype, count, begin).reshape(shape)
  values.flags.writeable = False  # a page of the file, mapped to be read
  return values


def _map(
  descriptor: int, num_bytes: int, path: str, is_random: bool
) -> ctypes.Array:
  if os.fstat(descriptor).st_size < num_bytes:
    raise ValueError(f"{path} is cut short")  # to read beyond is a signal
  address = _C.mmap(
    None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0
  )
  if address == _FAILED:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)
  if is_random:
    # Advice: a system that does not know it reads ahead.
    _C.madvise(address, num_bytes, mmap.MADV_RANDOM)
  content = (ctypes.c_char * num_bytes).from_address(address)
  release = weakref.finalize(content, _C.munmap, address, num_bytes)
  # At the end of the process a thread may still read.
  release.atexit = False
  return content


class Shard(NamedTuple):
  """Whole documents, joined."""

  tokens: np.ndarray  # [num_tokens], uint16 or uint32; [eod] ends each document
  # Where in `tokens` the targets of each document begin, and where it ends,
  # behind its [eod], [2, num_documents], int64.
  documents: np.ndarray
  has_inputs: bool = False  # whether documents are examples: targets are learnt


class TokenArray:
  """Shards read as one array of tokens."""

  def __init__(self, shards: Sequence[Shard]):
    """Joins `shards`, in their order."""
    self._shards = [shard for shard in shards if len(shard.tokens)]
    lengths = [len(shard.tokens) for shard in self._shards]
    self._starts = np.cumsum([0, *lengths])  # of each shard, and the end
    counts = [shard.documents.shape[1] for shard in self._shards]
    self._first_documents = np.cumsum([0, *counts])  # and the end

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def has_inputs(self) -> bool:
    """Whether the documents are examples, of which targets alone are learnt."""
    return any(shard.has_inputs for shard in self._shards)

  @property
  def num_documents(self) -> int:
    """Documents of all shards, repeats included."""
    return int(self._first_documents[-1])

  def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens from `start` to before `stop`, across shards.

    Returns:
      tokens: [stop - start], int32.
      is_target: [stop - start], bool: whether each token is learnt.
    """
    tokens = np.empty(stop - start, np.int32)
    is_target = np.ones(stop - start, bool)
    number = int(np.searchsorted(self._starts, start, side="right")) - 1
    done = 0
    while done < len(tokens):
      shard, first = self._shards[number], start + done - self._starts[number]
      # The disk is read here: pages of this part alone.
      part = shard.tokens[first : first + len(tokens) - done]
      tokens[done : done + len(part)] = part
      if shard.has_inputs:
        is_target[done : done + len(part)] = _is_target(
          shard.documents, first, first + len(part)
        )
      done += len(part)
      number += 1
    return tokens, is_target

  def extents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where documents begin, and where they end, behind their [eod].

    Args:
      documents: numbers of documents, in any order, [n], int64.

    Returns:
      Two arrays [n], int64.
    """
    begins, ends = np.empty_like(documents), np.empty_like(documents)
    shards = np.searchsorted(self._first_documents, documents, "right") - 1
    # Sorted by shard, so that each shard's array is read once.
    order = np.argsort(shards, kind="stable")
    for number, mine in _runs(shards[order]):
      mine = order[mine]
      local = documents[mine] - self._first_documents[number]
      end = self._shards[number].documents[1]
      begins[mine] = np.where(local > 0, end[local - 1], 0)
      begins[mine] += self._starts[number]
      ends[mine] = end[local] + self._starts[number]
    return begins, ends

  def spans(self) -> np.ndarray:
    """Returns where every document is, in 24 bytes of memory for each.

    Returns:
      [num_documents, 3], int64: where a document begins, where its targets
      begin, and where it ends, behind its [eod].
    """
    spans = []
    for shard, start in zip(self._shards, self._starts, strict=False):
      targets, ends = shard.documents
      begins = np.concatenate([[0], ends[:-1]])
      spans.append(np.stack([begins, targets, ends], axis=1) + start)
    return np.concatenate(spans) if spans else np.empty([0, 3], np.int64)


def _runs(values: np.ndarray) -> Iterator[tuple[int, slice]]:
  """Yields the value and the place of every run of equal values."""
  edges = np.flatnonzero(np.diff(values)) + 1
  for first, stop in itertools.pairwise([0, *edges.tolist(), len(values)]):
    if first < stop:
      yield int(values[first]), slice(first, stop)


def _is_target(documents: np.ndarray, start: int, stop: int) -> np.ndarray:
  targets, ends = documents
  # Examples that reach into start .. stop - 1: the first that ends behind
  # `start`, to the last whose targets begin before `stop`.
  first = int(np.searchsorted(ends, start, side="right"))
  last = int(np.searchsorted(targets, stop, side="left"))
  is_target = np.zeros(stop - start, bool)
  for begin, end in zip(targets[first:last], ends[first:last], strict=True):
    is_target[max(begin - start, 0) : end - start] = True
  return is_target
