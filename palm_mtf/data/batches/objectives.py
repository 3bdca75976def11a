# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How a text becomes inputs, which are given, and targets, which are learned.

  text              a b c d e f g h .    . is [eod]; X and Y are sentinels
  causal            inputs -             targets a b c d e f g h .
  prefix_lm         inputs a b c         targets d e f g h .
  span_corruption   inputs a b X f g Y   targets X c d e Y h .

Documents that have inputs and targets keep them under every objective.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from palm_mtf.config import DataConfig
from palm_mtf.config.data import SpanCorruption
from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.vocabulary.vocabulary import Vocabulary


class Example(NamedTuple):
  """The tokens of the inputs, followed by the tokens of the targets."""

  tokens: np.ndarray  # [length], int32
  num_inputs: int


@dataclasses.dataclass(frozen=True)
class Objective:
  """Makes examples from texts; in this one, all tokens are targets."""

  # Whether inputs attend to one another in both directions.
  has_prefix = False

  def cut(self, spans: np.ndarray, length: int) -> np.ndarray:
    """Splits texts into pieces, so that each piece's example fits into a row.

    Args:
      spans: index of each text's first token in the source's tokens, and the
        index after its [eod], [n, 2].

    Returns:
      Index of each piece's first token, and the index after its last token,
      [pieces, 2].
    """
    return _cut_spans(spans, length)

  def lengths(self, pieces: np.ndarray) -> np.ndarray:
    """Returns the number of tokens in each piece's example, [pieces], int64."""
    return pieces[:, 1] - pieces[:, 0]

  def example(self, tokens: np.ndarray, key: str) -> Example:
    """Returns the example that is made from a piece.

    Args:
      key: name of the piece, which seeds the example's random numbers.
    """
    del key  # this objective is not random
    return Example(tokens, 0)


CAUSAL = Objective()


@dataclasses.dataclass(frozen=True)
class PrefixLM(Objective):
  """The model reads the beginning of a text and learns to predict the rest.

  This is the prefix language model of the T5 paper, section 3.2.1.
  """

  has_prefix = True

  def example(self, tokens: np.ndarray, key: str) -> Example:
    """Splits inputs from targets at a random place; see `Objective`."""
    if len(tokens) < 2:
      return Example(tokens, 0)
    (place,) = shuffle(np.arange(1), len(tokens) - 1, f"{key} prefix")
    return Example(tokens, 1 + int(place))


@dataclasses.dataclass(frozen=True)
class SpanCorruptionLM(Objective):
  """The model reads a text without some spans, and learns to predict them.

  Source: T5 paper, section 3.1.4.
  """

  noise_density: float  # share of the text's tokens that are removed
  mean_span_length: float  # mean number of tokens in a removed span
  first_sentinel: int  # id of <extra_id_0>; the id of <extra_id_1> is one less
  eod_id: int  # id of [eod]

  has_prefix = True

  @property
  def noise(self) -> SpanCorruption:
    """Formulas for the numbers of removed tokens and spans."""
    return SpanCorruption(self.noise_density, self.mean_span_length)

  def cut(self, spans: np.ndarray, length: int) -> np.ndarray:
    """Drops each text's [eod], then cuts the text; see `Objective`."""
    return _cut_spans(spans - [0, 1], self.noise.longest_text(length))

  def lengths(self, pieces: np.ndarray) -> np.ndarray:
    """Returns the length of inputs plus targets per piece; see `Objective`."""
    found, which = np.unique(pieces[:, 1] - pieces[:, 0], return_inverse=True)
    lengths = list(map(self.noise.row_length, found.tolist()))
    return np.array(lengths, np.int64)[which]

  def example(self, tokens: np.ndarray, key: str) -> Example:
    """Replaces spans by sentinels; see `Objective`."""
    length, noise = len(tokens), self.noise
    num_noise = noise.num_noise_tokens(length)
    num_spans = noise.num_spans(length)
    # As in T5, kept and removed spans alternate; the first span is kept.
    sizes = np.empty(2 * num_spans, np.int64)
    sizes[::2] = _random_sizes(length - num_noise, num_spans, f"{key} kept")
    sizes[1::2] = _random_sizes(num_noise, num_spans, f"{key} noise")
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    inputs, targets = [], []
    for i in range(num_spans):
      sentinel = [self.first_sentinel - i]
      inputs += [parts[2 * i], sentinel]
      targets += [sentinel, parts[2 * i + 1]]
    joined = np.concatenate([*inputs, *targets, [self.eod_id]])
    num_inputs = length - num_noise + num_spans
    return Example(joined.astype(np.int32), num_inputs)


OBJECTIVES: dict[str, type[Objective]] = {
  "causal": Objective,
  "prefix_lm": PrefixLM,
  "span_corruption": SpanCorruptionLM,
}


def make_objective(
  name: str, data: DataConfig, vocabulary: Vocabulary
) -> Objective:
  """Returns the objective `name`, a key of OBJECTIVES.

  Span corruption needs a vocabulary that ends with EXTRA_IDS sentinels.
  """
  if name != "span_corruption":
    return OBJECTIVES[name]()
  return SpanCorruptionLM(
    data.noise_density,
    data.mean_span_length,
    first_sentinel=vocabulary.size - 1,
    eod_id=vocabulary.eod_id,
  )


def to_json(objective: Objective) -> list[object]:
  """Returns the name of an objective and its arguments, as JSON values."""
  (name,) = [x for x, made in OBJECTIVES.items() if type(objective) is made]
  return [name, *dataclasses.astuple(objective)]


def from_json(value: list) -> Objective:
  """Returns the objective that `to_json` described."""
  name, *arguments = value
  return OBJECTIVES[name](*arguments)


def _cut_spans(spans: np.ndarray, length: int) -> np.ndarray:
  """Splits each text after every `length` tokens; see `Objective.cut`."""
  start, stop = spans.T
  pieces = -(-(stop - start) // length)
  first = np.cumsum(pieces) - pieces
  which = np.arange(pieces.sum()) - np.repeat(first, pieces)
  begin = np.repeat(start, pieces) + which * length
  end = np.minimum(begin + length, np.repeat(stop, pieces))
  return np.stack([begin, end], axis=1)


def _random_sizes(total: int, parts: int, key: str) -> np.ndarray:
  """Splits `total` into `parts` random sizes, above 0 unless `total` is 0."""
  # Choose distinct cuts between tokens; every choice is equally likely.
  cuts = np.zeros(0, np.int64)
  if parts > 1:
    cuts = 1 + np.sort(shuffle(np.arange(parts - 1), total - 1, key))
  return np.diff(cuts, prepend=0, append=total)
