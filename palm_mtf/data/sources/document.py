# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run learns from: documents, and named sources that yield them.

A source is TEXT_FILES (text_files.py) or one SeqIO task (seqio_task.py); a
SeqIO mixture is several sources, each with its rate. Which documents are held
out does not depend on their order or place, and equal texts are never on both
sides: where a source has no validation split of its own, the documents whose
`rank`, a hash of their text, lies below VALIDATION_SHARE are held out.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from palm_mtf.data.sources.file_hashes import FileDigests

Text = str | np.ndarray  # or token ids, [num_tokens], where a task makes them

TRAIN, VALIDATION = SPLITS = ("train", "validation")


class Document(NamedTuple):
  """A text, or an example with inputs and targets.

  Attributes:
    text: what is learnt: the document, or the targets of an example.
    inputs: what is given before it and not learnt; None for a document.
    weight: how often it comes in an epoch, at least 0; see `num_repeats`.
  """

  text: Text
  inputs: Text | None = None
  weight: float = 1.0

  @property
  def rank(self) -> float:
    """A hash of inputs and text, spread evenly over [0, 1)."""
    return _hash(self)

  @property
  def num_bytes(self) -> int:
    """Size of text and inputs in UTF-8; of token ids, in memory."""
    inputs = b"" if self.inputs is None else _bytes(self.inputs)
    return len(_bytes(self.text)) + len(inputs)


def num_repeats(document: Document) -> int:
  """Returns how many times a document comes in every epoch.

  Its weight is cut to a whole number; what is cut off is the share of documents
  that come once more, chosen by a hash of their text that has nothing to do
  with `rank`. Weights of 2.25 so give 2 or 3, and 2.25 on average.
  """
  times = int(document.weight)
  rest = document.weight - times
  if not rest:
    return times
  return times + (_hash(document, "repeats") < rest)


class Source(Protocol):
  """Documents in a fixed order; one of them is in memory at a time.

  Attributes:
    name: names it in messages, statistics and the cache.
    rate: its share of the rows of a run; the rates of all sources add up to 1.
    has_inputs: whether its documents are examples.
    num_bytes: size of its text on disk, or None where that is unknown.
  """

  name: str
  rate: float
  has_inputs: bool
  num_bytes: int | None

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of all that decides its documents and their splits.

    Args:
      digests: hashes of the files, kept between runs; None reads every file.
    """

  def check_vocabulary(self, sha256: str | None) -> None:
    """Raises UserError if its documents are ids of another vocabulary.

    Args:
      sha256: hash of the run's SentencePiece model, in hexadecimal; None where
        the run is to train one.
    """

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document), the split one of SPLITS.

    Raises:
      UserError: a file cannot be read, or a line is broken; names both.
    """

  def report_skipped(self) -> None:
    """Warns of what the latest reading left out, if anything."""


def _hash(document: Document, purpose: str = "") -> float:
  """Returns a number in [0, 1) that other purposes tell nothing about."""
  digest = hashlib.blake2b(digest_size=6, person=purpose.encode())
  digest.update(_bytes(document.text))
  if document.inputs is not None:
    digest.update(b"\0" + _bytes(document.inputs))  # no text holds a NUL
  # Exact: a float has 53 bits.
  return int.from_bytes(digest.digest(), "little") / 2.0**48


def _bytes(text: Text) -> bytes:
  return text.encode() if isinstance(text, str) else text.tobytes()


def cut_text(text: str, max_characters: int) -> Iterator[str]:
  """Yields `text` in parts of at most `max_characters`, whole lines if it can.

  A text that fits is one part; the parts joined are the text.
  """
  start = 0
  while start < len(text):
    end = start + max_characters
    if end < len(text):
      end = text.rfind("\n", start, end) + 1 or end
    yield text[start:end]
    start = end
