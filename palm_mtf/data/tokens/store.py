# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one source on disk: a folder of shards in NumPy's .npy format.

  train-00000.npy            documents, joined, [eod] after each: uint16, or
                             uint32 for more than 65,536 pieces
  train-00000.examples.npy   of examples only: see token_array.Shard
  validation-00000.npy ...   what the same stretch of documents held out
  shard-00000.json           counts and hashes of these files
  manifest.json              written last: the store is whole

A store grows shard by shard in a folder "....partial" and gets its name when it
is whole, so that writing that was stopped goes on behind the last whole shard.
A shard that does not agree with its .json is damaged; it alone is made anew.
Reading maps the arrays: memory does not grow with them. cache.py decides
which store a run uses, shard.py writes and reads one shard.
"""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from palm_mtf.console import progress_bar
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
from palm_mtf.data.vocabulary.vocabulary import Vocabulary, num_cores
from palm_mtf.model_dir.atomic_files import writing

# Of the folder, of the ids in it and of where its shards begin, on which
# mending relies; a part of a store's name.
FORMAT = 2

SHARD_BYTES = 64 << 20  # of text: what is encoded again after a stop
_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Split:
  """The documents of one split, and what they count."""

  tokens: TokenArray
  counts: Counts

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text for one learnt token; loss / (this * log 2) = bits/byte."""
    counts = self.counts
    return counts.num_target_bytes / max(1, counts.num_target_tokens)


@dataclasses.dataclass(frozen=True)
class TokenStore:
  """The splits of one source in one vocabulary.

  Attributes:
    train: what the model learns.
    validation: what is held out.
    lowest_rank: lowest rank of any document: a VALIDATION_SHARE above it holds
    one out.
    fingerprint: a hash of every token: the same for the same batches.
  """

  train: Split
  validation: Split
  lowest_rank: float
  fingerprint: str


class _Stretches:
  """Reads documents in order, about SHARD_BYTES of text at a time."""

  def __init__(self, documents: Iterator[tuple[str, Document]], advance):
    self._documents = documents
    self._advance = advance

  def skip(self, num_documents: int) -> None:
    """Passes over documents that an earlier writer has encoded."""
    for _, document in itertools.islice(self._documents, num_documents):
      self._advance(document.num_bytes)

  def next(self, max_bytes: int) -> Iterator[tuple[str, Document]]:
    """Yields documents up to the first with which `max_bytes` is reached.

    A document counts as often as it is repeated: a shard is made in memory.
    """
    stretch_bytes = 0
    for split, document in self._documents:
      num_bytes = document.num_bytes
      self._advance(num_bytes)
      yield split, document
      stretch_bytes += int(num_bytes * max(1.0, document.weight))
      if stretch_bytes >= max_bytes:
        return


def write_store(
  folder: str,
  source: Source,
  vocabulary: Vocabulary,
  *,
  num_processes: int | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Encodes every document of `source` into a store at `folder`.

  What an earlier, stopped writer left is used; a damaged store is mended.

  Args:
    folder: folder of the store.
    source: source of the documents.
    vocabulary: vocabulary of the ids.
    num_processes: processes that encode; one a core by default.
    shard_bytes: bytes of text in one shard.

  Raises:
    UserError: the source has no text, or the disk is full.
  """
  partial = f"{folder}.partial"
  dtype = "<u2" if vocabulary.size <= 1 << 16 else "<u4"
  # A token has at least one byte of text, but for the [eod] of a document.
  needed = source.num_bytes and int(dtype[2]) * source.num_bytes
  with (
    writing(folder, needed),
    Encoder(vocabulary, num_processes) as encoder,
    progress_bar(f"Encoding {source.name}", source.num_bytes) as advance,
  ):
    if os.path.isdir(folder):
      os.rename(folder, partial)
    os.makedirs(partial, exist_ok=True)
    stretches = _Stretches(source.documents(), advance)
    shards: list[ShardSummary] = []
    for number in itertools.count():
      try:
        shard = check_shard(partial, number, reads=True)
        stretches.skip(shard.num_read)
      except DamagedShardError:
        shard = write_shard(
          partial,
          number,
          encoder.encode(stretches.next(shard_bytes)),
          dtype=dtype,
          eod_id=vocabulary.eod_id,
          has_inputs=source.has_inputs,
        )
      if not shard.num_read:
        break
      shards.append(shard)
    manifest = {"num_shards": len(shards)}
    write_sealed_json(os.path.join(partial, _MANIFEST), manifest)
    os.rename(partial, folder)


def read_store(folder: str, *, verify: bool = False) -> TokenStore:
  """Maps a store after comparing its files with what its shards say.

  Args:
    folder: folder of the store.
    verify: read every byte and compare hashes, not sizes alone.

  Raises:
    DamagedShardError: a file is missing, cut short or changed.
  """
  manifest = read_sealed_json(os.path.join(folder, _MANIFEST))
  numbers = range(manifest["num_shards"])
  with ThreadPoolExecutor(num_cores()) as threads:  # hashing frees the GIL
    shards = list(
      threads.map(lambda n: check_shard(folder, n, reads=verify), numbers)
    )
  splits = {
    split: Split(
      TokenArray([map_shard(folder, n, split) for n in numbers]),
      sum((shard.counts[split] for shard in shards), Counts()),
    )
    for split in SPLITS
  }
  digests = [d for shard in shards for d in shard.blake2b.values()]
  return TokenStore(
    **splits,
    lowest_rank=min((shard.lowest_rank for shard in shards), default=1.0),
    fingerprint=hashlib.blake2b(
      "".join(digests).encode(), digest_size=16
    ).hexdigest(),
  )
