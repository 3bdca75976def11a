# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks made from the held-out text of a run's own files.

corpus_continuation  which of four passages follows here
corpus_recall        which of four names, one of them just used, follows here
corpus_brackets      which of ) ] } closes the open bracket

from palm_mtf.tasks import corpus              # or --gin_file=eval/corpus.gin
from palm_mtf.tasks import documents
documents.text_files.files = "/data/books/*.jsonl.gz"
"""

# Hashes of the text choose the questions, which are thus the same on any
# machine. Wrong options are as frequent in the text as right options: passages
# from other places, names that are right elsewhere, and equally many questions
# for each bracket. So a model that ignores the context has the accuracy of a
# guess, which the metric also reports.

import collections
import functools
import hashlib
import heapq
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import gin
import seqio
import tensorflow as tf

from palm_mtf.errors import UserError, check_count
from palm_mtf.tasks.documents import TextFilesSource, text_files
from palm_mtf.tasks.questions import Choice, add_choices
from palm_mtf.tasks.records import OrderedSource

_PASSAGE_CHARACTERS = 80
_MAX_DOCUMENTS = 1000
# A name is a word of five or more characters in at most this share of texts.
_NAME = re.compile(r"(?<!\w)[^\W\d]\w{4,}")
_NAME_SHARE = 0.1
_OPENED_BY = {")": "(", "]": "[", "}": "{"}


class Size(NamedTuple):
  """Number of questions of a task, and of characters before each question."""

  num_questions: int
  context_characters: int


@gin.configurable
def questions(num_questions: int = 300, context_characters: int = 300) -> Size:
  """Returns the size of each task of this module, as gin sets it."""
  return Size(num_questions, context_characters)


class Place(NamedTuple):
  """A position in a text where a question could be asked."""

  document: int
  position: int


def continuations(texts: Sequence[str], size: Size) -> Iterator[Choice]:
  """Yields questions about which of four passages follows, at line starts."""
  length = _PASSAGE_CHARACTERS
  places = [
    Place(i, match.end())
    for i, text in enumerate(texts)
    for match in re.finditer(r"\n", text[: len(text) - length])
    if match.end() >= size.context_characters
    and text[match.end() : match.end() + length].strip()
  ]
  # The passages of three quarters of the places serve only as wrong options, so
  # that no passage is right in one question and wrong in another.
  chosen = _choose(places, texts, 4 * size.num_questions)
  for n, place in enumerate(chosen[: len(chosen) // 4]):
    text = texts[place.document]
    # Leave out nearby passages, because they might follow here as well.
    others = [
      other
      for other in chosen[len(chosen) // 4 + 3 * n :]
      if other.document != place.document
      or abs(other.position - place.position) > 2 * length
    ][:3]
    if len(others) == 3:
      passages = [
        texts[p.document][p.position : p.position + length]
        for p in (place, *others)
      ]
      yield _question(
        text, place.position, size, passages, _hash(text, place.position)
      )


def recalls(texts: Sequence[str], size: Size) -> Iterator[Choice]:
  """Yields questions about which of four names follows; one was used before."""
  documents_with = collections.Counter(
    name for text in texts for name in set(_NAME.findall(text))
  )
  # Words that occur in many documents ("return", "because") are not names.
  most = max(1, int(_NAME_SHARE * len(texts)))
  names = {}
  for i, text in enumerate(texts):
    used: dict[str, float] = {}
    for match in _NAME.finditer(text):
      name, start = match.group(), match.start()
      near = start - used.get(name, -math.inf) < size.context_characters
      if near and documents_with[name] <= most:
        names[Place(i, start)] = name
      used[name] = start
  chosen = _choose(list(names), texts, size.num_questions)
  for n, place in enumerate(chosen):
    text, start = texts[place.document], place.position
    before = _NAME.findall(
      text[max(0, start - size.context_characters) : start]
    )
    # Wrong options are names that are right elsewhere and not in this context.
    others = dict.fromkeys(names[p] for p in chosen[n + 1 :] + chosen[:n])
    known = {names[place], *before}
    wrong = [name for name in others if name not in known][:3]
    if len(wrong) == 3:
      # A space belongs to the word after it, as in vocabularies.
      space = " " if text[start - 1 : start] == " " else ""
      options = [space + name for name in (names[place], *wrong)]
      yield _question(
        text, start - len(space), size, options, _hash(text, start)
      )


def brackets(texts: Sequence[str], size: Size) -> Iterator[Choice]:
  """Yields questions about which bracket closes, equally many per bracket."""
  places: dict[str, list[Place]] = {bracket: [] for bracket in _OPENED_BY}
  for i, text in enumerate(texts):
    for opened, closed in _pairs(text):
      near = closed - opened < size.context_characters
      if near and not text[closed - 1].isspace():
        places[text[closed]].append(Place(i, closed))
  each = min(
    size.num_questions // len(places), *(len(p) for p in places.values())
  )
  for closing, of_bracket in places.items():
    options = [closing, *(b for b in _OPENED_BY if b != closing)]
    for place in _choose(of_bracket, texts, each):
      text, at = texts[place.document], place.position
      yield _question(text, at, size, options, _hash(text, at))


def _pairs(text: str) -> Iterator[tuple[int, int]]:
  """Yields the positions of matching brackets."""
  # A closing bracket without a match, as in strings, discards open brackets.
  stack: list[tuple[str, int]] = []
  for match in re.finditer(r"[()\[\]{}]", text):
    bracket = match.group()
    if bracket not in _OPENED_BY:
      stack.append((bracket, match.start()))
    elif stack and stack[-1][0] == _OPENED_BY[bracket]:
      yield stack.pop()[1], match.start()
    else:
      stack.clear()


def _question(
  text: str, position: int, size: Size, options: list[str], order: bytes
) -> Choice:
  """Returns a question; `order` moves the right option, which is options[0]."""
  right = order[0] % len(options)
  options = [*options[1 : right + 1], options[0], *options[right + 1 :]]
  start = max(0, position - size.context_characters)
  return Choice(text[start:position], options, [right], context="\n")


def _choose(
  places: Sequence[Place], texts: Sequence[str], count: int
) -> list[Place]:
  """Returns the places with the smallest hashes, a reproducible sample."""
  digests = [hashlib.blake2b(text.encode()).hexdigest() for text in texts]
  return heapq.nsmallest(
    count, places, key=lambda p: _hash(digests[p.document], p.position)
  )


def _hash(text: str, position: int) -> bytes:
  return hashlib.blake2b(f"{position} {text}".encode(), digest_size=8).digest()


@functools.cache
def _source() -> TextFilesSource:
  return TextFilesSource("documents.text_files", text_files)


def _held_out() -> list[str]:
  # Use a set, because a document of weight 3 is read three times.
  dataset = _source().get_dataset("validation", shuffle=False)
  texts = {example["text"].numpy().decode() for example in dataset}
  return heapq.nsmallest(_MAX_DOCUMENTS, texts, key=lambda t: _hash(t, 0))


def _read(name: str, make: Callable[..., Iterator[Choice]]) -> tf.data.Dataset:

  def generate() -> Iterator[dict]:
    size = questions()
    check_count("corpus.questions.num_questions", size.num_questions)
    check_count("corpus.questions.context_characters", size.context_characters)
    texts = _held_out()
    found = 0
    for choice in make(texts, size):
      found += 1
      cut_out = choice._replace(within_document=True)
      yield {"record": json.dumps(cut_out)}
    if not found:
      raise UserError(
        f"{name}: the {len(texts)} held-out documents are too short or too "
        "alike to ask about; give more text, or a smaller "
        "corpus.questions.context_characters."
      )

  return tf.data.Dataset.from_generator(
    generate, output_signature={"record": tf.TensorSpec((), tf.string)}
  )


def _add(
  name: str, make: Callable[..., Iterator[Choice]], normalization: str
) -> None:
  source = OrderedSource(lambda split: _read(name, make), ["validation"])
  add_choices(name, source, lambda record: [Choice(*record)], normalization)


_add("corpus_continuation", continuations, "unconditional")
_add("corpus_recall", recalls, "tokens")
_add("corpus_brackets", brackets, "sum")
seqio.MixtureRegistry.add(
  "corpus",
  ["corpus_continuation", "corpus_recall", "corpus_brackets"],
  default_rate=1,
)
