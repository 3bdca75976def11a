# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes, checks and memory-maps the shards of a token store.

TokenArray reads several shards as one array. store.py lists a shard's files.
"""

import array
import contextlib
import ctypes
import dataclasses
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from palm_mtf.data.sources.document import SPLITS, TRAIN, num_repeats
from palm_mtf.data.tokens.encoder import EncodedDocument
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.foreign_files import hash_file, read_sealed, seal

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
  """The tokens of one split's documents in a shard, joined."""

  tokens: np.ndarray  # [num_tokens], uint16 or uint32; [eod] ends each document
  # [2, num_documents], int64: the index in `tokens` of each document's first
  # target, and the index after its [eod].
  documents: np.ndarray
  has_inputs: bool = False  # whether documents have inputs and targets
  # [2, num_answers], int64: the index in `tokens` of the first token of each
  # answer in conversations, and the index after its last. None for other texts.
  answers: np.ndarray | None = None


class TokenArray:
  """The shards of one split of a source, read as one array of tokens."""

  def __init__(self, shards: Sequence[Shard]):
    self._shards = [shard for shard in shards if len(shard.tokens)]
    lengths = [len(shard.tokens) for shard in self._shards]
    # Index of each shard's first token, then the number of all tokens.
    # `_first_documents` has the same for documents.
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
  def has_answers(self) -> bool:
    """Whether documents are conversations."""
    return any(shard.answers is not None for shard in self._shards)

  @property
  def num_documents(self) -> int:
    """Number of documents in all shards, repeats included."""
    return int(self._first_documents[-1])

  def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens `start` to `stop` - 1, and whether each has a loss.

    The arrays are [stop - start], int32 and bool.
    """
    tokens = np.empty(stop - start, np.int32)
    is_target = np.ones(stop - start, bool)
    number = int(np.searchsorted(self._starts, start, side="right")) - 1
    done = 0
    while done < len(tokens):
      shard, first = self._shards[number], start + done - self._starts[number]
      part = shard.tokens[first : first + len(tokens) - done]
      tokens[done : done + len(part)] = part
      if shard.has_inputs:
        spans = shard.documents if shard.answers is None else shard.answers
        is_target[done : done + len(part)] = _find_targets(
          spans, first, first + len(part)
        )
      done += len(part)
      number += 1
    return tokens, is_target

  def extents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where documents, given by their indices, begin and end.

    The arrays, [n], int64, have the index of each document's first token, and
    the index after its [eod].
    """
    begins, ends = np.empty_like(documents), np.empty_like(documents)
    shards = np.searchsorted(self._first_documents, documents, "right") - 1
    # Sort by shard, so that each shard's array is read once.
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
    """Returns where every document is, [num_documents, 3], int64.

    A row has the indices of a document's first token and of its first target,
    and the index after its [eod].
    """
    spans = []
    for shard, start in zip(self._shards, self._starts, strict=False):
      targets, ends = shard.documents
      begins = np.concatenate([[0], ends[:-1]])
      spans.append(np.stack([begins, targets, ends], axis=1) + start)
    return np.concatenate(spans) if spans else np.empty([0, 3], np.int64)

  def answers(self) -> np.ndarray:
    """Returns where answers of conversations are, [num_answers, 2], int64.

    A row has the index of an answer's first token, and the index after its end.
    """
    found = [np.empty([0, 2], np.int64)]
    for shard, start in zip(self._shards, self._starts, strict=False):
      if shard.answers is not None:
        found.append(shard.answers.T + start)
    return np.concatenate(found)


def _find_targets(spans: np.ndarray, start: int, stop: int) -> np.ndarray:
  """Returns which tokens from `start` to `stop` - 1 are targets, bool."""
  targets, ends = spans
  # Only spans `first` to `last` - 1 have targets in this range: spans that end
  # after `start` and whose targets begin before `stop`.
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
    if os.fstat(file.fileno()).st_size < num_bytes:
      # Reading a page beyond the end of a file would kill the process (SIGBUS).
      raise ValueError(f"{path} is cut short")
    address = _C.mmap(
      None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0
    )
  if address == _FAILED:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)
  if is_random:
    # The call only advises the kernel, so its failure is no error.
    _C.madvise(address, num_bytes, mmap.MADV_RANDOM)
  content = (ctypes.c_char * num_bytes).from_address(address)
  release = weakref.finalize(content, _C.munmap, address, num_bytes)
  # Do not unmap at exit: a thread that still reads the array would crash.
  release.atexit = False
  values = np.frombuffer(content, dtype, count, begin).reshape(shape)
  values.flags.writeable = False  # because its pages are mapped read-only
  return values


# A document of weight 3 is written three times. Copies that have more bytes of
# text than this in all are an error, because host memory holds all copies.
_MOST_REPEATED_BYTES = 1 << 30
_CHANGED = "its content is not what was written"


class DamagedShardError(Exception):
  """A shard has a missing or changed file, and must be written again."""


@dataclasses.dataclass(kw_only=True)
class Counts:
  """Counts of one split in one shard, or summed over shards."""

  num_documents: int = 0  # a document counts as often as an epoch reads it
  num_tokens: int = 0  # with one [eod] per document
  num_target_tokens: int = 0  # tokens with a loss: all but inputs
  num_answers: int = 0  # answers of conversations
  num_bytes: int = 0  # sum of Document.num_bytes
  num_target_bytes: int = 0  # sum of Document.num_target_bytes
  longest_document_tokens: int = 0  # with its [eod]

  def __add__(self, other: "Counts") -> "Counts":
    total = Counts(**{x: n + getattr(other, x) for x, n in vars(self).items()})
    total.longest_document_tokens = max(
      self.longest_document_tokens, other.longest_document_tokens
    )
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardSummary:
  """Counts and file hashes of a shard, which its .json holds."""

  num_read: int  # documents read from the source, also those of weight 0
  # Lowest Document.rank. If VALIDATION_SHARE is below it, no document is held
  # out, and the error proposes a share above it.
  lowest_rank: float
  counts: dict[str, Counts]  # {split: its counts}
  has_inputs: bool  # whether documents have inputs and targets
  blake2b: dict[str, str]  # {file name: hash of the file}, to detect damage

  @classmethod
  def from_json(cls, content: dict) -> "ShardSummary":
    """Returns the summary that a shard's .json holds as `content`."""
    counts = {split: Counts(**content["counts"][split]) for split in SPLITS}
    return cls(**{**content, "counts": counts})


class _SplitWriter:
  """Gathers the documents of a shard's split in memory, then writes them."""

  def __init__(self, dtype: str, eod_id: int):
    self._dtype = np.dtype(dtype)
    self._eod = np.array([eod_id], dtype).tobytes()
    self._tokens = bytearray()
    # Per document, the indices of its first target token and of its end.
    self._documents = array.array("q")
    # Per answer of a conversation, the indices of its first token and its end.
    self._answers = array.array("q")
    self.counts = Counts()

  def add(self, encoded: EncodedDocument) -> None:
    for ids in (encoded.inputs, encoded.text):
      self._tokens += ids.astype(self._dtype).tobytes()
    self._tokens += self._eod
    counts, document = self.counts, encoded.document
    num_target_tokens = len(encoded.text) + 1
    num_tokens = len(encoded.inputs) + num_target_tokens
    first_target = counts.num_tokens + len(encoded.inputs)
    if encoded.answers is not None:
      answers = counts.num_tokens + encoded.answers
      self._answers.extend(answers.ravel().tolist())
      first_target = int(answers[0, 0])
      num_target_tokens = int((answers[:, 1] - answers[:, 0]).sum())
      counts.num_answers += len(answers)
    counts.num_documents += 1
    counts.num_tokens += num_tokens
    counts.num_target_tokens += num_target_tokens
    counts.num_bytes += document.num_bytes
    counts.num_target_bytes += document.num_target_bytes
    counts.longest_document_tokens = max(
      counts.longest_document_tokens, num_tokens
    )
    self._documents.extend((first_target, counts.num_tokens))

  def write(self, folder: str, name: str) -> list[str]:
    """Writes the arrays; returns the names of their files."""
    arrays = {
      f"{name}.npy": np.frombuffer(self._tokens, self._dtype),
      f"{name}.documents.npy": _pair_up(self._documents),
    }
    if self.counts.num_answers:
      arrays[f"{name}.answers.npy"] = _pair_up(self._answers)
    for file, values in arrays.items():
      _save_array(os.path.join(folder, file), values)
    return list(arrays)


def _pair_up(numbers: array.array) -> np.ndarray:
  pairs = np.array(numbers, np.int64).reshape(-1, 2)
  return np.ascontiguousarray(pairs.T)


def write_shard(
  folder: str,
  number: int,
  documents: Iterable[EncodedDocument],
  *,
  dtype: str,
  eod_id: int,
  has_inputs: bool,
  writing: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> ShardSummary:
  """Writes documents as shard `number`; writes nothing if there are none.

  `dtype` is the NumPy dtype of tokens. `writing` returns a context manager that
  explains disk errors. It is entered only while files are written, because
  iterating over `documents` also reads and encodes text, with other errors.
  """
  writers = {split: _SplitWriter(dtype, eod_id) for split in SPLITS}
  num_read, lowest_rank = 0, 1.0
  for encoded in documents:
    num_read += 1
    lowest_rank = min(lowest_rank, encoded.document.rank)
    repeats = num_repeats(encoded.document)
    num_bytes, weight = encoded.document.num_bytes, encoded.document.weight
    if repeats > 1 and repeats * num_bytes > _MOST_REPEATED_BYTES:
      raise UserError(
        f"a document of {num_bytes:,} bytes has weight {weight:g}, and would "
        f"be more than {_MOST_REPEATED_BYTES:,} bytes of text; give it a lower "
        f"weight, or cut it. It begins with {encoded.document.text[:40]!r}."
      )
    # Only training text is repeated; held-out text is evaluated at most once.
    for _ in range(repeats if encoded.split == TRAIN else min(repeats, 1)):
      writers[encoded.split].add(encoded)
  files = []
  with writing():
    for split, writer in writers.items() if num_read else ():
      files += writer.write(folder, f"{split}-{number:05d}")
  summary = ShardSummary(
    num_read=num_read,
    lowest_rank=lowest_rank,
    counts={split: writer.counts for split, writer in writers.items()},
    has_inputs=has_inputs,
    blake2b={file: hash_file(os.path.join(folder, file)) for file in files},
  )
  if num_read:
    # Write the .json last, so that a shard whose writer is killed has no .json
    # and counts as missing.
    write_sealed_json(
      _summary_path(folder, number), dataclasses.asdict(summary)
    )
  return summary


def check_shard(folder: str, number: int, *, reads: bool) -> ShardSummary:
  """Checks a shard's file sizes or, if `reads`, hashes; returns its summary.

  Raises DamagedShardError if a file is missing, truncated or changed. Raises
  UserError if a file cannot be read.
  """
  path = _summary_path(folder, number)
  try:
    summary = ShardSummary.from_json(read_sealed_json(path))
    for name, expected in summary.blake2b.items():
      path = os.path.join(folder, name)
      if reads:
        is_whole = hash_file(path) == expected
      else:
        is_whole = os.path.getsize(path) == _size_of(name, summary, path)
      if not is_whole:
        raise DamagedShardError(f"{path}: {_CHANGED}")
  except OSError as error:
    raise _explain_read_error(path, error) from None
  return summary


def _size_of(name: str, summary: ShardSummary, path: str) -> int | None:
  """Returns an undamaged file's size in bytes; None if its header is wrong."""
  counts = summary.counts[name.partition("-")[0]]
  shape = (counts.num_tokens,)
  if name.endswith(".documents.npy"):
    shape = (2, counts.num_documents)
  elif name.endswith(".answers.npy"):
    shape = (2, counts.num_answers)
  with contextlib.suppress(ValueError), open(path, "rb") as file:
    np.lib.format.read_magic(file)
    found, _, dtype = np.lib.format.read_array_header_1_0(file)
    if found == shape:
      return file.tell() + math.prod(shape) * dtype.itemsize
  return None


def write_sealed_json(path: str, content: dict) -> None:
  """Writes a JSON file with a hash of its content, to detect damage later."""
  write_atomically(path, json_text(seal(content), indent=1).encode())


def read_sealed_json(path: str) -> dict:
  """Returns the content of a file that `write_sealed_json` wrote.

  Raises DamagedShardError if the file is missing, truncated or changed. Raises
  UserError if the file cannot be read.
  """
  try:
    return read_sealed(path)[0]
  except OSError as error:
    raise _explain_read_error(path, error) from None
  except ValueError:
    raise DamagedShardError(f"{path}: {_CHANGED}") from None


def _explain_read_error(path: str, error: OSError) -> Exception:
  if isinstance(error, (FileNotFoundError, NotADirectoryError)):
    return DamagedShardError(f"{path}: {error.strerror}")
  # Other errors, such as missing permissions or a file system that does not
  # respond, do not mean that the file is damaged.
  return UserError(
    f"cannot read {path}: {error.strerror}; mend that, or remove the file."
  )


def map_shard(
  folder: str, number: int, split: str, summary: ShardSummary
) -> Shard:
  """Memory-maps one split of a shard that `check_shard` found undamaged."""
  name = f"{split}-{number:05d}"
  path, answers = os.path.join(folder, name), None
  # Tokens are read at random places, because training shuffles the documents.
  tokens = map_array(f"{path}.npy", is_random=True)
  if f"{name}.answers.npy" in summary.blake2b:
    answers = map_array(f"{path}.answers.npy")
  documents = map_array(f"{path}.documents.npy")
  return Shard(tokens, documents, summary.has_inputs, answers)


def _save_array(path: str, values: np.ndarray) -> None:
  # Replace a damaged file. Writing into the file would change the memory of
  # other processes that have mapped the file. Do not use np.save, whose error
  # on a full disk lacks the errno.
  header = np.lib.format.header_data_from_array_1_0(values)
  partial = f"{path}.partial"
  with open(partial, "wb") as file:
    np.lib.format.write_array_header_1_0(file, header)
    file.write(values.data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)


def _summary_path(folder: str, number: int) -> str:
  return os.path.join(folder, f"shard-{number:05d}.json")
