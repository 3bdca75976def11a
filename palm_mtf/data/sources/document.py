# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents, and the protocol of the sources that yield them.

A source is TEXT_FILES (text_files.py) or one SeqIO task (seqio_task.py); a
SeqIO mixture is several sources, each with its rate.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from palm_mtf.data.sources.files import FileDigests

Text = str | np.ndarray  # or token ids, [num_tokens], where a task makes ids

TRAIN, VALIDATION = SPLITS = ("train", "validation")


class Document(NamedTuple):
  """A text, or an example with inputs and targets."""

  text: Text  # learned: the document, or the targets of an example
  inputs: Text | None = None  # given, not learned; None for a document
  weight: float = 1.0  # repeats per epoch, at least 0; see `num_repeats`
  quality: float | None = None  # a score that the user computed

  def digest(self, num_bytes: int, purpose: str = "") -> bytes:
    """Returns a BLAKE2b hash of inputs and text that depends on `purpose`."""
    digest = hashlib.blake2b(digest_size=num_bytes, person=purpose.encode())
    digest.update(_bytes(self.text))
    if self.inputs is not None:
      digest.update(b"\0" + _bytes(self.inputs))  # no text holds a NUL
    return digest.digest()

  # If a source has no validation split, its documents with a rank below
  # VALIDATION_SHARE are held out. So the choice depends neither on the order of
  # documents nor on their files, and equal texts are always in the same split.
  @property
  def rank(self) -> float:
    """A hash of inputs and text, uniform over [0, 1)."""
    return _uniform(self.digest(6))

  @property
  def num_bytes(self) -> int:
    """Size in bytes of inputs and text: as UTF-8, or of token ids in memory."""
    inputs = b"" if self.inputs is None else _bytes(self.inputs)
    return len(_bytes(self.text)) + len(inputs)


def num_repeats(document: Document) -> int:
  """Returns how many times every epoch reads a document."""
  times = int(document.weight)
  rest = document.weight - times
  if not rest:
    return times
  # A document of weight 2.25 is read 2 or 3 times, on average 2.25 times. A
  # hash of its text decides, independently of the hash that decides its split.
  return times + (_uniform(document.digest(6, "repeats")) < rest)


class Source(Protocol):
  """Documents in a fixed order; only one is in memory at a time."""

  name: str  # in messages, statistics and the token cache
  rate: float  # share of a run's rows or tokens; rates of all sources sum to 1
  has_inputs: bool  # whether its documents are examples
  num_bytes: int | None  # size of its text on disk; None where unknown

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of everything that decides the documents and their splits.

    Args:
      digests: cache of the files' hashes; if None, every file is hashed.
    """

  def check_vocabulary(self, sha256: str | None) -> None:
    """Raises UserError if documents are token ids of another vocabulary.

    Args:
      sha256: hash of the run's SentencePiece model, in hexadecimal; None if the
        run has yet to train the model.
    """

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document) for each document; `split` is one of SPLITS.

    Every call reads all text.

    Raises:
      UserError: a file cannot be read, or a line is invalid; the message names
        the file and the line.
    """

  def report_skipped(self) -> None:
    """Warns if the latest call of `documents` left out any text."""


def decode_text(content: bytes) -> str | None:
  """Decodes UTF-8; returns None if `content` is not UTF-8 or has a NUL."""
  try:
    return None if b"\0" in content else content.decode("utf-8")
  except UnicodeDecodeError:
    return None


def cut_text(text: str, max_characters: int) -> Iterator[str]:
  """Yields parts of at most `max_characters`, cut at line ends if possible."""
  start = 0
  while start < len(text):
    end = start + max_characters
    if end < len(text):
      end = text.rfind("\n", start, end) + 1 or end
    yield text[start:end]
    start = end


def hash_parts(parts: Sequence[object], num_bytes: int = 16) -> str:
  """Returns a hash of the `repr` of `parts`, in hexadecimal."""
  content = repr(parts).encode()
  return hashlib.blake2b(content, digest_size=num_bytes).hexdigest()


def _uniform(digest: bytes) -> float:
  return int.from_bytes(digest, "little") / 2.0**48  # exact in 53 bits


def _bytes(text: Text) -> bytes:
  return text.encode() if isinstance(text, str) else text.tobytes()
