# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows score a text: each token of it exactly once.

A text that fits into SEQUENCE_LENGTH is one row. A longer one is several, each
STRIDE tokens further, which score what is new in them. Ten tokens, with rows of
four and a stride of two; in brackets what is scored:

  [t0 t1 t2 t3]
         t2 t3 [t4 t5]
               t4 t5 [t6 t7]
                     t6 t7 [t8 t9]

So each token is scored with all tokens before it, or with at least
SEQUENCE_LENGTH - STRIDE of them. A row begins as in training, with token 0
before its first token, so that this one is scored too.

Rows are as long as they must be, of a few lengths, so that a short text does
not cost as much as a long one; how many are read at once depends on their
length alone, and so a text's score on nothing but the text.
"""

from typing import NamedTuple

_SHORTEST_ROW = 32
# Enough that reading the weights costs little beside the arithmetic.
_TOKENS_AT_ONCE = 2048


class Window(NamedTuple):
  """One row of a text: places in the text.

  Attributes:
    start: place of the first token that is read.
    first: place of the first token that is scored.
    stop: behind the last of both.
  """

  start: int
  first: int
  stop: int


def windows(
  num_tokens: int, first: int, length: int, stride: int
) -> list[Window]:
  """Returns the rows that score the tokens from `first` on, in order.

  Where inputs and targets are together too long, what is left out is the
  beginning of the inputs; targets that alone are too long are scored without
  inputs, as a text of their own.

  Args:
    num_tokens: tokens of inputs and targets, at least one of the latter.
    first: how many of them are inputs.
    length: tokens in a row at most.
    stride: new tokens in a further row, at most `length`.
  """
  start = max(0, min(first, num_tokens - length))
  stop = min(start + length, num_tokens)
  found = [Window(start, first, stop)]
  while stop < num_tokens:
    scored, stop = stop, min(stop + stride, num_tokens)
    found.append(Window(stop - length, scored, stop))
  return found


def row_length(num_tokens: int, length: int) -> int:
  """Returns how long a row for `num_tokens` is: one of a few lengths.

  Args:
    num_tokens: at most `length`.
    length: length of the longest row.
  """
  enough = max(_SHORTEST_ROW, 1 << (num_tokens - 1).bit_length())
  return min(enough, length)


def rows_at_once(length: int, slices: int) -> int:
  """Returns how many rows of a length are scored together.

  Args:
    length: length of the rows.
    slices: into which the batch is split: a divisor of the result.
  """
  return -(-max(_TOKENS_AT_ONCE // length, 1) // slices) * slices
