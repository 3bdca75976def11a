# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the start of a run on a large token store, which is sparse.

  python -m tools.bench store
  python -m tools.bench store --gigabytes 10000 --document_bytes 100000

Tokens are holes in files, which take no disk space. Where documents begin is
written, in 16 bytes per document. Prints one JSON object.
"""

import argparse
import dataclasses
import os
import resource
import tempfile
from collections.abc import Iterator

import numpy as np

from palm_mtf.config.run import BatchSizes
from palm_mtf.data.batches.corpus import Batches
from palm_mtf.data.batches.row_streams import JoinedStream, TokenSource
from palm_mtf.data.tokens.shard import (
  Counts,
  ShardSummary,
  write_sealed_json,
)
from palm_mtf.data.tokens.store import SHARD_BYTES, TokenStore, read_store
from palm_mtf.machine.host_memory import largest_resident_bytes
from tools.bench.command import Flag
from tools.bench.pairs import time_call

BYTES_PER_TOKEN = 4.3  # of text
ROWS, LENGTH = 512, 2048  # PaLM 540B's first batches
FAR_STEP = 10**9
FLAGS = {
  "--gigabytes": Flag(100, "size of the text"),
  "--document_bytes": Flag(5000, "size of each document"),
  "--open_files": Flag(256, "limit of open files"),
}


def write_sparse_store(
  folder: str, num_bytes: int, document_bytes: int
) -> tuple[int, int]:
  """Writes a store without its text; returns shards and documents."""
  of_shard = SHARD_BYTES // document_bytes
  length = int(document_bytes / BYTES_PER_TOKEN)
  num_shards = -(-num_bytes // SHARD_BYTES)
  ends = length * np.arange(1, of_shard + 1)
  documents = np.stack([ends - length, ends])
  for number in range(num_shards):
    sizes = {"train": of_shard, "validation": 0}
    files = {}
    for split, size in sizes.items():
      name = f"{split}-{number:05d}"
      _write_hole(os.path.join(folder, f"{name}.npy"), size * length)
      path = os.path.join(folder, f"{name}.documents.npy")
      np.save(path, documents[:, :size])
      files |= {f"{name}.npy": "", f"{name}.documents.npy": ""}
    summary = ShardSummary(
      num_read=of_shard,
      lowest_rank=0.5,
      counts={
        split: Counts(
          num_documents=size,
          num_tokens=size * length,
          num_target_tokens=size * length,
          num_bytes=size * document_bytes,
          num_target_bytes=size * document_bytes,
          longest_document_tokens=length,
        )
        for split, size in sizes.items()
      },
      has_inputs=False,
      blake2b=files,
    )
    path = os.path.join(folder, f"shard-{number:05d}.json")
    write_sealed_json(path, dataclasses.asdict(summary))
  path = os.path.join(folder, "manifest.json")
  write_sealed_json(path, {"num_shards": num_shards})
  return num_shards, num_shards * of_shard


def _write_hole(path: str, num_tokens: int) -> None:
  with open(path, "wb") as file:
    header = {"descr": "<u2", "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    file.truncate(file.tell() + 2 * num_tokens)


def _measure_store(folder: str) -> dict[str, float]:
  """Opens a store and reads batches; returns seconds, files and memory."""
  found: dict[str, float] = {}
  store: TokenStore
  batches: Batches

  def open_store() -> None:
    nonlocal store
    store = read_store(folder)

  def plan() -> None:
    nonlocal batches
    source = TokenSource("sparse", 1.0, store.train.tokens)
    stream = JoinedStream([source], LENGTH, eod_id=None, seed=0)
    batches = Batches(stream, BatchSizes(ROWS), None)

  found["open_secs"] = time_call(open_store)
  found["plan_secs"] = time_call(plan)
  found["first_batch_secs"] = time_call(lambda: batches.batch(0))
  found["next_batch_secs"] = time_call(lambda: batches.batch(1))
  found["far_batch_secs"] = time_call(lambda: batches.batch(FAR_STEP))
  found["open_files"] = len(os.listdir("/proc/self/fd"))
  found["peak_gib"] = largest_resident_bytes() / 2**30
  return {name: round(value, 3) for name, value in found.items()}


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Writes a sparse store, yields its record, and removes the store."""
  resource.setrlimit(resource.RLIMIT_NOFILE, (chosen.open_files,) * 2)
  with tempfile.TemporaryDirectory() as folder:
    shards, documents = write_sparse_store(
      folder, chosen.gigabytes * 10**9, chosen.document_bytes
    )
    size = {"gigabytes": chosen.gigabytes, "shards": shards}
    yield {**size, "documents": documents, **_measure_store(folder)}
