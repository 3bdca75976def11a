# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of a run: encoded once, kept in MODEL_DIR, checked at each start.

A store's name is a hash of the path, size and time of change of every text
file, of the vocabulary and of the settings that matter: a run that starts
again finds its tokens without reading one text file, and a file that changes,
comes or goes leads to a new store. The store's own fingerprint is a hash of
the tokens themselves, for whoever must know that a run goes on with the same
text. token_store.py writes and reads stores; batches.py cuts sequences.
"""

import hashlib
import os
import shutil

from palm_mtf.config import DataConfig
from palm_mtf.console import say
from palm_mtf.data.documents import Corpus
from palm_mtf.data.files import fingerprint
from palm_mtf.data.token_store import (
  FORMAT,
  DamagedStoreError,
  Split,
  TokenStore,
  read_store,
  write_store,
)
from palm_mtf.data.vocabulary import Vocabulary
from palm_mtf.disk import writing
from palm_mtf.errors import UserError


def load_tokens(
  model_dir: str,
  data: DataConfig,
  *,
  vocabulary: Vocabulary,
  sequence_length: int,
  batch_size: int,
) -> TokenStore:
  """Returns the tokens of both splits, encoded into MODEL_DIR if need be.

  Says on stderr what was encoded, and when SEQUENCE_LENGTH is longer than any
  document.

  Raises:
    UserError: there is no text, the disk is full, or a split holds less than
      one batch of `batch_size` sequences of `sequence_length` tokens.
  """
  corpus = Corpus(data)
  folder = os.path.join(
    model_dir, "tokens", _store_name(corpus, vocabulary, data)
  )
  store = _find_store(folder)
  if store is None:
    write_store(folder, corpus, vocabulary)
    store = read_store(folder)
    corpus.report_skipped()
    say(
      f"encoded {store.train.num_documents:,} training documents "
      f"({store.train.num_tokens:,} tokens) and "
      f"{store.validation.num_documents:,} validation documents "
      f"({store.validation.num_tokens:,} tokens) into {folder}"
    )
  _check_validation_documents(store, data)
  for name, split in (
    ("training", store.train),
    ("validation", store.validation),
  ):
    _check_one_batch(name, split, sequence_length, batch_size)
  longest = store.train.longest_document_tokens
  if sequence_length > longest:
    say(
      f"SEQUENCE_LENGTH = {sequence_length:,} is longer than the longest "
      f"training document ({longest:,} tokens with [eod]): documents are "
      f"joined, so training works, but no token learns from more than "
      f"{longest - 1:,} tokens of its own document."
    )
  return store


def _store_name(
  corpus: Corpus, vocabulary: Vocabulary, data: DataConfig
) -> str:
  parts = (
    FORMAT,
    fingerprint(corpus.files),
    vocabulary.sha256,
    data.validation_share,
  )
  return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _find_store(folder: str) -> TokenStore | None:
  """Returns the store, or None, after removing it, when it is damaged."""
  if not os.path.isdir(folder):
    return None
  try:
    return read_store(folder)
  except DamagedStoreError as error:
    say(f"damaged tokens are encoded anew: {error}")
    with writing(folder, 0):
      shutil.rmtree(folder)
    return None


def _check_validation_documents(store: TokenStore, data: DataConfig) -> None:
  if store.validation.num_documents:
    return
  enough = int(store.lowest_rank * 1000 + 1) / 1000
  fix = (
    "give more files"
    if enough > 0.5 or store.train.num_documents == 1
    else f"set VALIDATION_SHARE = {enough} or give more files"
  )
  raise UserError(
    f"VALIDATION_SHARE = {data.validation_share}: holds out none of "
    f"{store.train.num_documents:,} documents (one file is one document); "
    f"{fix}."
  )


def _check_one_batch(
  name: str, split: Split, sequence_length: int, batch_size: int
) -> None:
  needed = batch_size * sequence_length
  if split.num_tokens >= needed:
    return
  share = "lower" if name == "training" else "raise"
  raise UserError(
    f"{name} text = {split.num_tokens:,} tokens in {split.num_documents:,} "
    f"documents: less than one batch, GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH = "
    f"{batch_size:,} * {sequence_length:,} = {needed:,} tokens; give more "
    f"text, {share} VALIDATION_SHARE, or lower GLOBAL_BATCH_SIZE or "
    f"SEQUENCE_LENGTH."
  )
