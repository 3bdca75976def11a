# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One shard of a token store: written, checked, mapped.

token_store.py lists a shard's files. Its .json is written last, so that a shard
without one is not there, whatever else a writer left that was stopped.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable

import numpy as np

from palm_mtf.data.encoding import EncodedDocument
from palm_mtf.data.sources import SPLITS, TRAIN, num_repeats
from palm_mtf.data.token_array import Shard
from palm_mtf.disk import write_atomically

_READ_ERRORS = (OSError, ValueError, KeyError, TypeError)


class DamagedShardError(Exception):
  """A shard does not agree with its .json; the message says where."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
  """What one split holds; counts of two shards can be added.

  Attributes:
    num_documents: documents, as often as they are repeated.
    num_tokens: tokens, with an [eod] for each document.
    num_target_tokens: those that are learnt: all but inputs.
    num_bytes: size of the text in UTF-8, inputs and all.
    num_target_bytes: size of what is learnt.
    longest_document_tokens: length of the longest, with its [eod].
  """

  num_documents: int = 0
  num_tokens: int = 0
  num_target_tokens: int = 0
  num_bytes: int = 0
  num_target_bytes: int = 0
  longest_document_tokens: int = 0

  def __add__(self, other: "Counts") -> "Counts":
    ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
    *sums, _ = (a + b for a, b in zip(ours, theirs, strict=True))
    return Counts(
      **dict(zip(dataclasses.asdict(self), sums, strict=False)),
      longest_document_tokens=max(ours[-1], theirs[-1]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardSummary:
  """What a shard's .json says.

  Attributes:
    num_read: documents of the source that went into it, or were left out.
    lowest_rank: of these.
    counts: of each split.
    blake2b: hash of each file, by its name.
  """

  num_read: int
  lowest_rank: float
  counts: dict[str, Counts]
  blake2b: dict[str, str]

  @classmethod
  def from_json(cls, content: dict) -> "ShardSummary":
    """Reads what `dataclasses.asdict` gave."""
    counts = {split: Counts(**content["counts"][split]) for split in SPLITS}
    return cls(**{**content, "counts": counts})


class _SplitWriter:
  """Gathers the documents of one split of a shard."""

  def __init__(self, dtype: str, eod_id: int, has_inputs: bool):
    self._dtype = dtype
    self._eod = np.array([eod_id], dtype)
    self._has_inputs = has_inputs
    self._parts: list[np.ndarray] = []
    self._examples: list[tuple[int, int]] = []
    self.counts = Counts()

  def add(self, encoded: EncodedDocument) -> None:
    """Appends one document and its [eod]."""
    parts = [encoded.inputs, encoded.text]
    self._parts += [part.astype(self._dtype) for part in parts if len(part)]
    self._parts.append(self._eod)
    targets = self.counts.num_tokens + len(encoded.inputs)
    end = targets + len(encoded.text) + 1
    self._examples.append((targets, end))
    document = encoded.document
    self.counts += Counts(
      num_documents=1,
      num_tokens=end - self.counts.num_tokens,
      num_target_tokens=end - targets,
      num_bytes=document.num_bytes,
      num_target_bytes=document._replace(inputs=None).num_bytes,
      longest_document_tokens=end - self.counts.num_tokens,
    )

  def write(self, folder: str, name: str) -> list[str]:
    """Writes what was gathered; returns the names of the files."""
    arrays = {f"{name}.npy": np.concatenate([self._eod[:0], *self._parts])}
    if self._has_inputs:
      examples = np.array(self._examples, np.int64).reshape(-1, 2)
      arrays[f"{name}.examples.npy"] = np.ascontiguousarray(examples.T)
    for file, array in arrays.items():
      np.save(os.path.join(folder, file), array)
    return list(arrays)


def write_shard(
  folder: str,
  number: int,
  documents: Iterable[EncodedDocument],
  *,
  dtype: str,
  eod_id: int,
  has_inputs: bool,
) -> ShardSummary:
  """Writes `documents` as shard `number`; without any, nothing is written."""
  writers = {s: _SplitWriter(dtype, eod_id, has_inputs) for s in SPLITS}
  num_read, lowest_rank = 0, 1.0
  for encoded in documents:
    num_read += 1
    lowest_rank = min(lowest_rank, encoded.document.rank)
    repeats = num_repeats(encoded.document)
    for _ in range(repeats if encoded.split == TRAIN else min(repeats, 1)):
      writers[encoded.split].add(encoded)
  counts = {split: writer.counts for split, writer in writers.items()}
  files = []
  if num_read:
    for split, writer in writers.items():
      files += writer.write(folder, f"{split}-{number:05d}")
  summary = ShardSummary(
    num_read=num_read,
    lowest_rank=lowest_rank,
    counts=counts,
    blake2b={file: _blake2b(os.path.join(folder, file)) for file in files},
  )
  if num_read:
    content = json.dumps(dataclasses.asdict(summary), indent=1).encode()
    write_atomically(_summary_path(folder, number), content)
  return summary


def check_shard(folder: str, number: int) -> ShardSummary:
  """Returns the summary of a shard after comparing every byte with it.

  Raises:
    DamagedShardError: a file is missing, cut short or changed.
  """
  path = _summary_path(folder, number)
  try:
    with open(path, encoding="utf-8") as file:
      summary = ShardSummary.from_json(json.load(file))
    for name, expected in summary.blake2b.items():
      path = os.path.join(folder, name)
      if _blake2b(path) != expected:
        raise ValueError("its content is not what was written")
  except _READ_ERRORS as error:
    why = error.strerror if isinstance(error, OSError) else error
    raise DamagedShardError(f"{path}: {why}") from None
  return summary


def map_shard(folder: str, number: int, split: str) -> Shard:
  """Maps one split of a shard that has been checked."""
  path = os.path.join(folder, f"{split}-{number:05d}")
  examples = f"{path}.examples.npy"
  return Shard(
    _map(f"{path}.npy"), _map(examples) if os.path.exists(examples) else None
  )


def _map(path: str) -> np.ndarray:
  try:
    return np.load(path, mmap_mode="r")
  except ValueError:  # an array without numbers cannot be mapped
    return np.load(path)


def _summary_path(folder: str, number: int) -> str:
  return os.path.join(folder, f"shard-{number:05d}.json")


def _blake2b(path: str) -> str:
  with open(path, "rb") as file:
    new = lambda: hashlib.blake2b(digest_size=16)  # noqa: E731
    return hashlib.file_digest(file, new).hexdigest()
