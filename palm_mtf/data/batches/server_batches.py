# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches that a TensorFlow server reads itself, so that the client sends none.

A server must be able to open the files of the run's tokens; otherwise the
client sends the batches. The client's session calls `find_batches` and
`read_batch`. Strings are UTF-8 bytes, as in TensorFlow.
"""

import functools
import json
import os
import secrets
import sys
import threading
from types import SimpleNamespace

import numpy as np

from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.corpus import Corpus, Prefetcher
from palm_mtf.data.batches.neighbours import NeighbourIndex
from palm_mtf.data.batches.packing import from_json, to_json
from palm_mtf.data.tokens.store import read_store
from palm_mtf.json_text import json_text
from palm_mtf.runtime.host_functions import host_function

# Part of a client's specs, so that clients share no spec. A server has one
# `_Reader` per spec, because a reader reads ahead for only one client.
_CLIENT = secrets.token_hex(8)

# Fields of a corpus that a spec has as they are.
_SETTINGS = tuple("packing sequence_length eod_id seed first virtual".split())


def batches_spec(corpus: Corpus, sizes: BatchSizes, skips: Skips) -> str:
  """Returns all that determines the training batches, as JSON for servers."""
  return json_text(
    {
      "stores": [os.path.abspath(x.folder) for x in corpus.stores],
      "sources": [[x.name, x.rate, x.form] for x in corpus.sources],
      "settings": {name: getattr(corpus, name) for name in _SETTINGS},
      "objective": to_json(corpus.objective),
      "neighbours": corpus.neighbours and corpus.neighbours.given,
      "fingerprint": corpus.fingerprint,
      "sizes": sizes.pairs,
      "skips": skips.ranges,
      "client": _CLIENT,
    }
  )


@host_function
def find_batches(spec: bytes) -> bytes:
  """Opens the batches of `spec`; returns b"" for success, or an error text."""
  try:
    _open_reader(spec)
  except Exception as error:  # then the client sends all batches
    return f"{type(error).__name__}: {error}".encode()
  return b""


@host_function
def read_batch(
  spec: bytes, step: np.int64, part: np.int32, num_parts: np.int32
) -> tuple[np.ndarray, ...]:
  """Returns a part of a batch, and starts to read this part of the next batch.

  The arguments after `spec` are those of `Batches.batch`; the arrays are in the
  order of `Batches.features`.
  """
  return _open_reader(spec).read(int(step), int(part), int(num_parts))


class _Reader:
  """Makes the batches that a spec describes, each one step before its use."""

  def __init__(self, spec: bytes):
    held = json.loads(spec)
    index = held["neighbours"]
    corpus = Corpus(
      # Batches need no more of a source: its tokens are in `stores`.
      sources=[
        SimpleNamespace(name=x, rate=y, form=z) for x, y, z in held["sources"]
      ],
      stores=[read_store(x) for x in held["stores"]],
      objective=from_json(held["objective"]),
      neighbours=index and NeighbourIndex(*index),
      **held["settings"],
    )
    if corpus.fingerprint != held["fingerprint"]:
      raise ValueError("these are other tokens")
    self._batches = corpus.batches(
      BatchSizes(held["sizes"]), Skips(held["skips"])
    )
    self._ahead: dict[tuple[int, int], Prefetcher] = {}
    self._lock = threading.Lock()

  def read(self, step: int, part: int, num_parts: int) -> tuple:
    key = part, num_parts
    with self._lock:
      if key not in self._ahead:
        batch_of = functools.partial(
          self._batches.batch, part=part, num_parts=num_parts
        )
        self._ahead[key] = Prefetcher(batch_of, sys.maxsize, depth=1)
    batch = self._ahead[key].batch(step)
    return tuple(batch[name] for name in self._batches.features)


# Keep two readers for each of 16 clients, because a client's previous training
# loop may still read. If a reader was dropped, the next call opens it again.
_open_reader = functools.lru_cache(maxsize=32)(_Reader)
