# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the way from text to batches: encoding, the cache, feeding.

  python -m tools.bench data
  python -m tools.bench data --input '/any/folder/**/*.jsonl' --size 32000

encode  reading, cutting and encoding documents on one core, relative to only
        SentencePiece on the same texts and core
cache   all of `palm_mtf data cache`, on every core
batch   one call of Batches.batch, for the first step and for a far step, for
        one source and for PaLM's mixture of six
"""

import argparse
import os
import resource
import statistics
import tempfile
from collections.abc import Iterator

import sentencepiece

from palm_mtf.config import DataConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.console import configure_logging
from palm_mtf.data.batches.corpus import Batches
from palm_mtf.data.batches.row_streams import JoinedStream, TokenSource
from palm_mtf.data.sources.document import Source
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.tokens.store import TokenStore, read_store, write_store
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from tools.bench.command import Flag
from tools.bench.pairs import POSITIVE, time_call

ROWS, LENGTH = 16, 256  # the quickstart's
FAR_STEP = 10**9  # as fast as step 0, because no table of all steps is made
CALLS = 200
PALM_RATES = (0.5, 0.27, 0.13, 0.05, 0.04, 0.01)
BOUNDS = dict.fromkeys(("*secs", "*mb_per_sec", "ratio*", "ms*"), POSITIVE)
FLAGS = {
  "--input": Flag("{stdlib}/**/*.py", "glob of the text"),
  "--size": Flag(4096, "pieces of the vocabulary"),
  "--rounds": Flag(3, "turns of the two encoders"),
}


def bench_encode(
  source: Source, vocabulary: Vocabulary, rounds: int
) -> dict[str, float]:
  """Returns speeds of encoding on one core, in MB of text per second."""
  texts = [document.text for _, document in source.documents()]
  megabytes = sum(len(text.encode()) for text in texts) / 1e6
  direct = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)

  def encode_directly():
    for text in texts:
      direct.Encode(text)

  def encode_ours():
    with Encoder(vocabulary, num_processes=0) as encoder:
      for _ in encoder.encode(source.documents()):
        pass

  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {min(cores)})
  try:
    # Take turns, so that other load on the core slows both. The ratio is the
    # median over rounds; 1 means as fast as only SentencePiece.
    secs = [
      (time_call(encode_ours), time_call(encode_directly))
      for _ in range(rounds)
    ]
  finally:
    os.sched_setaffinity(0, cores)
  ratios = [theirs / ours for ours, theirs in secs]
  ours, theirs = map(statistics.median, zip(*secs, strict=True))
  return {
    "mb_per_sec": megabytes / ours,
    "direct_mb_per_sec": megabytes / theirs,
    "ratio": statistics.median(ratios),
    "ratio_min": min(ratios),
    "ratio_max": max(ratios),
  }


def bench_cache(
  source: Source, vocabulary: Vocabulary, folder: str
) -> tuple[dict[str, float], TokenStore]:
  """Writes a token store; returns its figures, and the store."""
  secs = time_call(write_store, folder, source, vocabulary)
  store = read_store(folder)
  counts = store.train.counts + store.validation.counts
  num_bytes = sum(entry.stat().st_size for entry in os.scandir(folder))
  # Worker processes encode. The peak of this process is due to one shard.
  kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return {
    "text_mb": counts.num_bytes / 1e6,
    "secs": secs,
    "mb_per_sec": counts.num_bytes / 1e6 / secs,
    "bytes_per_token": num_bytes / counts.num_tokens,
    "text_bytes_per_token": counts.num_bytes / counts.num_tokens,
    "peak_memory_mb": kilobytes / 1e3,
  }, store


def bench_batch(store: TokenStore, rates: tuple[float, ...]) -> dict:
  """Returns milliseconds per batch, mixed from one source per rate."""
  sources = [
    TokenSource(str(i), rate, store.train.tokens)
    for i, rate in enumerate(rates)
  ]
  rows = JoinedStream(sources, LENGTH, eod_id=None, seed=0)
  batches = Batches(rows, BatchSizes(ROWS))

  def read(first: int) -> float:
    secs = [time_call(batches.batch, first + i) for i in range(CALLS)]
    return 1e3 * statistics.median(secs)

  return {"sources": len(rates), "ms": read(0), "ms_far": read(FAR_STEP)}


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields the record of the cache, of encoding, and of two kinds of batch."""
  configure_logging()
  data = DataConfig(
    text_files=chosen.input, vocabulary=None, validation_share=0.02
  )
  with tempfile.TemporaryDirectory() as folder:
    vocabulary = load_vocabulary(folder, data, vocab_size=chosen.size)
    (source,) = open_sources(data)
    # Measure the cache first, because its peak memory is measured, and encoding
    # holds all texts in a list.
    result, store = bench_cache(source, vocabulary, f"{folder}/store")
    yield {"benchmark": "cache", **result}
    result = bench_encode(source, vocabulary, chosen.rounds)
    yield {"benchmark": "encode", **result}
    for rates in ((1.0,), PALM_RATES):
      yield {"benchmark": "batch", **bench_batch(store, rates)}


def row(record: dict) -> str:
  """Returns a line with the name and every figure of a record."""
  name, *figures = (
    f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
    for key, value in record.items()
  )
  return f"{name.split()[1]:8}{'  '.join(figures)}"
