# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents, and the protocol of the sources that yield them.

The files of TEXT_FILES are one source (text_files.py). A SeqIO task is one
source, and a SeqIO mixture is one source per task (seqio_task.py).
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from palm_mtf.console import progress_bar
from palm_mtf.data.sources.conversation import TEXTS, Conversation
from palm_mtf.data.sources.files import FileDigests
from palm_mtf.json_text import json_text

Text = str | np.ndarray  # an array holds token ids, [num_tokens]

TRAIN, VALIDATION = SPLITS = ("train", "validation")


class Document(NamedTuple):
  """A plain text, an example with inputs and targets, or a conversation.

  Training learns plain texts, targets and the answers of conversations. Of two
  answers it learns to prefer the chosen one.
  """

  text: Text  # the plain text, the example's targets, or all messages' contents
  inputs: Text | None = None  # None for a plain text
  weight: float = 1.0  # mean number of reads per epoch, at least 0
  quality: float | None = None  # the user's score (QUALITY_FIELD), for filters
  conversation: Conversation | None = None
  is_excluded: bool = False  # by ATTRIBUTE_FILTERS

  def digest(self, num_bytes: int = 16, purpose: str = "") -> bytes:
    """Returns a BLAKE2b hash of inputs and text; `purpose` acts as a salt."""
    digest = hashlib.blake2b(digest_size=num_bytes, person=purpose.encode())
    digest.update(_bytes(self.text))
    if self.conversation is not None:
      messages, _, _, rejected, tools = self.conversation
      # Texts have no NUL, so a NUL shows where each part begins.
      for part in filter(None, (messages, rejected, tools)):
        digest.update(b"\0" + json_text(part).encode())
    if self.inputs is not None:
      # Texts have no NUL, so a NUL shows where the inputs begin.
      digest.update(b"\0" + _bytes(self.inputs))
    return digest.digest()

  # A source without a validation split holds out documents whose rank is below
  # VALIDATION_SHARE. Equal texts have equal ranks, so they share a split.
  @property
  def rank(self) -> float:
    """A hash of inputs and text, uniform over [0, 1)."""
    return _uniform(self.digest(6))

  @property
  def form(self) -> str:
    """TEXTS, or the form of the conversation."""
    return self.conversation.form if self.conversation else TEXTS

  @property
  def num_bytes(self) -> int:
    """Size of inputs and text in bytes, as UTF-8 or as arrays of token ids."""
    inputs = b"" if self.inputs is None else _bytes(self.inputs)
    return len(_bytes(self.text)) + len(inputs)

  @property
  def num_target_bytes(self) -> int:
    """Size of the text that is learned, in bytes; see `num_bytes`.

    An answer's calls of tools count as JSON.
    """
    if self.conversation is None:
      return len(_bytes(self.text))
    texts, messages = self.conversation.texts, self.conversation.messages
    learned = [texts[i] for i in self.conversation.answers]
    calls = [messages[i].get("tool_calls") for i in self.conversation.answers]
    learned += [json_text(x) for x in calls if x]
    return sum(len(x.encode()) for x in learned)


def num_repeats(document: Document) -> int:
  """Returns how often each epoch reads a document; the mean is its weight."""
  times = int(document.weight)
  rest = document.weight - times
  if not rest:
    return times
  # Of the documents with weight 2.25, a quarter are read 3 times and the rest 2
  # times. The hash that decides this is independent of `rank`.
  return times + (_uniform(document.digest(6, "repeats")) < rest)


class Source(Protocol):
  """A corpus, or a part of it, as a stream of documents in a fixed order."""

  name: str  # for messages, statistics and the name of the token store
  rate: float  # mixing rate; the rates of all sources sum to 1
  has_inputs: bool  # whether documents have inputs, which have no loss
  form: str  # form of all documents: TEXTS, or that of their conversations
  num_bytes: int | None  # size of all documents' text; None if unknown

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of everything that decides the documents and their splits.

    Tokens are stored under this hash, so that changed text is encoded again.
    `digests` is a cache of file hashes; without it, every file is hashed.
    """

  def check_vocabulary(self, sha256: str | None) -> None:
    """Raises UserError if documents are token ids of another vocabulary.

    `sha256` is the hash of the run's vocabulary, in hexadecimal; None if the
    run has not trained its vocabulary yet.
    """

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document) for each document; `split` is one of SPLITS.

    Raises UserError if a file cannot be read, a line is invalid or the user's
    code fails, as the message says; or there is no document.
    """

  def report_skipped(self) -> None:
    """Warns if the latest call of `documents` skipped any text."""


def conversation_document(
  conversation: Conversation, **fields: Any
) -> Document:
  """Returns a conversation as a document; `fields` are others of Document."""
  text = "\n".join(conversation.texts)
  return Document(text, conversation=conversation, **fields)


def read_with_progress(
  source: Source, action: str
) -> Iterator[tuple[str, Document]]:
  """Yields a source's documents; `action` labels the progress bar."""
  with progress_bar(f"{action} {source.name}", source.num_bytes) as advance:
    for split, document in source.documents():
      yield split, document
      advance(document.num_bytes)


def decode_text(content: bytes) -> str | None:
  """Decodes UTF-8; returns None if `content` is not UTF-8 or has a NUL."""
  try:
    return None if b"\0" in content else content.decode("utf-8")
  except UnicodeDecodeError:
    return None


def cut_text(text: str, max_characters: int) -> Iterator[str]:
  """Yields parts of up to `max_characters`, split at line ends if possible.

  SentencePiece gets a long text in parts, which bounds its memory.
  """
  start = 0
  while start < len(text):
    end = start + max_characters
    if end < len(text):
      end = text.rfind("\n", start, end) + 1 or end
    yield text[start:end]
    start = end


def hash_parts(parts: Sequence[object], num_bytes: int = 16) -> str:
  """Returns a hash of `repr(parts)`, in hexadecimal, for fingerprints."""
  content = repr(parts).encode()
  return hashlib.blake2b(content, digest_size=num_bytes).hexdigest()


def mix_bits(numbers: np.ndarray) -> np.ndarray:
  """Hashes [...], uint64, in place (SplitMix64), for shuffles and n-grams."""
  numbers ^= numbers >> 30
  numbers *= 0xBF58476D1CE4E5B9
  numbers ^= numbers >> 27
  numbers *= 0x94D049BB133111EB
  numbers ^= numbers >> 31
  return numbers


def _uniform(digest: bytes) -> float:
  return int.from_bytes(digest, "little") / 2.0**48  # exact, so it is below 1


def _bytes(text: Text) -> bytes:
  return text.encode() if isinstance(text, str) else text.tobytes()
