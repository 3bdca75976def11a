# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run learns from: documents, and named sources that yield them.

A source is TEXT_FILES (documents.py) or one SeqIO task (seqio_sources.py); a
SeqIO mixture is several sources, each with its rate. Which documents are held
out does not depend on their order or place, and equal texts are never on both
sides: where a source has no validation split of its own, the documents whose
`rank`, a hash of their text, lies below VALIDATION_SHARE are held out.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

Text = str | np.ndarray  # or token ids, [num_tokens], where a task makes them

TRAIN, VALIDATION = SPLITS = ("train", "validation")


class Document(NamedTuple):
  """A text, or an example with inputs and targets.

  Attributes:
    text: what is learnt: the document, or the targets of an example.
    inputs: what is given before it and not learnt; None for a document.
    weight: how often it comes in an epoch.
  """

  text: Text
  inputs: Text | None = None
  weight: float = 1.0

  @property
  def rank(self) -> float:
    """A hash of inputs and text, spread evenly over [0, 1)."""
    digest = hashlib.blake2b(_bytes(self.text), digest_size=6)
    if self.inputs is not None:
      digest.update(b"\0" + _bytes(self.inputs))  # no text holds a NUL
    # Exact: a float has 53 bits.
    return int.from_bytes(digest.digest(), "little") / 2.0**48

  @property
  def num_bytes(self) -> int:
    """Size of text and inputs in UTF-8; of token ids, in memory."""
    inputs = b"" if self.inputs is None else _bytes(self.inputs)
    return len(_bytes(self.text)) + len(inputs)


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

  def fingerprint(self) -> str:
    """Returns a hash of all that decides its documents and their splits."""

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document), the split one of SPLITS.

    Raises:
      UserError: a file cannot be read, or a line is broken; names both.
    """

  def report_skipped(self) -> None:
    """Says on stderr what the latest reading left out, if anything."""


def _bytes(text: Text) -> bytes:
  return text.encode() if isinstance(text, str) else text.tobytes()
