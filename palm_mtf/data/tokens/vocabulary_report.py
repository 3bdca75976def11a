# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts a vocabulary's pieces by kind, and measures how it encodes texts."""

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from palm_mtf.data.sources.document import TRAIN, Document
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.vocabulary.vocabulary import EACH_BYTE, Vocabulary

_NUM_LONGEST = 5
_CONTEXT = 10  # characters shown before and after the first difference


@dataclasses.dataclass(frozen=True)
class Pieces:
  """How many pieces of each kind a vocabulary has."""

  control: int  # never part of a text: padding, end of document, unknown
  byte: int  # byte pieces, and pieces that end within a character
  digit: int  # one decimal digit of any script
  joined_digits: int  # longer pieces that hold a digit; PaLM has none
  white_space: int  # runs of two or more spaces, tabs and line ends
  other: int  # all other learned pieces
  longest: list[str]  # the longest pieces of `other`, longest first
  first_joined_digits: str  # an example; "" if there is none


def count_pieces(vocabulary: Vocabulary) -> Pieces:
  """Counts a vocabulary's pieces by kind."""
  kinds = {"control": [], "byte": [], "digit": [], "joined_digits": []}
  kinds |= {"white_space": [], "other": []}
  for i in range(vocabulary.size):
    text = vocabulary.token_bytes(i).decode(errors=EACH_BYTE)
    kinds[_kind_of(vocabulary, i, text)].append(text)
  longest = sorted(kinds["other"], key=lambda x: (-len(x), x))[:_NUM_LONGEST]
  joined = kinds["joined_digits"]
  return Pieces(
    **{kind: len(pieces) for kind, pieces in kinds.items()},
    longest=longest,
    first_joined_digits=joined[0] if joined else "",
  )


class Fit:
  """Statistics of how a vocabulary encodes texts."""

  def __init__(self, vocabulary: Vocabulary):
    self._vocabulary = vocabulary
    self.num_documents = 0
    self.num_bytes = 0  # size of the texts in UTF-8
    self.counts = np.zeros(vocabulary.size, np.int64)  # number of tokens per id
    self.num_changed = 0  # texts that decode(encode(text)) changes
    self.first_change = ""  # where and how the first of these texts changes

  @property
  def num_tokens(self) -> int:
    """Number of tokens in all texts, without [eod]."""
    return int(self.counts.sum())

  @property
  def num_used(self) -> int:
    """Number of pieces that occur in the encoded texts."""
    return int((self.counts > 0).sum())

  @property
  def byte_share(self) -> float:
    """Share of the tokens that are byte pieces or parts of characters."""
    made = int(self.counts[self._vocabulary.is_byte].sum())
    return made / max(1, self.num_tokens)

  @property
  def tokens_per_byte(self) -> float:
    """Tokens per byte of text."""
    return self.num_tokens / max(1, self.num_bytes)

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text per token."""
    return self.num_bytes / max(1, self.num_tokens)

  def add(self, text: str, ids: np.ndarray) -> None:
    """Counts a text's tokens `ids`, and compares the text with their text."""
    self.num_documents += 1
    self.num_bytes += len(text.encode())
    np.add.at(self.counts, ids, 1)
    again = self._vocabulary.decode(ids)
    if again != text:
      self.num_changed += 1
      self.first_change = self.first_change or (
        f"document {self.num_documents:,}: {_show_difference(text, again)}"
      )


def measure_fit(vocabulary: Vocabulary, texts: Iterable[str]) -> Fit:
  """Measures how a vocabulary encodes texts."""
  fit = Fit(vocabulary)
  with Encoder(vocabulary) as encoder:
    for each in encoder.encode((TRAIN, Document(text)) for text in texts):
      fit.add(each.document.text, each.text)
  return fit


def _kind_of(vocabulary: Vocabulary, i: int, text: str) -> str:
  if vocabulary.is_control(i):
    return "control"
  if vocabulary.is_byte[i]:
    return "byte"
  if any(map(str.isdecimal, text)):
    return "digit" if len(text) == 1 else "joined_digits"
  if len(text) > 1 and not text.strip():
    return "white_space"
  return "other"


def _show_difference(before: str, after: str) -> str:
  pairs = enumerate(itertools.zip_longest(before, after))
  same = next(i for i, (x, y) in pairs if x != y)
  shown = slice(max(0, same - _CONTEXT), same + _CONTEXT)
  return f"{before[shown]!r} becomes {after[shown]!r}"
