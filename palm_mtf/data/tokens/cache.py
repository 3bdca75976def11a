# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The token stores of a run, in CACHE_DIR or MODEL_DIR/tokens.

A store is named by a hash of text, vocabulary and settings: it is found where
the text has moved, and text that changes leads to a new one. store.py writes
and reads a store.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence

from palm_mtf.config import DataConfig
from palm_mtf.data.sources.document import Source
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
from palm_mtf.model_dir.layout import ModelDir

_logger = logging.getLogger(__name__)


def load_stores(
  model_dir: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
) -> list[TokenStore]:
  """Returns the store of every source of a run, encoded if need be.

  Raises:
    UserError: there is no text, or the disk is full.
  """
  # A run reads CACHE_DIR, which other runs read too, and writes MODEL_DIR.
  own = ModelDir(model_dir).tokens
  stores, names = [], []
  for source, name in _named(own, data, sources, vocabulary):
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
  if others := sorted({*_stores_in(own)} - {*names}):
    _logger.info(
      f"{own} has tokens of other text or settings too: {', '.join(others)}; "
      "remove those that no run needs"
    )
  return stores


def _stores_in(folder: str) -> list[str]:
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return [x for x in names if os.path.isdir(os.path.join(folder, x))]


def cache_stores(
  model_dir: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
  *,
  verify: bool = False,
) -> list[tuple[str, TokenStore]]:
  """Encodes the sources that CACHE_DIR lacks; returns the path of each store.

  Args:
    model_dir: MODEL_DIR; its tokens/ is the cache where there is no CACHE_DIR.
    data: data settings, of which CACHE_DIR is read.
    sources: sources of the run.
    vocabulary: vocabulary of the ids.
    verify: whether to compare every byte with its hash, not sizes alone;
      damaged shards are encoded anew.

  Raises:
    UserError: there is no text, or the disk is full.
  """
  folder = data.cache_folder or ModelDir(model_dir).tokens
  return [
    (
      os.path.join(folder, name),
      _find_or_write(folder, name, source, vocabulary, verify),
    )
    for source, name in _named(folder, data, sources, vocabulary)
  ]


def _named(
  own: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
) -> list[tuple[Source, str]]:
  """Returns the sources with the names of their stores."""
  # Hashes of files are kept beside the stores.
  keep = writable_folder(data.cache_folder, own)
  named = []
  with FileDigests(os.path.join(keep, "digests.json")) as digests:
    for source in sources:
      # Bytes of the text, not places or times; the vocabulary; and, by the
      # source's fingerprint, the settings that change its documents.
      parts = (FORMAT, source.fingerprint(digests), vocabulary.sha256)
      key = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
      named.append((source, f"{source.name}-{key}".replace("/", "_")))
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
  with _only_writer(folder):
    # Another process may have written this one while we waited.
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
  """Returns a store, or None where there is none or it is damaged."""
  if not os.path.isdir(path):
    return None
  # A start compares sizes, `palm_mtf data cache --verify` every byte.
  try:
    return read_store(path, verify=verify)
  except DamagedShardError as error:
    _logger.warning(f"damaged tokens are encoded anew: {error}")
    return None


@contextlib.contextmanager
def _only_writer(folder: str) -> Iterator[None]:
  """Waits until no other process writes into `folder`, and holds it."""
  with writing(folder, None):
    os.makedirs(folder, exist_ok=True)
    # NFS locks files only, and only those opened to write. The kernel releases
    # the lock of a process that is killed.
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
