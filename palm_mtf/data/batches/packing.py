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
"""

import bisect
from typing import Protocol

import numpy as np

from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.tokens.array import TokenArray

Row = dict[str, np.ndarray]


class Rows(Protocol):
  """The rows of one source, epoch after epoch, unshuffled."""

  features: tuple[str, ...]  # of every row
  num_rows: int  # of the first epoch, that hold nothing of the next

  def epoch(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the epoch of each row, from 0 on."""

  def epoch_start(self, epoch: int) -> int:
    """Returns the number of rows before `epoch`."""

  def read(self, number: int) -> Row:
    """Returns the features of a row: [length], int32; loss_weights float32."""


class JoinedRows:
  """Rows cut from the joined documents, epoch after epoch without a gap."""

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
    self.features = ("inputs", "targets")
    if eod_id is not None:
      self.features += ("segments",)
    if tokens.has_inputs:
      self.features += ("loss_weights",)

  # Row n begins at token n * length of the stream of all epochs. Tokens left
  # over by an epoch so begin a row of the next: none is lost or read twice.
  def epoch(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the epoch in which each row begins."""
    return numbers * self._length // len(self._tokens)

  def epoch_start(self, epoch: int) -> int:
    """Returns the number of the first row that begins in `epoch`."""
    return -(-epoch * len(self._tokens) // self._length)

  def read(self, number: int) -> Row:
    """Returns the features of a row; see `Rows.read`."""
    start = number * self._length % len(self._tokens)
    stop = start + self._length
    over = max(0, stop - len(self._tokens))  # tokens of the next epoch
    targets, is_target = self._tokens.read(start, stop - over)
    if over:
      more, more_is_target = self._tokens.read(0, over)
      targets = np.concatenate([targets, more])
      is_target = np.concatenate([is_target, more_is_target])
    row = {"inputs": _shift(targets), "targets": targets}
    if self._eod_id is not None:
      # A segment begins behind each [eod], with 0 as its first input.
      begins = row["inputs"] == self._eod_id
      row["inputs"][begins] = 0
      row["segments"] = (1 + np.cumsum(begins)).astype(np.int32)
    if "loss_weights" in self.features:
      row["loss_weights"] = is_target.astype(np.float32)
    return row


class WholeRows:
  """Rows of whole documents, padded: several in a row, or one."""

  def __init__(
    self,
    tokens: TokenArray,
    length: int,
    *,
    eod_id: int,
    packed: bool,
    seed: int,
  ):
    """Plans rows of `length` tokens; memory grows with the documents.

    Args:
      tokens: tokens of one document or more.
      length: tokens in a row.
      eod_id: id of [eod], which ends documents without inputs.
      packed: whether a row takes as many documents as fit.
      seed: seed of the order in which documents are packed.
    """
    self._tokens = tokens
    self._length = length
    spans = tokens.spans(eod_id)  # [num_documents, 3]: start, targets, stop
    too_long = spans[:, 2] - spans[:, 0] > length
    # Examples that lose tokens, because they are too long for a row.
    self.num_cut = int(too_long.sum()) if tokens.has_inputs else 0
    spans = _fit(spans, length, tokens.has_inputs)
    self._first = np.arange(len(spans) + 1)  # document of each row, and the end
    if packed:
      order = np.arange(len(spans))
      spans = spans[shuffle(order, len(spans), f"seed {seed} packing")]
      self._first = _pack(spans[:, 2] - spans[:, 0], length)
    self._spans = spans
    self.num_rows = len(self._first) - 1
    self.features = ("inputs", "targets", "loss_weights")
    if packed:
      self.features += ("segments",)

  def epoch(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the epoch of each row."""
    return numbers // self.num_rows

  def epoch_start(self, epoch: int) -> int:
    """Returns the number of rows before `epoch`."""
    return epoch * self.num_rows

  def read(self, number: int) -> Row:
    """Returns the features of a row; see `Rows.read`."""
    place = number % self.num_rows
    row = {name: np.zeros(self._length, np.int32) for name in self.features}
    row["loss_weights"] = np.zeros(self._length, np.float32)
    end = 0
    documents = self._spans[self._first[place] : self._first[place + 1]]
    for segment, (start, targets, stop) in enumerate(documents, 1):
      tokens, _ = self._tokens.read(start, stop)
      begin, end = end, end + len(tokens)
      row["targets"][begin:end] = tokens
      row["inputs"][begin:end] = _shift(tokens)
      row["loss_weights"][begin + targets - start : end] = 1.0
      if "segments" in row:
        row["segments"][begin:end] = segment
    return row


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


def _fit(spans: np.ndarray, length: int, has_inputs: bool) -> np.ndarray:
  """Returns spans of at most `length` tokens, [spans, 3]."""
  start, targets, stop = spans.T
  if has_inputs:
    # An example keeps its targets, as many as fit, and the end of its inputs.
    stop = np.minimum(stop, targets + length)
    return np.stack([np.maximum(start, stop - length), targets, stop], axis=1)
  # A text is cut into pieces of `length` tokens, the last one shorter.
  pieces = -(-(stop - start) // length)
  first = np.cumsum(pieces) - pieces
  which = np.arange(pieces.sum()) - np.repeat(first, pieces)
  begin = np.repeat(start, pieces) + which * length
  end = np.minimum(begin + length, np.repeat(stop, pieces))
  return np.stack([begin, begin, end], axis=1)


def _pack(lengths: np.ndarray, length: int) -> np.ndarray:
  """Fills rows in order; returns the first document of each, and the end."""
  ends = np.cumsum(lengths).tolist()
  first, used = [0], 0
  while first[-1] < len(ends):
    after = bisect.bisect_right(ends, used + length)
    first.append(after)
    used = ends[after - 1]
  return np.array(first)
