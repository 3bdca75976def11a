# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the search for duplicates needs of documents, by worker processes."""

from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.near_duplicates import (
  NUM_VALUES,
  minhash,
  text_digest,
)


class Measures(NamedTuple):
  """Measures of a batch of documents."""

  digests: bytes  # 16 of each document
  values: bytes  # MinHash values, uint16; none where they are not asked for


class Measurer(NamedTuple):
  """A function of batches of documents.

  Attributes:
    near: whether near duplicates are looked for.
  """

  near: bool

  def __call__(self, batch: Sequence[Document]) -> Measures:
    """Returns the measures of the documents of a batch."""
    digests = [text_digest(document) for document in batch]
    values = []
    if self.near:
      pairs = zip(batch, digests, strict=True)
      values = [minhash(*pair).tobytes() for pair in pairs]
    return Measures(b"".join(digests), b"".join(values))

  @property
  def num_values(self) -> int:
    """MinHash values of a document."""
    return NUM_VALUES if self.near else 0
