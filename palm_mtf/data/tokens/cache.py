# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The token stores of a run, in CACHE_DIR or MODEL_DIR/tokens.

The name of a store has a hash of text, vocabulary and settings, so that a store
is found again if the text files move, and a changed text gets a new store.
store.py writes and reads a store.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence

from palm_mtf.config import DataConfig
from palm_mtf.data.sources.document import Source, hash_parts
from palm_mtf.data.sources.files import FileDigests, writable_folder
from palm_mtf.data.tokens.shard import DamagedShardError
from palm_mtf.data.tokens.store import (
  FORMAT,
  TokenStore,
  read_store,
  write_store,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.model_dir.atomic_files import writing
from palm_mtf.model_dir.paths import ModelDir

_logger = logging.getLogger(__name__)


def load_stores(
  model_dir: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
) -> list[TokenStore]:
  """Returns the token store of each source; encodes sources without a store.

  Raises:
    UserError: there is no text, or the disk is full.
  """
  # Runs share CACHE_DIR, so a run reads tokens there but never writes tokens.
  own = ModelDir(model_dir).tokens
  stores, names = [], []
  for source, name in _name_stores(own, data, sources, vocabulary):
    shared = data.cache_folder
    store = shared and _read(os.path.join(shared, name))
    if store:
      _logger.info(f"tokens of {source.name} are read from {shared}")
    elif shared:
      _logger.warning(
        f"CACHE_DIR = {shared!r} lacks the tokens of {source.name}: "
        f"they are kept in {own}; palm_mtf data cache keeps them for all runs"
      )
    stores.append(store or _find_or_write(own, name, source, vocabulary))
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
  *,
  verify: bool = False,
) -> list[tuple[str, TokenStore]]:
  """Encodes sources that CACHE_DIR lacks; returns each source's (path, store).

  If CACHE_DIR is not set, MODEL_DIR/tokens is the cache. `verify` checks the
  hashes of files, not only their sizes. Damaged shards are encoded again.

  Raises:
    UserError: there is no text, or the disk is full.
  """
  folder = data.cache_folder or ModelDir(model_dir).tokens
  return [
    (
      os.path.join(folder, name),
      _find_or_write(folder, name, source, vocabulary, verify),
    )
    for source, name in _name_stores(folder, data, sources, vocabulary)
  ]


def _name_stores(
  own: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
) -> list[tuple[Source, str]]:
  """Returns (source, name of its store) for each source."""
  # FileDigests caches the hashes of the text files next to the token stores.
  keep = writable_folder(data.cache_folder, own)
  named = []
  with FileDigests(os.path.join(keep, "digests.json")) as digests:
    for source in sources:
      # The source's fingerprint covers the bytes of the text and the settings
      # that change its documents, but not the paths and times of files.
      parts = (FORMAT, source.fingerprint(digests), vocabulary.sha256)
      name = f"{source.name}-{hash_parts(parts, num_bytes=8)}"
      named.append((source, name.replace("/", "_")))
  return named


def _find_or_write(
  folder: str,
  name: str,
  source: Source,
  vocabulary: Vocabulary,
  verify: bool = False,
) -> TokenStore:
  path = os.path.join(folder, name)
  if store := _read(path, verify):
    return store
  with _lock_folder(folder):
    # Another process may have written the store while this process waited.
    with contextlib.suppress(DamagedShardError):
      return read_store(path, verify=verify)
    write_store(path, source, vocabulary)
  store = read_store(path)
  source.report_skipped()
  train, validation = store.train.counts, store.validation.counts
  _logger.info(
    f"encoded {train.num_documents:,} training documents "
    f"({train.num_tokens:,} tokens) and {validation.num_documents:,} "
    f"validation documents ({validation.num_tokens:,} tokens) into {path}"
  )
  return store


def _read(path: str, verify: bool = False) -> TokenStore | None:
  """Returns a store, or None if it is missing or damaged."""
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
