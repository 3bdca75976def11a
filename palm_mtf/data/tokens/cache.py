# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a run are kept: CACHE_DIR, or MODEL_DIR/tokens.

A source's store is named by a hash of its text (of every file's bytes, not of
their places or times), of the vocabulary and of the settings that matter: it is
found wherever the text has moved, and text that changes leads to a new store. A
run compares the sizes of its files, `palm_mtf data cache --verify` every byte;
store.py writes and reads it.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence

from palm_mtf.config.data import DataConfig
from palm_mtf.data.sources.document import Source
from palm_mtf.data.sources.file_hashes import FileDigests
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
  """Returns the tokens of every source of a run.

  They are read from CACHE_DIR if they are there, and otherwise from
  MODEL_DIR/tokens, where they are encoded if they are not there either. Logs
  which it was.

  Raises:
    UserError: there is no text, or the disk is full.
  """
  own = ModelDir(model_dir).tokens
  stores = []
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
  return stores


def cache_stores(
  model_dir: str,
  data: DataConfig,
  sources: Sequence[Source],
  vocabulary: Vocabulary,
  *,
  verify: bool = False,
) -> list[tuple[str, TokenStore]]:
  """Encodes what CACHE_DIR lacks; returns where each source's tokens are.

  Without CACHE_DIR, MODEL_DIR/tokens is the cache.

  Args:
    model_dir: MODEL_DIR.
    data: CACHE_DIR is read.
    sources: sources of the run.
    vocabulary: vocabulary of the ids.
    verify: compare every byte of what is there with its hashes; what differs
      is encoded anew.

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
  shared = data.cache_folder
  keep = shared if shared and os.access(shared, os.W_OK) else own
  named = []
  with FileDigests(os.path.join(keep, "digests.json")) as digests:
    for source in sources:
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
    # Whoever wrote meanwhile may have written this one.
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
  """Returns the store, or None when it is not there, or not whole."""
  if not os.path.isdir(path):
    return None
  try:
    return read_store(path, verify=verify)
  except DamagedShardError as error:
    _logger.warning(f"damaged tokens are encoded anew: {error}")
    return None


@contextlib.contextmanager
def _only_writer(folder: str) -> Iterator[None]:
  """Waits until no other process writes into `folder`."""
  with writing(folder, None):
    os.makedirs(folder, exist_ok=True)
    # A file, and opened to write: what NFS can lock.
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
