# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Encodes documents to token ids, in order, in one worker process per core.

The calling process reads documents, cuts them into parts and gathers parts into
batches. Worker processes encode the batches. Then the calling process joins the
ids of each document's parts.
"""

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from palm_mtf.data.sources.document import Document, Text, cut_text
from palm_mtf.data.vocabulary.answers import ConversationEncoder
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.data.worker_pool import WorkerPool, num_cores

# Texts are encoded in parts of up to _PART_CHARACTERS, cut at line ends if
# possible, because SentencePiece takes some hundred bytes of memory per
# character. Workers get batches of about _BATCH_CHARACTERS.
_PART_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 20
# In a batch, a document counts as its text plus this many characters, because
# its Python objects take memory even if the text is short.
_DOCUMENT_CHARACTERS = 256


class EncodedDocument(NamedTuple):
  """A document and its token ids, without [eod]."""

  split: str  # one of SPLITS
  document: Document
  inputs: np.ndarray  # [num_inputs], int32
  text: np.ndarray  # [num_tokens], int32
  # Answers of a conversation; see ConversationEncoder.encode. None otherwise.
  answers: np.ndarray | None = None


class _Part(NamedTuple):
  text: Text
  is_inside: bool  # False for a text's first part, which may begin with U+2581


class _Cut(NamedTuple):
  """A document whose parts are all in batches; their ids are not joined yet."""

  split: str
  document: Document
  num_inputs: int  # number of parts of the inputs, which come before the text
  num_text: int  # number of parts of the text
  answers: np.ndarray | None


class Encoder(WorkerPool):
  """Encodes documents in worker processes that persist between calls."""

  def __init__(
    self,
    vocabulary: Vocabulary,
    num_processes: int | None = None,
    conversations: ConversationEncoder | None = None,
  ):
    """Prepares workers.

    Args:
      vocabulary: vocabulary that encodes texts.
      num_processes: one per core by default; 0 encodes in this process.
      conversations: encodes conversations, in this process; None if there are
        none.
    """
    self._conversations = conversations
    super().__init__(
      functools.partial(_encode, vocabulary),
      when_killed="a process that encodes text was killed, as happens when "
      "memory runs out; free some and start again: what is encoded is kept.",
      num_processes=num_processes,
    )

  def encode(
    self, documents: Iterable[tuple[str, Document]]
  ) -> Iterator[EncodedDocument]:
    """Encodes each (split, document), in order.

    Raises UserError if a worker process was killed.
    """
    # Two queues in the order of the documents: ids of encoded parts, and
    # documents that wait for the ids of all their parts.
    ids: collections.deque[np.ndarray] = collections.deque()
    waiting: collections.deque[_Cut] = collections.deque()
    for encoded in self.map(self._gather_parts(documents, waiting)):
      ids += encoded
      del encoded  # otherwise its ids stay in memory during the next batch
      while waiting and waiting[0].num_inputs + waiting[0].num_text <= len(ids):
        split, document, num_inputs, num_text, answers = waiting.popleft()
        inputs, text = _take(ids, num_inputs), _take(ids, num_text)
        yield EncodedDocument(split, document, inputs, text, answers)

  def _gather_parts(
    self,
    documents: Iterable[tuple[str, Document]],
    waiting: collections.deque[_Cut],
  ) -> Iterator[list[_Part]]:
    """Yields batches of parts; appends a `_Cut` per document to `waiting`."""
    batch: list[_Part] = []
    size = 0
    for split, document in documents:
      size += _DOCUMENT_CHARACTERS
      num_inputs = num_text = 0
      if document.inputs is not None:
        inputs = list(_cut_parts(document.inputs))
        num_inputs = len(inputs)
        batch += inputs
        size += len(document.inputs)
      text, answers = document.text, None
      if self._conversations and document.conversation:
        text, answers = self._conversations.encode(document.conversation)
      for part in _cut_parts(text):
        num_text += 1
        batch.append(part)
        size += len(part.text)
        if size >= _BATCH_CHARACTERS:
          yield batch
          batch, size = [], 0
      waiting.append(_Cut(split, document, num_inputs, num_text, answers))
    yield batch


def _cut_parts(text: Text) -> Iterator[_Part]:
  if isinstance(text, str) and text:
    for number, part in enumerate(cut_text(text, _PART_CHARACTERS)):
      yield _Part(part, number > 0)
  else:
    yield _Part(text, False)  # token ids, or an empty text, which has one part


def _take(ids: collections.deque[np.ndarray], count: int) -> np.ndarray:
  if count == 1:
    return ids.popleft()
  parts = [ids.popleft() for _ in range(count)]
  return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _encode(vocabulary: Vocabulary, batch: list[_Part]) -> list[np.ndarray]:
  """Returns each part's token ids, int32; a part may already be token ids."""
  parts = [part for part in batch if isinstance(part.text, str)]
  texts, are_inside = [x.text for x in parts], [x.is_inside for x in parts]
  ids = iter(vocabulary.encode_arrays(texts, num_cores(), are_inside))
  return [
    next(ids) if isinstance(part.text, str) else part.text.astype(np.int32)
    for part in batch
  ]
