# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a vocabulary is made of, what it loses, and how well it fits a text.

Losses are found by trying, not by reading the model's settings, so that they
are found in a foreign model of any make.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from palm_mtf.data.sources.document import cut_text
from palm_mtf.data.vocabulary.vocabulary import SPACE_MARK, Vocabulary

_BATCH_CHARACTERS = 1 << 20
_PART_CHARACTERS = 1 << 16  # as documents are cut for training
_CONTEXT = 10

# What decode(encode(text)) may change, and a text that shows it.
_PROBES = {
  "spaces at both ends": "  a  ",
  "runs of spaces": "a    b",
  "tabs": "\ta\t\tb",
  "line ends": "a\n\nb\r\nc\n",
  "control characters": "a\x00b\x1fc\x7f",
  "the order of combining marks": "e\u0301 \u00e9",
  "compatibility characters": "\ufb01 \uff21 \u212b \u00b2",
  "U+2581": "a\u2581b",
  "rare characters": "\U0001f469\u200d\U0001f467 \u0645\u202e\ue000\U0010fffd",
}


@dataclasses.dataclass(frozen=True)
class Pieces:
  """The pieces of a vocabulary by kind.

  Attributes:
    control: which no text makes: padding, end of document, unknown.
    byte: one a byte, for characters without a piece.
    digit: one decimal digit of any script.
    joined_digits: longer pieces that hold a digit; PaLM has none.
    white_space: runs of two or more spaces, tabs and line ends.
    other: all others that were learnt.
    longest: the longest of those, longest first.
    first_joined_digits: the first of joined_digits, or "".
  """

  control: int
  byte: int
  digit: int
  joined_digits: int
  white_space: int
  other: int
  longest: list[str]
  first_joined_digits: str


def count_pieces(vocabulary: Vocabulary, num_longest: int = 5) -> Pieces:
  """Returns the pieces by kind."""
  kinds = {"control": [], "byte": [], "digit": [], "joined_digits": []}
  kinds |= {"white_space": [], "other": []}
  for i in range(vocabulary.size):
    piece = vocabulary.piece(i)
    kinds[_kind(vocabulary, i, piece)].append(piece)
  longest = sorted(kinds["other"], key=lambda x: (-len(x), x))[:num_longest]
  joined = kinds["joined_digits"]
  return Pieces(
    **{kind: len(pieces) for kind, pieces in kinds.items()},
    longest=[piece.replace(SPACE_MARK, " ") for piece in longest],
    first_joined_digits=joined[0].replace(SPACE_MARK, " ") if joined else "",
  )


def find_losses(vocabulary: Vocabulary) -> list[str]:
  """Returns what decode(encode(text)) changes; nothing, if lossless."""
  return [
    name
    for name, text in _PROBES.items()
    if vocabulary.decode(vocabulary.encode(text)) != text
  ]


class Fit:
  """How a vocabulary fits some texts.

  Attributes:
    num_documents: number of texts.
    num_bytes: their size in UTF-8.
    counts: [size], int64: how often each id was made.
    num_changed: texts that decode(encode(text)) changes.
    first_change: what became of the first of them, or "".
  """

  def __init__(self, vocabulary: Vocabulary):
    self._vocabulary = vocabulary
    self.num_documents = 0
    self.num_bytes = 0
    self.counts = np.zeros(vocabulary.size, np.int64)
    self.num_changed = 0
    self.first_change = ""

  @property
  def num_tokens(self) -> int:
    """Tokens in all texts, without [eod]."""
    return int(self.counts.sum())

  @property
  def num_used(self) -> int:
    """Pieces that some text makes."""
    return int((self.counts > 0).sum())

  @property
  def byte_share(self) -> float:
    """Share of byte pieces in the tokens."""
    made = int(self.counts[self._vocabulary.is_byte].sum())
    return made / max(1, self.num_tokens)

  @property
  def tokens_per_byte(self) -> float:
    """Tokens for a byte of text."""
    return self.num_tokens / max(1, self.num_bytes)

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text for a token."""
    return self.num_bytes / max(1, self.num_tokens)

  def add(self, texts: list[str]) -> None:
    """Encodes and decodes texts, and counts."""
    parts = [list(cut_text(text, _PART_CHARACTERS)) for text in texts]
    encoded = self._vocabulary.encode_batch([x for each in parts for x in each])
    ids = np.fromiter(itertools.chain(*encoded), np.int64)
    self.counts += np.bincount(ids, minlength=len(self.counts))
    decoded = map(self._vocabulary.decode, encoded)
    for text, each in zip(texts, parts, strict=True):
      self.num_documents += 1
      self.num_bytes += len(text.encode())
      again = "".join(itertools.islice(decoded, len(each)))
      if again != text:
        self.num_changed += 1
        self.first_change = self.first_change or (
          f"document {self.num_documents:,}: {_first_difference(text, again)}"
        )


def measure_fit(vocabulary: Vocabulary, texts: Iterable[str]) -> Fit:
  """Returns how `vocabulary` fits texts; a few are in memory at a time."""
  fit = Fit(vocabulary)
  for batch in _batches(texts):
    fit.add(batch)
  return fit


def _kind(vocabulary: Vocabulary, i: int, piece: str) -> str:
  if vocabulary.is_control(i):
    return "control"
  if vocabulary.is_byte[i]:
    return "byte"
  if any(map(str.isdecimal, piece)):
    return "digit" if len(piece) == 1 else "joined_digits"
  if len(piece) > 1 and not piece.replace(SPACE_MARK, " ").strip():
    return "white_space"
  return "other"


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
  batch, num_characters = [], 0
  for text in texts:
    batch.append(text)
    num_characters += len(text)
    if num_characters >= _BATCH_CHARACTERS:
      yield batch
      batch, num_characters = [], 0
  if batch:
    yield batch


def _first_difference(before: str, after: str) -> str:
  """Says where two texts first differ."""
  pairs = zip(before, after, strict=False)
  same = next(
    (i for i, (x, y) in enumerate(pairs) if x != y),
    min(len(before), len(after)),
  )
  shown = slice(max(0, same - _CONTEXT), same + _CONTEXT)
  return f"{before[shown]!r} becomes {after[shown]!r}"
