# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How much span corruption takes out of a text (Raffel et al. 2020, 3.1.4).

text       a b c d e f g h i [eod]
inputs     a b X f g Y i             X, Y: sentinels
targets    X c d e Y h [eod]
"""

import bisect
import dataclasses


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
  """Numbers of tokens and spans, by the length of a text.

  Attributes:
    noise_density: share of the tokens that is taken out.
    mean_span_length: tokens of a span, on average.
  """

  noise_density: float
  mean_span_length: float

  def num_noise_tokens(self, length: int) -> int:
    """Returns how many tokens are taken out: one at least, but not all."""
    wanted = max(round(length * self.noise_density), 1)
    return min(wanted, max(length - 1, 1), length)

  def num_spans(self, length: int) -> int:
    """Returns how many spans they are, a token between any two."""
    noise = self.num_noise_tokens(length)
    wanted = min(round(noise / self.mean_span_length), length - noise)
    return min(max(wanted, 1), noise)

  def row_length(self, length: int) -> int:
    """Returns the tokens of inputs and targets, sentinels and [eod] included.

    Args:
      length: tokens of the text, without [eod].
    """
    return length + 2 * self.num_spans(length) + 1

  def longest_text(self, row_length: int) -> int:
    """Returns the length of the longest text that fits a row, or 0."""
    # A longer text never makes a shorter row.
    lengths = range(row_length + 1)
    return bisect.bisect_right(lengths, row_length, key=self.row_length) - 1
