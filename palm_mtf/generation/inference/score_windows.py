# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Windows of a long text, in which each token is scored exactly once.

With SEQUENCE_LENGTH = 4 and STRIDE = 2; scored tokens are in brackets:

  [t0 t1 t2 t3]
         t2 t3 [t4 t5]
               t4 t5 [t6 t7]
"""

from typing import NamedTuple

# Rows have few lengths, so that few programs serve all of them and a short text
# costs less than a long one. How many are scored at once depends on their
# length alone, and so a text's score on nothing but the text.
_SHORTEST_ROW = 32
# Enough that reading the weights costs little beside the arithmetic.
_TOKENS_AT_ONCE = 2048


class Window(NamedTuple):
  """One row of a text, as places in the text."""

  start: int  # first token that is read
  first: int  # first token that is scored
  stop: int  # behind the last token of both


def windows(
  num_tokens: int, first: int, length: int, stride: int
) -> list[Window]:
  """Returns the windows that score the tokens from `first` on, in order.

  Args:
    num_tokens: number of tokens of inputs and targets.
    first: number of tokens of the inputs.
    length: tokens in a row at most.
    stride: new tokens in a further row, at most `length`.
  """
  # Where inputs and targets are too long together, the beginning of the inputs
  # is left out; targets that are too long alone are scored as a text of their
  # own. A token sees all tokens before it, or length - stride at least.
  start = max(0, min(first, num_tokens - length))
  stop = min(start + length, num_tokens)
  found = [Window(start, first, stop)]
  while stop < num_tokens:
    scored, stop = stop, min(stop + stride, num_tokens)
    found.append(Window(stop - length, scored, stop))
  return found


def row_length(num_tokens: int, length: int) -> int:
  """Returns the length of a row for `num_tokens`, at most `length`."""
  enough = max(_SHORTEST_ROW, 1 << (num_tokens - 1).bit_length())
  return min(enough, length)


def rows_at_once(length: int, slices: int) -> int:
  """Returns the number of rows of a length in one batch of `slices` parts."""
  return -(-max(_TOKENS_AT_ONCE // length, 1) // slices) * slices
