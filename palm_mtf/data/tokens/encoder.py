# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents to token ids, in order, by as many processes as there are cores.

This process reads documents, cuts their text into parts of whole lines (what
SentencePiece encodes needs some hundred bytes a character) and gathers parts
into batches; worker processes encode the batches; this process puts the parts
together again. A corpus of any number of files, one included, so keeps all
cores busy. A few batches are in memory at a time, and one document.

The first batches are encoded here: starting processes takes longer.
"""

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from palm_mtf.console import configure_logging
from palm_mtf.data.sources.document import Document, Text, cut_text
from palm_mtf.data.vocabulary.vocabulary import Vocabulary, num_cores
from palm_mtf.errors import UserError

_PART_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 20
_DOCUMENT_CHARACTERS = 256  # so much memory a document takes beside its text
_BATCHES_BEFORE_PROCESSES = 16

_vocabulary: Vocabulary  # of a worker process


@dataclasses.dataclass
class EncodedDocument:
  """A document and its token ids, without [eod].

  Attributes:
    split: one of SPLITS.
    document: as it was read.
    inputs: ids of its inputs, [num_inputs], int32.
    text: ids of its text, [num_tokens], int32.
  """

  split: str
  document: Document
  inputs: np.ndarray
  text: np.ndarray


@dataclasses.dataclass
class _Waiting:
  """A document that is being encoded; `num_inputs` and `num_text` in parts."""

  split: str
  document: Document
  num_inputs: int = 0
  num_text: int | None = None  # not all of them have been cut yet
  parts: list[np.ndarray] = dataclasses.field(default_factory=list)

  def finished(self) -> EncodedDocument | None:
    """Returns the encoded document, or None while parts are missing."""
    if self.num_text is None:
      return None
    if len(self.parts) < self.num_inputs + self.num_text:
      return None
    return EncodedDocument(
      self.split,
      self.document,
      _join(self.parts[: self.num_inputs]),
      _join(self.parts[self.num_inputs :]),
    )


class Encoder:
  """Encodes documents; keeps its processes from one call to the next.

  Use it as a context manager: it ends its processes.
  """

  def __init__(self, vocabulary: Vocabulary, num_processes: int | None = None):
    """Readies an encoder.

    Args:
      vocabulary: vocabulary of the ids.
      num_processes: worker processes; one a core by default, 0 for none.
    """
    self._vocabulary = vocabulary
    if num_processes is None:
      num_processes = num_cores()
    self._num_processes = num_processes
    self._num_batches = 0
    self._stack = contextlib.ExitStack()
    self._pool: futures.Executor | None = None

  def __enter__(self) -> "Encoder":
    return self

  def __exit__(self, *unused: object) -> None:
    self._stack.close()

  def encode(
    self, documents: Iterable[tuple[str, Document]]
  ) -> Iterator[EncodedDocument]:
    """Yields every (split, document) with its ids, in order.

    Raises:
      UserError: a worker process was killed.
    """
    waiting: collections.deque[_Waiting] = collections.deque()
    running: collections.deque[futures.Future] = collections.deque()
    try:
      for batch in _batches(documents, waiting):
        running.append(self._submit(batch))
        if len(running) > 2 * self._num_processes:
          yield from _hand_out(running.popleft().result(), waiting)
      while running:
        yield from _hand_out(running.popleft().result(), waiting)
    except BrokenProcessPool:
      raise UserError(
        "a process that encodes text was killed, as happens when memory runs "
        "out; free some and start again: what is encoded is kept."
      ) from None

  def _submit(self, batch: list[Text]) -> futures.Future:
    self._num_batches += 1
    if (
      not self._num_processes or self._num_batches <= _BATCHES_BEFORE_PROCESSES
    ):
      done: futures.Future = futures.Future()
      done.set_result(_encode(self._vocabulary, batch, num_cores()))
      return done
    if self._pool is None:
      self._pool = self._stack.enter_context(
        futures.ProcessPoolExecutor(
          self._num_processes,
          # A forked process would share locks of this one's threads.
          mp_context=multiprocessing.get_context("spawn"),
          initializer=_start_worker,
          initargs=(self._vocabulary.path,),
        )
      )
    return self._pool.submit(_encode_in_worker, batch)


def _batches(
  documents: Iterable[tuple[str, Document]],
  waiting: collections.deque[_Waiting],
) -> Iterator[list[Text]]:
  """Yields parts to encode; enters in `waiting` whose they are."""
  batch: list[Text] = []
  size = 0
  for split, document in documents:
    waiting.append(one := _Waiting(split, document))
    size += _DOCUMENT_CHARACTERS
    if document.inputs is not None:
      inputs = list(_cut(document.inputs))
      one.num_inputs = len(inputs)
      batch += inputs
      size += len(document.inputs)
    num_text = 0
    for part in _cut(document.text):
      num_text += 1
      batch.append(part)
      size += len(part)
      if size >= _BATCH_CHARACTERS:
        yield batch
        batch, size = [], 0
    one.num_text = num_text
  yield batch


def _cut(text: Text) -> Iterable[Text]:
  if isinstance(text, str) and text:
    return cut_text(text, _PART_CHARACTERS)
  return [text]  # an empty text has a part too


def _hand_out(
  encoded: list[np.ndarray], waiting: collections.deque[_Waiting]
) -> Iterator[EncodedDocument]:
  """Gives each part to its document; yields the documents that are whole."""
  parts = iter(encoded)
  while waiting:
    first = waiting[0]
    while (done := first.finished()) is None:
      part = next(parts, None)
      if part is None:
        return
      first.parts.append(part)
    waiting.popleft()
    yield done


def _join(parts: list[np.ndarray]) -> np.ndarray:
  if len(parts) == 1:
    return parts[0]
  return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _encode(
  vocabulary: Vocabulary, batch: list[Text], num_threads: int
) -> list[np.ndarray]:
  """Returns the ids of every part; those that are ids already stay."""
  texts = [part for part in batch if isinstance(part, str)]
  ids = iter(vocabulary.encode_arrays(texts, num_threads))
  return [
    next(ids) if isinstance(part, str) else part.astype(np.int32)
    for part in batch
  ]


def _start_worker(vocabulary_path: str) -> None:
  global _vocabulary
  threading.Thread(target=_end_with_parent, daemon=True).start()
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops it
  configure_logging()
  _vocabulary = Vocabulary(vocabulary_path)


def _end_with_parent() -> None:
  """Ends this worker when its parent was killed, which nothing else tells."""
  multiprocessing.parent_process().join()
  os._exit(1)


def _encode_in_worker(batch: list[Text]) -> list[np.ndarray]:
  return _encode(_vocabulary, batch, 1)
