# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-likelihood of texts: the sum of log p of their tokens, in nats.

A long text is scored in windows, each token exactly once. For example, with
SEQUENCE_LENGTH = 4 and STRIDE = 2, each window scores the tokens in brackets:

  [t0 t1 t2 t3]
         t2 t3 [t4 t5]
               t4 t5 [t6 t7]
"""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config import Config
from palm_mtf.data.batches.corpus import open_neighbours
from palm_mtf.data.batches.neighbours import NeighbourIndex, hash_tokens
from palm_mtf.data.batches.packing import document_start, row_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.decode.score_program import ScoreRows
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import Chosen

# Row lengths are powers of two, or SEQUENCE_LENGTH, so that few programs serve
# all texts and a short text costs less than a long text. The number of rows per
# batch depends only on the row length, so that the score of a text does not
# depend on the other texts.
_SHORTEST_ROW = 32
# Tokens per batch. With this many tokens, reading the weights costs little
# compared with the arithmetic.
_TOKENS_AT_ONCE = 2048


class Window(NamedTuple):
  """Part of a text that one row scores, as indices of the text's tokens."""

  start: int  # first token that is read
  first: int  # first token that is scored
  stop: int  # end of the tokens that are read and scored


def find_windows(
  num_tokens: int, first: int, length: int, stride: int
) -> list[Window]:
  """Returns the windows that score tokens from `first` on, in the text's order.

  Args:
    num_tokens: number of tokens in inputs and targets.
    first: number of tokens in the inputs.
    length: maximum number of tokens in a row.
    stride: maximum number of scored tokens in each window after the first; must
      not exceed `length`.
  """
  # If inputs and targets together are too long for a row, the beginning of the
  # inputs is left out. Targets that fill a row or more are scored without
  # inputs. In windows after the first, a scored token attends to at least
  # length - stride earlier tokens.
  start = max(0, min(first, num_tokens - length))
  stop = min(start + length, num_tokens)
  found = [Window(start, first, stop)]
  while stop < num_tokens:
    scored, stop = stop, min(stop + stride, num_tokens)
    found.append(Window(stop - length, scored, stop))
  return found


def choose_row_length(num_tokens: int, length: int) -> int:
  """Rounds `num_tokens` up to a power of two, but at most to `length`."""
  enough = max(_SHORTEST_ROW, 1 << (num_tokens - 1).bit_length())
  return min(enough, length)


def count_rows_at_once(length: int, slices: int) -> int:
  """Returns the number of rows per batch for rows of `length` tokens.

  It is a multiple of `slices`, into which the mesh splits the batch.
  """
  return -(-max(_TOKENS_AT_ONCE // length, 1) // slices) * slices


class Example(NamedTuple):
  """Token ids of targets to score, and of the inputs before them."""

  inputs: Sequence[int]  # may be empty
  targets: Sequence[int]  # at least one


class _Text(NamedTuple):
  start_id: int  # token before `ids`
  ids: list[int]  # inputs and targets
  num_given: int  # number of inputs in `ids`, which are not scored
  document: int  # hash of the text, in which it finds no neighbours


class Score(NamedTuple):
  """The likelihood of the targets of one example."""

  log_likelihood: float  # in nats
  is_greedy: bool  # whether greedy decoding gives the targets


class Divergence(NamedTuple):
  """How a model differs from another, at each scored token, [tokens] each."""

  loss: np.ndarray  # -log p of the token, in nats, float64
  loss_of_other: np.ndarray  # the same by the other model
  # Kullback-Leibler divergence of the model's distribution q from the other
  # model's p, the sum over the vocabulary of p log(p / q), in nats, float64.
  kl: np.ndarray
  agrees: np.ndarray  # whether both models find the same token likeliest, bool


def make_scorer(
  loaded: LoadedDecoder,
  config: Config,
  vocabulary: Vocabulary,
  *,
  within_document: bool = False,
) -> "Scorer":
  """Makes the scorer of a run, so that all commands compute the same log p.

  If `within_document`, texts are from the middle of documents: the token before
  a text then starts a row, not a document.
  """
  data = config.data
  first = row_start(data, vocabulary)
  return Scorer(
    loaded,
    config.evaluation.stride,
    first if within_document else document_start(data, vocabulary),
    first,
    adds_start=data.add_start,
    neighbours=open_neighbours(config, vocabulary),
    eod_id=vocabulary.eod_id,
  )


class Scorer:
  """Computes log p of texts with the weights of one checkpoint."""

  def __init__(
    self,
    loaded: LoadedDecoder,
    stride: int | None = None,
    start_id: int = 0,
    first: int = 0,
    *,
    adds_start: bool = True,
    neighbours: NeighbourIndex | None = None,
    eod_id: int = 0,
  ):
    """Takes the weights; a graph per shape of batch is built at its first use.

    Args:
      stride: number of scored tokens in each window after the first; None for
        half of the sequence length.
      start_id: token that precedes a text, and in training a document.
      first: token that precedes a window inside a text, and in training a row
        that begins within a document.
      adds_start: whether `start_id` stands before inputs, too; if False, inputs
        begin with their first token.
      neighbours: where chunks find neighbours, but none in the text itself,
        which ends with `eod_id` there; None if layers attend to none.
    """
    self._loaded, self._adds_start = loaded, adds_start
    self._start_id, self._first = start_id, first
    self._length = loaded.config.text_length
    self._stride = min(stride or max(self._length // 2, 1), self._length)
    self._build = functools.cache(lambda x: loaded.build(x, ""))
    self._index, self._neighbours = loaded.index, neighbours
    self._eod_id = eod_id

  def log_likelihoods(
    self, examples: Sequence[Example]
  ) -> Iterator[tuple[int, float]]:
    """Yields (index of an example, log p of its targets) in any order."""
    for index, losses in self.token_losses(examples):
      yield index, -math.fsum(losses.tolist())

  def token_losses(
    self, examples: Sequence[Example]
  ) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index of an example, -log p of each target) in any order."""
    for index, parts in self._score(examples, "token_loss"):
      yield index, np.concatenate([loss for (loss,) in parts])

  def scores(self, examples: Sequence[Example]) -> Iterator[tuple[int, Score]]:
    """Yields (index of an example, its score) in any order.

    Raises UserError if there is an index.
    """
    if self._index:
      raise UserError(
        "KNN_INDEX: finds no likeliest tokens of given texts; leave it out."
      )
    for index, parts in self._score(examples, "token_loss", "is_likeliest"):
      losses, likeliest = (np.concatenate(x) for x in zip(*parts, strict=True))
      score = Score(-math.fsum(losses.tolist()), bool(likeliest.all()))
      yield index, score

  def score_prompt(self, ids: Sequence[int], adapter: int = 0) -> list[Chosen]:
    """Returns a prompt's tokens after the first, with log p, for a server.

    There are at least 2 and at most SEQUENCE_LENGTH + 1 `ids`. `adapter` is the
    number of the prompt's adapter, 0 for none.
    """
    count, size = len(ids) - 1, self._loaded.num_slices
    length = choose_row_length(count, self._length)
    inputs, targets = np.zeros([2, size, length], np.int32)
    inputs[:, :count], targets[:, :count] = ids[:-1], ids[1:]
    # In a prefix language model, inputs attend to later inputs. Count only the
    # first token as an input, so that each token is scored from earlier tokens,
    # as if sampling had chosen it.
    losses, likeliest, their_losses = (
      x[0, :count].tolist()
      for x in self._run(
        ("token_loss", "likeliest", "likeliest_loss"),
        *(inputs, targets, np.ones([size], np.int32), adapter),
      )
    )
    return [
      Chosen(token, -loss, {x: -y for x, y in zip(others, ys, strict=True)})
      for token, loss, others, ys in zip(
        ids[1:], losses, likeliest, their_losses, strict=True
      )
    ]

  def divergence(self, example: Example, other: "Scorer") -> Divergence:
    """Compares with another model at each target of an example.

    The models have the same vocabulary; the other one reads as long rows. At
    any time, memory holds the distributions of both at the tokens of one row.
    """

    def run(*rows: np.ndarray) -> list[np.ndarray]:
      (log_q,), (log_p,) = (x._run(("log_p",), *rows) for x in (self, other))
      found = [_compare(*x) for x in zip(log_q, log_p, rows[1], strict=True)]
      return [np.stack(x) for x in zip(*found, strict=True)]

    found = self._run_windows([example], run, self._loaded.num_slices)
    parts = [part for *_, part in found]
    return Divergence(*map(np.concatenate, zip(*parts, strict=True)))

  def _score(
    self, examples: Sequence[Example], *names: str
  ) -> Iterator[tuple[int, list[list[np.ndarray]]]]:
    # Yields (index of an example, a list per window). The list has, for each of
    # `names`, the first of which is "token_loss", what `read_windows` yields.
    if self._index:
      names += ("key",)
    parts = collections.defaultdict(list)
    missing = [len(each.targets) for each in examples]
    for index, first, found in self.read_windows(examples, *names):
      losses = found[0]
      missing[index] -= len(losses)
      if self._index:
        targets = examples[index].targets[first : first + len(losses)]
        found[0] = -self._index.log_p(-losses, found.pop(), targets)
      parts[index].append(found)
      if not missing[index]:
        yield index, parts.pop(index)

  def read_windows(
    self, examples: Sequence[Example], *names: str
  ) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """Yields outputs of ScoreRows of all windows, those of a text in its order.

    Yields (index of an example, place of the window's first scored token in its
    targets, an output for each of `names` at the window's scored tokens).
    """
    yield from self._run_windows(examples, functools.partial(self._run, names))

  def _run_windows(
    self,
    examples: Sequence[Example],
    run: Callable[..., list[np.ndarray]],
    rows_at_once: int | None = None,
  ) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    # Yields what `read_windows` does, with the arrays that `run` returns for
    # inputs, targets and numbers of given inputs.
    rows = collections.defaultdict(list)  # {row length: [(index, window)]}
    texts = [self._begin(example) for example in examples]
    for index, text in enumerate(texts):
      found = find_windows(
        len(text.ids), text.num_given, self._length, self._stride
      )
      for window in found:
        needed = choose_row_length(window.stop - window.start, self._length)
        if self._neighbours:  # a row has whole chunks
          needed = self._length
        rows[needed].append((index, window))
    # Score the shortest rows first, so that the first results come early.
    for length in sorted(rows):
      slices = self._loaded.num_slices
      size = rows_at_once or count_rows_at_once(length, slices)
      for start in range(0, len(rows[length]), size):
        some = rows[length][start : start + size]
        found = self._score_rows(texts, some, length, size, run)
        for (index, window), part in zip(some, found, strict=True):
          yield index, window.first - texts[index].num_given, part

  def _begin(self, example: Example) -> _Text:
    inputs, targets = example
    ids, given, document = [*inputs, *targets], len(inputs), 0
    if self._neighbours:
      document = hash_tokens(np.array([*ids, self._eod_id]))
    if given and not self._adds_start:
      return _Text(ids[0], ids[1:], given - 1, document)
    return _Text(self._start_id, ids, given, document)

  def _score_rows(
    self,
    texts: Sequence[_Text],
    rows: Sequence[tuple[int, Window]],
    length: int,
    size: int,
    run: Callable[..., list[np.ndarray]],
  ) -> list[list[np.ndarray]]:
    # Each row holds a window. Returns, per row, each array of `run`.
    inputs, targets = np.zeros([2, size, length], np.int32)
    num_given = np.zeros([size], np.int32)
    for row, (index, window) in enumerate(rows):
      start_id, ids, *_ = texts[index]
      ids = ids[window.start : window.stop]
      targets[row, : len(ids)] = ids
      inputs[row, 0] = self._first if window.start else start_id
      inputs[row, 1 : len(ids)] = ids[:-1]
      # All tokens before the first scored token count as given inputs.
      num_given[row] = 1 + window.first - window.start
    more = {}
    if self._neighbours:
      hidden = [[texts[i].document] for i, _ in rows]
      hidden += [[]] * (size - len(rows))
      found = map(self._neighbours.find, inputs, hidden)
      more["neighbours"] = np.stack([*found])
    values = run(inputs, targets, num_given, **more)
    return [
      [x[row, w.first - w.start : w.stop - w.start] for x in values]
      for row, (_, w) in enumerate(rows)
    ]

  def _run(
    self,
    names: tuple[str, ...],
    inputs: np.ndarray,
    targets: np.ndarray,
    num_given: np.ndarray,
    adapter: int = 0,
    **more: np.ndarray,
  ) -> list[np.ndarray]:
    virtual = self._loaded.num_virtual
    inputs, targets = np.pad([inputs, targets], [[0, 0], [0, 0], [virtual, 0]])
    rows = {
      "inputs": inputs,
      "targets": targets,
      "num_given": num_given + virtual,
    }
    rows |= {"adapter": adapter} if adapter else {}
    given = names, bool(adapter), *(x.shape[1] for x in more.values())
    rows |= more
    program = self._build(ScoreRows(*inputs.shape, *given))
    found = self._loaded.client.call(program, rows)
    return [found[x][:, virtual:] for x in names]


def _compare(
  log_q: np.ndarray, log_p: np.ndarray, targets: np.ndarray
) -> Divergence:
  # log_q and log_p are [length, vocab]; targets are [length].
  def loss(x):
    return -np.take_along_axis(x, targets[:, np.newaxis], 1)[:, 0]

  agrees = log_q.argmax(1) == log_p.argmax(1)
  log_q, log_p = (x.astype(np.float64) for x in (log_q, log_p))
  p, q = np.exp(log_p), np.exp(log_q)
  kl = np.einsum("lv,lv->l", p, log_p - log_q)
  # Float32 logs have sums of p and q that differ from 1 by more than a small
  # divergence. The divergence is at least 0 for these sums, too.
  kl = np.maximum(kl + (q - p).sum(1), 0.0)
  return Divergence(loss(log_q), loss(log_p), kl, agrees)
