# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf data cache`: encodes the documents of a run into CACHE_DIR."""

# A token store holds the tokens of one source. Training with the same CACHE_DIR
# reads the stores, and encodes only sources without a store. A store is found
# by the hash of its text, so that runs share the store even if they read this
# text from different paths.

import os
import time

from palm_mtf.config import CorpusConfig
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.tokens.store import TokenStore, cache_stores
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.json_text import json_text


def data_cache(
  *, model_dir: str, config: CorpusConfig, verify: bool, as_json: bool
) -> None:
  """Encodes sources that CACHE_DIR lacks; prints the size of each token store.

  MODEL_DIR holds the vocabulary if VOCABULARY is not set, and the token stores
  if CACHE_DIR is not set.
  """
  model, data = config.model, config.data
  # If VOCABULARY is None, read MODEL_DIR's vocabulary, or train it if missing.
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  sources = open_filtered(model_dir, data, model.sequence_length)
  start = time.perf_counter()
  # Stores are written shard by shard: if this command is killed, the same
  # command resumes after the last complete shard.
  stores = cache_stores(model_dir, data, sources, vocabulary, verify=verify)
  secs = time.perf_counter() - start
  for source, (path, store) in zip(sources, stores, strict=True):
    result = {"source": source.name, "path": path, **_describe(path, store)}
    lines = [
      f"{name:24} {_format_value(value)}\n" for name, value in result.items()
    ]
    print(json_text(result) if as_json else "".join(lines))
  if not as_json:
    print(f"{'secs':24} {secs:.1f}")


def _describe(path: str, store: TokenStore) -> dict[str, int | float]:
  counts = store.train.counts + store.validation.counts
  size = sum(entry.stat().st_size for entry in os.scandir(path))
  # `size` includes the manifest and the shards' headers, which are small.
  return {
    **(store.filter_counts or {}),
    "training_documents": store.train.counts.num_documents,
    "validation_documents": store.validation.counts.num_documents,
    "training_tokens": store.train.counts.num_tokens,
    "validation_tokens": store.validation.counts.num_tokens,
    "text_bytes": counts.num_bytes,
    "text_bytes_per_token": counts.num_bytes / max(1, counts.num_tokens),
    "disk_bytes": size,
    "disk_bytes_per_token": size / max(1, counts.num_tokens),
  }


def _format_value(value: str | int | float) -> str:
  if isinstance(value, str):
    return value
  return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
