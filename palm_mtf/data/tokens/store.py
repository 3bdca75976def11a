# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Token stores: the tokens of each source of a run, in CACHE_DIR or MODEL_DIR.

The name of a store has a hash of text, vocabulary and settings, so that a store
is found again if the text files move, and a changed text gets a new store. A
store is a folder of shards in NumPy's .npy format:

  train-00000.npy            joined documents, each with its [eod]: uint16, or
                             uint32 if the vocabulary has over 65,536 pieces
  train-00000.documents.npy  where each document is: see Shard in shard.py
  train-00000.answers.npy    where answers are, if documents are conversations
  validation-00000.npy ...   the same for the held-out documents of the shard
  shard-00000.json           counts and hashes of these files
  manifest.json              written last, when the store is complete

shard.py writes and reads one shard.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from palm_mtf.config import DataConfig
from palm_mtf.data.filters.filtered_source import FilteredSource
from palm_mtf.data.sources.conversation import TEXTS
from palm_mtf.data.sources.document import (
  SPLITS,
  Document,
  Source,
  hash_parts,
  read_with_progress,
)
from palm_mtf.data.sources.files import FileDigests, writable_folder
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.tokens.shard import (
  Counts,
  DamagedShardError,
  ShardSummary,
  TokenArray,
  check_shard,
  map_shard,
  read_sealed_json,
  write_sealed_json,
  write_shard,
)
from palm_mtf.data.vocabulary.answers import ConversationEncoder
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.data.worker_pool import num_cores
from palm_mtf.model_dir.atomic_files import sync, writing
from palm_mtf.model_dir.paths import ModelDir

_logger = logging.getLogger(__name__)

# Version of the file format, of the token ids, and of the rule for where shards
# begin. The name of a store has a hash of the version, so that no run reads or
# repairs a store of another version.
_FORMAT = 3

# Bytes of text per shard. If encoding stops midway, the next start encodes only
# the unfinished shard again.
SHARD_BYTES = 64 << 20
_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Split:
  """The tokens of one split of a source, and counts of its documents."""

  tokens: TokenArray
  counts: Counts

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text per token with a loss, to convert loss to bits per byte."""
    # Bits per byte = loss / (bytes_per_token * ln 2).
    counts = self.counts
    return counts.num_target_bytes / max(1, counts.num_target_tokens)


@dataclasses.dataclass(frozen=True)
class TokenStore:
  """The tokens of one source, encoded by one vocabulary."""

  folder: str
  train: Split
  validation: Split
  lowest_rank: float  # a VALIDATION_SHARE above it holds out a document
  fingerprint: str  # hash of all shard files, for Corpus.fingerprint
  # Numbers of documents read, and removed by each filter; None without filters.
  filter_counts: dict[str, int] | None = None


def write_store(
  folder: str,
  source: Source,
  vocabulary: Vocabulary,
  *,
  conversations: ConversationEncoder | None = None,
  num_processes: int | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Encodes a source's documents into a store; repairs an existing store.

  `conversations` encodes documents that are conversations. By default,
  `num_processes` is one per core. A shard ends when it has `shard_bytes` bytes
  of text.

  Raises UserError if the source has no text, or the disk is full.
  """
  partial = f"{folder}.partial"
  dtype = "<u2" if vocabulary.size <= 1 << 16 else "<u4"
  # If the disk is full, the message names this upper bound on tokens' bytes. A
  # token has at least one byte of text; [eod] and repeats are not counted.
  needed = source.num_bytes and int(dtype[2]) * source.num_bytes
  on_disk = functools.partial(writing, folder, needed)
  with (
    Encoder(vocabulary, num_processes, conversations) as encoder,
    contextlib.closing(read_with_progress(source, "Encoding")) as documents,
  ):
    # Write shards into `partial`, which is renamed when the store is complete.
    # Undamaged shards of a stopped writer or a damaged store are kept.
    with on_disk():
      if os.path.isdir(folder):
        os.rename(folder, partial)
      os.makedirs(partial, exist_ok=True)
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


def _take_bytes(
  documents: Iterator[tuple[str, Document]], max_bytes: int
) -> Iterator[tuple[str, Document]]:
  num_bytes = 0
  for split, document in documents:
    yield split, document
    # Count repeats too, because the writer holds the whole shard in memory.
    num_bytes += int(document.num_bytes * max(1.0, document.weight))
    if num_bytes >= max_bytes:
      return


def read_store(folder: str, *, verify: bool = False) -> TokenStore:
  """Memory-maps a store after checking file sizes or, if `verify`, hashes.

  Raises DamagedShardError if a file is missing, truncated or changed.
  """
  manifest = read_sealed_json(os.path.join(folder, _MANIFEST))
  numbers = range(manifest["num_shards"])
  # To hash files, use many threads, because hashing releases the GIL. To check
  # only sizes, use one thread, because Python 3.11 may raise SystemError if
  # several threads parse array headers at once.
  with ThreadPoolExecutor(num_cores() if verify else 1) as threads:
    shards = list(
      threads.map(lambda n: check_shard(folder, n, reads=verify), numbers)
    )
  splits = {
    split: Split(
      TokenArray(
        [map_shard(folder, n, split, shard) for n, shard in enumerate(shards)]
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


def load_stores(
  model_dir: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
  conversations: ConversationEncoder | None = None,
) -> list[TokenStore]:
  """Returns the token store of each source; encodes sources without a store.

  `conversations` encodes sources of conversations; see open_conversations.

  Raises UserError if there is no text, or the disk is full.
  """
  # Read tokens in CACHE_DIR, which runs share. Write missing tokens to `own`,
  # because training writes nothing to CACHE_DIR.
  own = ModelDir(model_dir).tokens
  stores, names = [], []
  named = _name_stores(own, data, sources, vocabulary, conversations)
  for source, name in named:
    shared = data.cache_folder
    store = shared and _read(os.path.join(shared, name))
    if store:
      _logger.info(f"tokens of {source.name} are read from {shared}")
    elif shared:
      _logger.warning(
        f"CACHE_DIR = {shared!r} lacks the tokens of {source.name}: "
        f"they are kept in {own}; palm_mtf data cache keeps them for all runs"
      )
    path = os.path.join(own, name)
    stores.append(
      store or _find_or_write(path, source, vocabulary, conversations)
    )
    names.append(name)
  kept = os.listdir(own) if os.path.isdir(own) else []
  folders = {x for x in kept if os.path.isdir(os.path.join(own, x))}
  if others := sorted(folders - {*names}):
    _logger.info(
      f"{own} also has tokens of other text or settings: {', '.join(others)}; "
      "remove the folders that no run needs"
    )
  return stores


def cache_stores(
  model_dir: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
  conversations: ConversationEncoder | None = None,
  *,
  verify: bool = False,
) -> list[tuple[str, TokenStore]]:
  """Encodes sources that CACHE_DIR lacks; returns each source's (path, store).

  If CACHE_DIR is not set, MODEL_DIR/tokens is the cache. `verify` checks the
  hashes of files, not only their sizes. Damaged shards are encoded again.

  Raises UserError if there is no text, or the disk is full.
  """
  folder = data.cache_folder or ModelDir(model_dir).tokens
  found = []
  named = _name_stores(folder, data, sources, vocabulary, conversations)
  for source, name in named:
    path = os.path.join(folder, name)
    store = _find_or_write(path, source, vocabulary, conversations, verify)
    found.append((path, store))
  return found


def _name_stores(
  own: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
  conversations: ConversationEncoder | None,
) -> list[tuple[Source, str]]:
  """Checks sources' token ids; returns each (source, name of its store)."""
  for source in sources:
    source.check_vocabulary(vocabulary.sha256)
  # Save the text files' hashes, so that the next command hashes no file again.
  keep = writable_folder(data.cache_folder, own)
  named = []
  with FileDigests(os.path.join(keep, "digests.json")) as digests:
    for source in sources:
      # The source's fingerprint covers the bytes of the text and the settings
      # that change its documents, but not the paths and times of files.
      parts = (_FORMAT, source.fingerprint(digests), vocabulary.sha256)
      if conversations and source.form != TEXTS:
        parts += (conversations.fingerprint(source.form),)
      name = f"{source.name}-{hash_parts(parts, num_bytes=8)}"
      named.append((source, name.replace("/", "_")))
  return named


def _find_or_write(
  path: str,
  source: Source,
  vocabulary: Vocabulary,
  conversations: ConversationEncoder | None,
  verify: bool = False,
) -> TokenStore:
  if store := _read(path, verify):
    return store
  with _lock_folder(os.path.dirname(path)):
    # Another process may have written the store while this process waited.
    with contextlib.suppress(DamagedShardError):
      return read_store(path, verify=verify)
    write_store(path, source, vocabulary, conversations=conversations)
  store = read_store(path)
  source.report_skipped()
  train, validation = store.train.counts, store.validation.counts
  trained = (
    f"; {train.num_answers + validation.num_answers:,} answers of "
    f"conversations ({train.num_target_tokens:,} training and "
    f"{validation.num_target_tokens:,} validation tokens) are learned"
  )
  _logger.info(
    f"encoded {train.num_documents:,} training documents "
    f"({train.num_tokens:,} tokens) and {validation.num_documents:,} "
    f"validation documents ({validation.num_tokens:,} tokens) into {path}"
    f"{trained if train.num_answers else ''}"
  )
  return store


def _read(path: str, verify: bool = False) -> TokenStore | None:
  if not os.path.isdir(path):
    return None
  try:
    return read_store(path, verify=verify)
  except DamagedShardError as error:
    _logger.warning(f"damaged tokens are encoded again: {error}")
    return None


@contextlib.contextmanager
def _lock_folder(folder: str) -> Iterator[None]:
  """Waits until no other process writes into `folder`, and locks it."""
  with writing(folder, None):
    os.makedirs(folder, exist_ok=True)
    # The lock file is open for writing, because NFS refuses an exclusive lock
    # on a file that is only open for reading. The kernel releases the lock if
    # this process is killed.
    path = os.path.join(folder, ".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        _logger.info(f"waiting for another process that encodes into {folder}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
      yield
    finally:
      os.close(descriptor)
