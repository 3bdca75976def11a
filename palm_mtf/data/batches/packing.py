# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Packing of documents into rows of SEQUENCE_LENGTH tokens, in four ways.

Three documents, "a b", "c" and an example with inputs "d e" and targets "f",
each followed by [eod], written ".", in rows of 6 tokens; "_" is padding:

  joined         targets        a b . c . d    e f . a b .   (the next epoch)
                 inputs         0 a b . c .    0 e f . a b
                 loss_weights   1 1 1 1 1 0    0 1 1 1 1 1

  joined_masked  targets        a b . c . d    e f . a b .
                 inputs         0 a b 0 c 0    0 e f 0 a b
                 segments       1 1 1 2 2 3    1 1 1 2 2 2
                 loss_weights   1 1 1 1 1 0    0 1 1 1 1 1

  packed         targets        a b . c . _    d e f . _ _
                 inputs         0 a b 0 c 0    0 d e f 0 0
                 segments       1 1 1 2 2 0    1 1 1 1 0 0
                 positions      0 1 2 0 1 0    0 1 2 3 0 0
                 loss_weights   1 1 1 1 1 0    0 0 1 1 0 0

  single         targets        a b . _ _ _    c . _ _ _ _    d e f . _ _
                 inputs         0 a b 0 0 0    0 c 0 0 0 0    0 d e f 0 0
                 loss_weights   1 1 1 0 0 0    1 1 0 0 0 0    0 0 1 1 0 0

"joined" is PaLM's way (PaLM 5). Tokens attend to those of their own segment.
Where inputs attend to one another in both directions (objectives.py), 1 marks
them, and the 0 before the first. If "a" and "c" are inputs too, it is of the
packed rows

                 prefix         1 1 0 1 1 0    1 1 1 0 0 0

The protocol of all rows of a run, and what a row is made of.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from palm_mtf.data.batches.objectives import CAUSAL, Example, Objective
from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.tokens.array import TokenArray

Row = dict[str, np.ndarray]


class JoinedRows:
  """Rows cut from the joined documents in the order of the text."""

  def __init__(self, tokens: TokenArray, length: int, *, eod_id: int | None):
    """Cuts rows of `length` tokens.

    Args:
      tokens: tokens of the documents, at least `length`.
      length: tokens in a row.
      eod_id: id of [eod], if it ends segments; otherwise None.
    """
    self._tokens = tokens
    self._length = length
    self._eod_id = eod_id
    self.num_rows = len(tokens) // length
    self.features = joined_features([tokens], eod_id)

  def read(self, number: int) -> Row:
    """Returns the features of a row; see `RowStream.read`.

    Args:
      number: number of the row, below `num_rows`.
    """
    start = number * self._length
    targets, is_target = self._tokens.read(start, start + self._length)
    return joined_row(targets, is_target, self.features, self._eod_id)


def document_start(packing: str, eod_id: int) -> int:
  """Returns the input before the first token of a document in training.

  Args:
    packing: PACKING.
    eod_id: id of [eod].
  """
  # Rows of "joined" begin with 0 wherever a document is cut: only [eod] says
  # that one begins. Elsewhere each document begins a segment, and so with 0.
  return eod_id if packing == "joined" else 0


def joined_features(
  sources: Sequence[TokenArray], eod_id: int | None
) -> tuple[str, ...]:
  """Returns the features of joined rows.

  Args:
    sources: documents that are joined.
    eod_id: id of [eod], if it ends segments; otherwise None.
  """
  features = ("inputs", "targets")
  if eod_id is not None:
    features += ("segments",)
  if any(tokens.has_inputs for tokens in sources):
    features += ("loss_weights",)
  return features


def joined_row(
  targets: np.ndarray,
  is_target: np.ndarray,
  features: Sequence[str],
  eod_id: int | None,
) -> Row:
  """Returns the features of joined tokens.

  Args:
    targets: tokens, [length], int32.
    is_target: whether each token is learnt, [length], bool.
    features: features of `joined_features`.
    eod_id: id of [eod], if it ends segments; otherwise None.
  """
  row = {"inputs": _shift(targets), "targets": targets}
  if eod_id is not None:
    # Where [eod] would be the input a segment begins, with input 0.
    begins = row["inputs"] == eod_id
    row["inputs"][begins] = 0
    row["segments"] = (1 + np.cumsum(begins)).astype(np.int32)
  if "loss_weights" in features:
    row["loss_weights"] = is_target.astype(np.float32)
  return row


class WholeRows:
  """Rows of whole documents, padded: several in a row, or one."""

  def __init__(
    self,
    tokens: TokenArray,
    length: int,
    *,
    packed: bool,
    seed: int,
    objective: Objective = CAUSAL,
  ):
    """Plans rows of `length` tokens; memory grows with the documents.

    Args:
      tokens: tokens of one document or more.
      length: tokens in a row.
      packed: whether a row takes as many documents as fit.
      seed: seed of the order in which documents are packed, and of what the
        objective draws.
      objective: makes examples of texts.
    """
    self._tokens = tokens
    self._length = length
    self._objective = objective
    self._seed = seed
    spans = tokens.spans()  # [num_documents, 3]: start, targets, stop
    too_long = spans[:, 2] - spans[:, 0] > length
    # Examples that lose tokens, because they are too long for a row.
    self.num_cut = int(too_long.sum()) if tokens.has_inputs else 0
    self._begins = spans[:, 0]  # of each document
    if tokens.has_inputs:
      spans = _fit(spans, length)
      lengths = spans[:, 2] - spans[:, 0]
    else:
      pieces = objective.cut(spans[:, [0, 2]], length)
      spans, lengths = pieces[:, [0, 0, 1]], objective.lengths(pieces)
    self._first = np.arange(len(spans) + 1)  # document of each row, and the end
    if packed:
      order = shuffle(np.arange(len(spans)), len(spans), f"seed {seed} packing")
      spans = spans[order]
      self._first = _pack(lengths[order], length)
    self._spans = spans
    self.num_rows = len(self._first) - 1
    self.features = ("inputs", "targets", "loss_weights")
    if packed or objective.has_prefix:
      self.features += ("segments",)
    if objective.has_prefix:
      self.features += ("prefix",)

  def read(self, number: int, epoch: int = 0) -> Row:
    """Returns the features of a row.

    Args:
      number: number of the row, below `num_rows`.
      epoch: number of the epoch, for which the objective draws anew.
    """
    row = {name: np.zeros(self._length, np.int32) for name in self.features}
    row["loss_weights"] = np.zeros(self._length, np.float32)
    end = 0
    documents = self._spans[self._first[number] : self._first[number + 1]]
    for segment, span in enumerate(documents.tolist(), 1):
      tokens, num_inputs = self._example(*span, epoch)
      begin, end = end, end + len(tokens)
      row["targets"][begin:end] = tokens
      row["inputs"][begin:end] = _shift(tokens)
      row["loss_weights"][begin + num_inputs : end] = 1.0
      if "segments" in row:
        row["segments"][begin:end] = segment
      if "prefix" in row:
        row["prefix"][begin : min(end, begin + num_inputs + 1)] = 1
    return row

  def _example(
    self, start: int, targets: int, stop: int, epoch: int
  ) -> Example:
    tokens, _ = self._tokens.read(start, stop)
    if self._tokens.has_inputs:
      return Example(tokens, targets - start)
    key = f"seed {self._seed} epoch {epoch} token {start}"
    return self._objective.example(tokens, key)

  def pieces(self, number: int) -> list[tuple[int, int, int]]:
    """Returns number, first token and tokens of each document of a row."""
    spans = self._spans[self._first[number] : self._first[number + 1]]
    documents = np.searchsorted(self._begins, spans[:, 0], "right") - 1
    begins = spans[:, 0] - self._begins[documents]
    lengths = spans[:, 2] - spans[:, 0]
    return list(
      zip(documents.tolist(), begins.tolist(), lengths.tolist(), strict=True)
    )


def positions(segments: np.ndarray) -> np.ndarray:
  """Returns the position of each token in its segment, [..., length], int32.

  Args:
    segments: segment of each token, 0 for padding, [..., length], int32.
  """
  # Training needs none: rotary embedding knows differences of positions only,
  # and attention stays in a segment.
  place = np.arange(segments.shape[-1])
  begins = np.ones(segments.shape, bool)
  begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
  first = np.maximum.accumulate(np.where(begins, place, 0), axis=-1)
  return np.where(segments > 0, place - first, 0).astype(np.int32)


def _shift(targets: np.ndarray) -> np.ndarray:
  inputs = np.zeros_like(targets)  # the first input is 0
  inputs[1:] = targets[:-1]
  return inputs


def _fit(spans: np.ndarray, length: int) -> np.ndarray:
  """Returns spans of examples of at most `length` tokens, [spans, 3]."""
  start, targets, stop = spans.T
  # An example keeps its targets, as many as fit, and the end of its inputs.
  stop = np.minimum(stop, targets + length)
  return np.stack([np.maximum(start, stop - length), targets, stop], axis=1)


def _pack(lengths: np.ndarray, length: int) -> np.ndarray:
  """Fills rows in order; returns the first document of each, and the end."""
  ends = np.cumsum(lengths).tolist()
  first, used = [0], 0
  while first[-1] < len(ends):
    after = bisect.bisect_right(ends, used + length)
    first.append(after)
    used = ends[after - 1]
  return np.array(first)


FEATURES = ("inputs", "targets", "segments", "loss_weights", "prefix")


class Piece(NamedTuple):
  """Tokens of one document in a row."""

  source: str  # name
  epoch: int
  document: int  # place among the documents of its source, as they are read
  begin: int  # tokens of the document before these
  tokens: int


class RowStream(Protocol):
  """The training rows of a run, each a function of its number alone.

  Numbers are counted from the start of the run, [n], int64.
  """

  features: tuple[str, ...]  # of a batch, in the order of FEATURES
  num_rows: int  # of the first epoch, all sources together

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns the features of rows: [length], int32; loss_weights float32."""

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns the documents of rows, in order."""
