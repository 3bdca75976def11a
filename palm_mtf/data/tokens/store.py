# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one source on disk: a folder of shards in NumPy's .npy format.

  train-00000.npy            joined documents, each with its [eod]: uint16, or
                             uint32 if the vocabulary has over 65,536 pieces
  train-00000.documents.npy  where each document is: see Shard in array.py
  validation-00000.npy ...   the same for the held-out documents of the shard
  shard-00000.json           counts and hashes of these files
  manifest.json              written last, when the store is complete

cache.py decides which store a run uses; shard.py writes and reads one shard.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from palm_mtf.console import progress_bar
from palm_mtf.data.filters.filtered_source import FilteredSource
from palm_mtf.data.sources.document import SPLITS, Document, Source
from palm_mtf.data.tokens.array import TokenArray
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.tokens.shard import (
  Counts,
  DamagedShardError,
  ShardSummary,
  check_shard,
  map_shard,
  read_sealed_json,
  write_sealed_json,
  write_shard,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.data.worker_pool import num_cores
from palm_mtf.model_dir.atomic_files import sync, writing

# Version of the file format, of the token ids, and of the rule for where shards
# begin. The name of a store has a hash of the version, so that no run reads or
# repairs a store of another version.
FORMAT = 3

# Bytes of text in a shard. A run that resumes encodes at most about this much
# text again.
SHARD_BYTES = 64 << 20
_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Split:
  """The documents of one split and their counts."""

  tokens: TokenArray
  counts: Counts

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text per learned token; bits per byte = loss / (this * ln 2)."""
    counts = self.counts
    return counts.num_target_bytes / max(1, counts.num_target_tokens)


@dataclasses.dataclass(frozen=True)
class TokenStore:
  """The tokens of one source in one vocabulary."""

  folder: str
  train: Split
  validation: Split
  lowest_rank: float  # lowest Document.rank, to compare with VALIDATION_SHARE
  fingerprint: str  # hash of all shard files
  # Numbers of documents read, and removed by each filter; None without filters.
  filter_counts: dict[str, int] | None = None


def write_store(
  folder: str,
  source: Source,
  vocabulary: Vocabulary,
  *,
  num_processes: int | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Encodes a source's documents into a store; repairs an existing store.

  By default, `num_processes` is one per core. A shard ends when it has
  `shard_bytes` bytes of text.

  Raises:
    UserError: the source has no text, or the disk is full.
  """
  partial = f"{folder}.partial"
  dtype = "<u2" if vocabulary.size <= 1 << 16 else "<u4"
  # For the message about a full disk: the most bytes that tokens take, except
  # [eod] and repeats, because every other token has at least one byte of text.
  needed = source.num_bytes and int(dtype[2]) * source.num_bytes
  on_disk = functools.partial(writing, folder, needed)
  with (
    Encoder(vocabulary, num_processes) as encoder,
    progress_bar(f"Encoding {source.name}", source.num_bytes) as advance,
  ):
    # Write shards into `partial`, which is renamed when the store is complete.
    # Undamaged shards of a stopped writer or a damaged store are kept.
    with on_disk():
      if os.path.isdir(folder):
        os.rename(folder, partial)
      os.makedirs(partial, exist_ok=True)
    documents = _show_progress(source.documents(), advance)
    shards: list[ShardSummary] = []
    for number in itertools.count():
      try:
        shard = check_shard(partial, number, reads=True)
        for _ in itertools.islice(documents, shard.num_read):
          pass
      except DamagedShardError:
        shard = write_shard(
          partial,
          number,
          encoder.encode(_take_bytes(documents, shard_bytes)),
          dtype=dtype,
          eod_id=vocabulary.eod_id,
          has_inputs=source.has_inputs,
          writing=on_disk,
        )
      if not shard.num_read:
        break
      shards.append(shard)
    manifest: dict[str, object] = {"num_shards": len(shards)}
    if isinstance(source, FilteredSource):
      manifest["filters"] = source.counts
    write_sealed_json(os.path.join(partial, _MANIFEST), manifest)
    with on_disk():
      os.rename(partial, folder)
      sync(os.path.dirname(os.path.abspath(folder)))


def _show_progress(
  documents: Iterable[tuple[str, Document]], advance: Callable[[int], None]
) -> Iterator[tuple[str, Document]]:
  for split, document in documents:
    advance(document.num_bytes)
    yield split, document


def _take_bytes(
  documents: Iterator[tuple[str, Document]], max_bytes: int
) -> Iterator[tuple[str, Document]]:
  """Yields documents until their total size reaches `max_bytes`."""
  num_bytes = 0
  for split, document in documents:
    yield split, document
    # Repeats count too, because a whole shard is held in memory.
    num_bytes += int(document.num_bytes * max(1.0, document.weight))
    if num_bytes >= max_bytes:
      return


def read_store(folder: str, *, verify: bool = False) -> TokenStore:
  """Memory-maps a store after checking file sizes or, if `verify`, hashes.

  Raises:
    DamagedShardError: a file is missing, truncated or changed.
  """
  manifest = read_sealed_json(os.path.join(folder, _MANIFEST))
  numbers = range(manifest["num_shards"])
  # Many threads hash files, because hashing releases the GIL. One thread reads
  # array headers, because Python 3.11 may raise SystemError if several threads
  # parse literals at once.
  with ThreadPoolExecutor(num_cores() if verify else 1) as threads:
    shards = list(
      threads.map(lambda n: check_shard(folder, n, reads=verify), numbers)
    )
  splits = {
    split: Split(
      TokenArray(
        [
          map_shard(folder, n, split, has_inputs=shard.has_inputs)
          for n, shard in enumerate(shards)
        ]
      ),
      sum((shard.counts[split] for shard in shards), Counts()),
    )
    for split in SPLITS
  }
  digests = [d for shard in shards for d in shard.blake2b.values()]
  return TokenStore(
    folder=folder,
    **splits,
    lowest_rank=min((shard.lowest_rank for shard in shards), default=1.0),
    fingerprint=hashlib.blake2b(
      "".join(digests).encode(), digest_size=16
    ).hexdigest(),
    filter_counts=manifest.get("filters"),
  )
