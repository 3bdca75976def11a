# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO mixture `behaviour`: small suites with known answers.

behaviour_copying    which of four lists repeats the given list
behaviour_counting   which number comes next
behaviour_negation   which colour is true if a sentence denies another colour
behaviour_names      who has a thing, and whether answers change if names do
behaviour_output     whether output is text, long enough, and not repetitive
"""

# The first four suites come from templates and score the likelihood of options;
# a model that guesses has the accuracy `chance`. In the last suite the model
# continues texts, and assertions test its output.

import itertools
import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import seqio
import tensorflow as tf

from palm_mtf.tasks.questions import (
  Choice,
  Option,
  Question,
  add_choices,
  add_questions,
  choices,
)
from palm_mtf.tasks.records import OrderedSource

_WORDS = ("river", "stone", "lamp", "horse", "cloud", "paper", "king", "door")
_NUMBERS = (
  "one two three four five six seven eight nine ten eleven twelve".split()
)
_COLOURS = ("red", "blue", "green", "black", "white")
_THINGS = ("car", "house", "book", "hat")
_NAMES = ("Anna", "Peter", "Mary", "John", "Laura", "David")
_STARTS = (
  "The first thing to do is",
  "Once upon a time there was",
  "def main(",
  "In the year 1900 the city",
  "Dear Sir or Madam,",
  "1. ",
)
# Output is long enough if it has this many characters, and not repetitive if at
# most this share of its runs of four words occurred before in the output.
_LEAST_CHARACTERS = 10
_MOST_REPEATED = 0.5


def copying() -> Iterator[Choice]:
  """Yields lists of four words to repeat; wrong options are other orders."""
  # Take 60 of the 1,680 permutations, at equal distances.
  for words in itertools.islice(itertools.permutations(_WORDS, 4), 0, 1680, 28):
    a, b, c, d = words
    orders = [(a, b, c, d), (b, a, c, d), (a, c, b, d), (d, b, c, a)]
    text = ", ".join(words)
    yield _question(
      f"The list: {text}.\nThe list again:",
      [f" {', '.join(order)}." for order in orders],
      0,
    )


def counting() -> Iterator[Choice]:
  """Yields counts to continue, as words and as digits, with nearby options."""
  for start, length in itertools.product(range(1, 8), (3, 4)):
    for spell in (lambda n: _NUMBERS[n - 1], str):
      numbers = range(start, start + length)
      after = start + length
      wrong = (after - 1, after - 2, after + 1)
      yield _question(
        f"Counting: {', '.join(map(spell, numbers))},",
        [f" {spell(n)}" for n in (after, *wrong)],
        0,
      )


def negation() -> Iterator[Choice]:
  """Yields questions whose options are the true and the denied colour."""
  # Use both orders of a pair, so that no colour or place is right more often.
  for thing, (first, second) in itertools.product(
    _THINGS, itertools.permutations(_COLOURS, 2)
  ):
    options = [f" {first}", f" {second}"]
    yield _question(
      f"The {thing} is not {first}, it is {second}. The {thing} is", options, 1
    )
    yield _question(
      f"The {thing} is {second}, it is not {first}. The {thing} is", options, 1
    )


def names() -> Iterator[Choice]:
  """Yields questions about who has a thing; each name takes both roles."""
  for thing, (giver, taker) in itertools.product(
    _THINGS, itertools.combinations(_NAMES, 2)
  ):
    # Yield both orders in turn, because `invariance` compares 2i and 2i + 1.
    for a, b in ((giver, taker), (taker, giver)):
      yield Choice(
        f"{a} gave the {thing} to {b}. Now the {thing} belongs to",
        [f" {a}", f" {b}"],
        [1],
      )


def invariance(
  targets: Sequence[Option], scores: Sequence[float]
) -> dict[str, float]:
  """Returns how often swapping the names keeps the chosen role, in percent."""
  best = {
    options[0].question: options[0].index
    for options in choices(targets, scores, "sum")
  }
  pairs = [best[i] == best[i + 1] for i in range(0, len(best) - 1, 2)]
  return {"invariance": 100 * float(np.mean(pairs))}


def output() -> Iterator[Question]:
  """Yields beginnings of texts to continue, which have no right answer."""
  for start in _STARTS:
    yield Question(start, "", [])


def assertions(
  targets: Sequence[object], predictions: Sequence[str]
) -> dict[str, float]:
  """Returns the share of outputs for which each assertion holds, in percent.

  Args:
    targets: unused.
    predictions: [examples] outputs of the model.
  """
  del targets
  checks = {
    # Bytes that are not UTF-8 are decoded to U+FFFD.
    "valid_utf8": lambda text: "\ufffd" not in text,
    "long_enough": lambda text: len(text.strip()) >= _LEAST_CHARACTERS,
    "not_repetitive": lambda text: repetition(text) <= _MOST_REPEATED,
  }
  return {
    name: 100 * float(np.mean([check(text) for text in predictions]))
    for name, check in checks.items()
  }


def repetition(text: str) -> float:
  """Returns the share of runs of four words that occurred before."""
  words = text.split()
  runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
  return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _question(inputs: str, options: list[str], right: int) -> Choice:
  """Returns a question whose right option is at a varying place."""
  # Options are rotated by a sum of bytes, which is the same on any machine.
  turn = sum(inputs.encode()) % len(options)
  order = options[turn:] + options[:turn]
  return Choice(inputs, order, [order.index(options[right])])


def _source(make: Callable[[], Iterator[tuple]]) -> seqio.DataSource:
  def read(split: str) -> tf.data.Dataset:
    del split
    records = [json.dumps(each) for each in make()]
    return tf.data.Dataset.from_tensor_slices({"record": records})

  return OrderedSource(read, ["validation"])


def _add(
  name: str,
  make: Callable[[], Iterator[Choice]],
  more_metrics: Sequence[Callable] = (),
) -> None:
  add_choices(
    f"behaviour_{name}",
    _source(make),
    lambda record: [Choice(*record)],
    "sum",
    more_metrics,
  )


_add("copying", copying)
_add("counting", counting)
_add("negation", negation)
_add("names", names, [invariance])
add_questions(
  "behaviour_output",
  _source(output),
  lambda record: [Question(*record)],
  [assertions],
  read_answer=str,
)
seqio.MixtureRegistry.add(
  "behaviour",
  [
    f"behaviour_{name}"
    for name in ("copying", "counting", "negation", "names", "output")
  ],
  default_rate=1,
)
