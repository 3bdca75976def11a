# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one split: memory-mapped .npy files, read like one array."""

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
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


class Shard(NamedTuple):
  """The tokens of whole documents, joined."""

  tokens: np.ndarray  # [num_tokens], uint16 or uint32; [eod] ends each document
  # [2, num_documents], int64: the index in `tokens` of each document's first
  # target, and the index after its [eod].
  documents: np.ndarray
  has_inputs: bool = False  # whether documents have inputs and targets


class TokenArray:
  """Shards read as one array of tokens."""

  def __init__(self, shards: Sequence[Shard]):
    self._shards = [shard for shard in shards if len(shard.tokens)]
    lengths = [len(shard.tokens) for shard in self._shards]
    # Index of each shard's first token, then the total; likewise for documents.
    self._starts = np.cumsum([0, *lengths])
    counts = [shard.documents.shape[1] for shard in self._shards]
    self._first_documents = np.cumsum([0, *counts])

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def has_inputs(self) -> bool:
    """Whether documents have inputs, which have no loss, and targets."""
    return any(shard.has_inputs for shard in self._shards)

  @property
  def num_documents(self) -> int:
    """Number of documents in all shards, repeats included."""
    return int(self._first_documents[-1])

  def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens `start` to `stop` - 1, across shards.

    Returns:
      tokens: [stop - start], int32.
      is_target: [stop - start], bool: whether each token has a loss.
    """
    tokens = np.empty(stop - start, np.int32)
    is_target = np.ones(stop - start, bool)
    number = int(np.searchsorted(self._starts, start, side="right")) - 1
    done = 0
    while done < len(tokens):
      shard, first = self._shards[number], start + done - self._starts[number]
      # Only this line reads tokens from disk, in pages.
      part = shard.tokens[first : first + len(tokens) - done]
      tokens[done : done + len(part)] = part
      if shard.has_inputs:
        is_target[done : done + len(part)] = _find_targets(
          shard.documents, first, first + len(part)
        )
      done += len(part)
      number += 1
    return tokens, is_target

  def extents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where documents, given by their indices, begin and end.

    Returns:
      Two arrays, [n], int64: the index of each document's first token, and the
      index after its [eod].
    """
    begins, ends = np.empty_like(documents), np.empty_like(documents)
    shards = np.searchsorted(self._first_documents, documents, "right") - 1
    # Sort the documents by shard, so that each shard's array is read once.
    order = np.argsort(shards, kind="stable")
    edges = np.flatnonzero(np.diff(shards[order])) + 1
    for mine in filter(len, np.split(order, edges)):
      number = shards[mine[0]]
      local = documents[mine] - self._first_documents[number]
      end = self._shards[number].documents[1]
      begins[mine] = np.where(local > 0, end[local - 1], 0)
      begins[mine] += self._starts[number]
      ends[mine] = end[local] + self._starts[number]
    return begins, ends

  def spans(self) -> np.ndarray:
    """Returns where every document is; takes 24 bytes of memory per document.

    Returns:
      [num_documents, 3], int64: the index of each document's first token, of
      its first target, and the index after its [eod].
    """
    spans = []
    for shard, start in zip(self._shards, self._starts, strict=False):
      targets, ends = shard.documents
      begins = np.concatenate([[0], ends[:-1]])
      spans.append(np.stack([begins, targets, ends], axis=1) + start)
    return np.concatenate(spans) if spans else np.empty([0, 3], np.int64)


def _find_targets(documents: np.ndarray, start: int, stop: int) -> np.ndarray:
  """Returns which tokens from `start` to `stop` - 1 are targets, bool."""
  targets, ends = documents
  # Only documents `first` to `last` - 1 have targets in this range: documents
  # that end after `start` and whose targets begin before `stop`.
  first = int(np.searchsorted(ends, start, side="right"))
  last = int(np.searchsorted(targets, stop, side="left"))
  is_target = np.zeros(stop - start, bool)
  for begin, end in zip(targets[first:last], ends[first:last], strict=True):
    is_target[max(begin - start, 0) : end - start] = True
  return is_target


def map_array(path: str, *, is_random: bool = False) -> np.ndarray:
  """Memory-maps the array in a .npy file; a page is read when it is used.

  The array keeps no file open. np.memmap keeps one file open per array, so that
  a store of many shards would exceed the limit of open files (`ulimit -n`).

  Args:
    is_random: whether small parts are read at random places, so that the kernel
      should not read ahead.

  Raises:
    OSError: the file cannot be mapped.
    ValueError: the file has no .npy header, or is too short.
  """
  with open(path, "rb") as file:
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    begin, count = file.tell(), math.prod(shape)
    if not count:  # an empty range cannot be mapped
      return np.empty(shape, dtype)
    num_bytes = begin + count * dtype.itemsize
    content = _map(file.fileno(), num_bytes, path, is_random)
  values = np.frombuffer(content, dtype, count, begin).reshape(shape)
  values.flags.writeable = False  # because its pages are mapped read-only
  return values


def _map(
  descriptor: int, num_bytes: int, path: str, is_random: bool
) -> ctypes.Array:
  if os.fstat(descriptor).st_size < num_bytes:
    # Reading a page beyond the end of a file would kill the process (SIGBUS).
    raise ValueError(f"{path} is cut short")
  address = _C.mmap(
    None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0
  )
  if address == _FAILED:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)
  if is_random:
    # The call only advises the kernel, so its failure is no error.
    _C.madvise(address, num_bytes, mmap.MADV_RANDOM)
  content = (ctypes.c_char * num_bytes).from_address(address)
  release = weakref.finalize(content, _C.munmap, address, num_bytes)
  # Do not unmap at the end of the process, because a thread may still read.
  release.atexit = False
  return content
