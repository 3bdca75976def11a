# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives, and packing of documents into rows of SEQUENCE_LENGTH tokens.

An objective makes inputs, which are given, and targets, which are learned. In
these examples "." is [eod]; X and Y are sentinels:

  text              a b c d e f g h .
  causal            inputs -             targets a b c d e f g h .
  prefix_lm         inputs a b c         targets d e f g h .
  span_corruption   inputs a b X f g Y   targets X c d e Y h .

Documents that have inputs and targets keep them under every objective. Answers
of a conversation are targets. If inputs attend in both directions, each answer
is an example by itself, whose inputs are the messages before it.

Documents are packed in four ways. The figure packs three documents into rows of
6 tokens: the texts "a b" and "c", and an example with inputs "d e" and targets
"f". "." is [eod], which follows each document; "_" is padding.

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
                 loss_weights   1 1 1 1 1 0    0 0 1 1 0 0

  single         targets        a b . _ _ _    c . _ _ _ _    d e f . _ _
                 inputs         0 a b 0 0 0    0 c 0 0 0 0    0 d e f 0 0
                 loss_weights   1 1 1 0 0 0    1 1 0 0 0 0    0 0 1 1 0 0

Each row and segment begins with START_ID instead of 0 if START_ID is set and
ADD_START is True. It begins with [eod] if ADD_START is False, or if token 0 is
a word, because no row may begin with a word that its text lacks.

Rows of "packed" and "single" also hold conversations. Their first token, which
is the first that the model reads in a chat, is an input but no target; loss
weights are 1 at the answers. If a row lacks room for a conversation, the turns
after the last answer that fits are left out. The conversation "0 q a . r b ."
with answers "a ." and "b ." in rows of 4 and 6 tokens:

  conversation   targets        q a . _    q a . r b .
                 inputs         0 q a 0    0 q a . r b
                 loss_weights   0 1 1 0    0 1 1 0 1 1

Rows of pairs hold both answers, each after the prompt. Weights of the rejected
answer are -1. "reference" is a number of the row (training/reference.py). The
prompt "q", of which "a ." is chosen and "b c ." is rejected:

  pair           targets        q a . q b c . _
                 inputs         0 q a 0 q b c 0
                 segments       1 1 1 2 2 2 2 0
                 loss_weights   0 1 1 0 - - - 0

PaLM (section 5) uses "joined". A token attends only to its own segment. Under
prefix_lm and span_corruption, inputs attend to one another in both directions.
Feature "prefix" is then 1 at the inputs and at the 0 before the first input. If
"a" and "c" were inputs too, the packed rows would have

                 prefix         1 1 0 1 1 0    1 1 1 0 0 0

Some adapters have virtual positions, which hold no tokens. Rows of "joined"
begin with them, and so does each document of other rows. If there are 2, packed
rows of 9 positions are

  virtual        targets        0 0 a b . 0 0 c .    0 0 d e f . _ _ _
                 inputs         0 0 0 a b 0 0 0 c    0 0 0 d e f 0 0 0
                 segments       1 1 1 1 1 2 2 2 2    1 1 1 1 1 1 0 0 0
                 loss_weights   0 0 1 1 1 0 0 1 1    0 0 0 0 1 1 0 0 0
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from palm_mtf.config import DataConfig
from palm_mtf.config.data import SpanCorruption
from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

if TYPE_CHECKING:  # commands that only need `prompt_start` begin sooner
  from palm_mtf.data.batches.neighbours import NeighbourIndex, Place
  from palm_mtf.data.tokens.shard import TokenArray


class Example(NamedTuple):
  """The tokens of the inputs, followed by the tokens of the targets."""

  tokens: np.ndarray  # [length], int32
  num_inputs: int


@dataclasses.dataclass(frozen=True)
class Objective:
  """Makes examples from texts. In this base class, all tokens are targets."""

  # Whether inputs attend to one another in both directions.
  has_prefix = False

  def cut(self, spans: np.ndarray, length: int) -> np.ndarray:
    """Splits texts into pieces, so that each piece's example fits into a row.

    `spans`, [n, 2], has the index of each text's first token in the source's
    tokens, and the index after its [eod]. The result, [pieces, 2], has the same
    indices for each piece.
    """
    return _cut_spans(spans, length)

  def lengths(self, pieces: np.ndarray) -> np.ndarray:
    """Returns each example's length in tokens, for packing: [pieces], int64."""
    return pieces[:, 1] - pieces[:, 0]

  def example(self, tokens: np.ndarray, key: str) -> Example:
    """Makes an example of a piece's `tokens`; `key` seeds random choices."""
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
    """Computes how many tokens and spans are removed from a text."""
    return SpanCorruption(self.noise_density, self.mean_span_length)

  def cut(self, spans: np.ndarray, length: int) -> np.ndarray:
    """Cuts texts without their [eod], which `example` adds; see `Objective`."""
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
  """Returns the objective `name`, a key of OBJECTIVES."""
  if name != "span_corruption":
    return OBJECTIVES[name]()
  return SpanCorruptionLM(
    data.noise_density,
    data.mean_span_length,
    first_sentinel=vocabulary.size - 1,  # <extra_id_0> has the highest id
    eod_id=vocabulary.eod_id,
  )


def to_json(objective: Objective) -> list[object]:
  """Returns an objective as a list, to hash it or to send it to servers."""
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


FEATURES = (
  *("inputs", "targets", "segments", "loss_weights", "prefix"),
  *("neighbours", "reference"),
)
Row = dict[str, np.ndarray]  # {feature, such as "inputs": [length]}


class Piece(NamedTuple):
  """Consecutive tokens of one document that one row holds."""

  source: str  # name of the source
  epoch: int
  document: int  # index in the source's TokenArray of training documents
  begin: int  # number of the document's tokens before this piece
  tokens: int


class JoinedRows:
  """Validation rows of one source: its documents, joined in order, then cut."""

  def __init__(
    self,
    tokens: "TokenArray",
    length: int,
    *,
    eod_id: int | None,
    first: int = 0,
    neighbours: "NeighbourIndex | None" = None,
  ):
    """Cuts rows of `length` tokens; see `make_joined_row` for the rest."""
    self._tokens = tokens
    self._length = length
    self._eod_id, self._first = eod_id, first
    self._neighbours = neighbours
    self.num_rows = len(tokens) // length
    self.features = join_features([tokens], eod_id, neighbours)

  def read(self, number: int) -> Row:
    """Returns the features of row `number`, which is below `num_rows`."""
    start = number * self._length
    place = self._tokens, start, start + self._length
    given = self.features, self._eod_id, self._first, self._neighbours
    return make_joined_row([place], *given)


def row_start(data: DataConfig, vocabulary: Vocabulary) -> int:
  """Returns a row's first input id, even if the row continues a document."""
  if data.add_start and data.start_id is not None:
    return data.start_id
  has_pad = data.add_start and vocabulary.is_control(0)
  return 0 if has_pad else vocabulary.eod_id


def document_start(data: DataConfig, vocabulary: Vocabulary) -> int:
  """Returns the input id at the position of a document's first target."""
  # Rows of "joined" begin with input 0 even within a document, so only [eod]
  # marks a document's start. Other packings begin every document with input 0.
  if data.packing == "joined" and data.start_id is None:
    return vocabulary.eod_id
  return row_start(data, vocabulary)


def prompt_start(data: DataConfig, vocabulary: Vocabulary) -> int | None:
  """Returns the id to put before a prompt; None if ADD_START is False."""
  return document_start(data, vocabulary) if data.add_start else None


def join_features(
  sources: Sequence["TokenArray"],
  eod_id: int | None,
  neighbours: "NeighbourIndex | None" = None,
) -> tuple[str, ...]:
  """Returns joined rows' feature names; no "segments" if `eod_id` is None."""
  features = ("inputs", "targets")
  if eod_id is not None:
    features += ("segments",)
  if any(tokens.has_inputs for tokens in sources):
    features += ("loss_weights",)
  return (*features, "neighbours") if neighbours else features


def make_joined_row(
  places: Sequence["Place"],
  features: Sequence[str],
  eod_id: int | None,
  first: int = 0,
  neighbours: "NeighbourIndex | None" = None,
) -> Row:
  """Returns the features of one row of joined documents.

  Args:
    places: where the tokens are.
    features: names that `join_features` returned.
    eod_id: id of [eod] if [eod] ends a segment; otherwise None.
    first: input at the start of the row or of a segment.
    neighbours: where the row's chunks find neighbours, if the model has any.
  """
  parts = [tokens.read(start, stop) for tokens, start, stop in places]
  targets, is_target = map(np.concatenate, zip(*parts, strict=True))
  row = {"inputs": _shift(targets, first), "targets": targets}
  if eod_id is not None:
    # A segment begins where the input is [eod]; `first` replaces that [eod].
    begins = row["inputs"] == eod_id
    begins[0] = False
    row["inputs"][begins] = first
    row["segments"] = (1 + np.cumsum(begins)).astype(np.int32)
  if "loss_weights" in features:
    row["loss_weights"] = is_target.astype(np.float32)
  if neighbours:
    from palm_mtf.data.batches.neighbours import find_documents

    hidden = find_documents(places)
    row["neighbours"] = neighbours.find(row["inputs"], hidden)
  return row


class WholeRows:
  """Padded rows that hold one whole document each or, if packed, several."""

  def __init__(
    self,
    tokens: "TokenArray",
    length: int,
    *,
    packed: bool,
    seed: int,
    objective: Objective = CAUSAL,
    first: int = 0,
    virtual: int = 0,
    has_pairs: bool = False,
  ):
    """Assigns documents to rows; memory holds a few integers per document.

    Args:
      tokens: tokens of at least one document.
      length: tokens per row.
      packed: whether a row holds as many documents as fit.
      seed: seed of the packing order and of the objective's random numbers.
      objective: what training predicts.
      first: input before the first token of a document.
      virtual: number of virtual positions before each document.
      has_pairs: whether documents are pairs, of which a row holds one.
    """
    self._tokens, self._first_input = tokens, first
    self._has_pairs = has_pairs
    self._length, self._virtual = length, virtual
    length -= virtual
    self._objective = objective
    self._seed = seed
    spans = tokens.spans()  # [documents, 3], token indices: start, targets, end
    too_long = spans[:, 2] - spans[:, 0] > length
    # Number of examples that are truncated because they are too long for a row.
    self.num_cut = int(too_long.sum()) if tokens.has_inputs else 0
    # Number of conversations whose first answer does not fit a row.
    self.num_dropped = 0
    self._begins = spans[:, 0]
    self._has_answers = tokens.has_answers
    if has_pairs:
      num_documents = len(spans)
      # Both conversations of a pair have virtual positions.
      spans = _cut_pairs(spans, tokens.answers(), length - virtual)
      self.num_dropped = num_documents - len(spans) // 2
    elif self._has_answers:
      num_documents = len(spans)
      # A row lacks the first token of a conversation, which is no target.
      spans, self.num_cut = _cut_conversations(
        spans, tokens.answers(), length + 1, each=objective.has_prefix
      )
      self.num_dropped = num_documents - len(np.unique(spans[:, 0]))
      lengths = spans[:, 2] - spans[:, 0] - 1
    elif tokens.has_inputs:
      spans = _cut_examples(spans, length)
      lengths = spans[:, 2] - spans[:, 0]
    else:
      pieces = objective.cut(spans[:, [0, 2]], length)
      spans, lengths = pieces[:, [0, 0, 1]], objective.lengths(pieces)
    # Row i holds the documents _spans[_first[i] : _first[i + 1]].
    self._first = np.arange(0, len(spans) + 1, 1 + has_pairs)
    if packed:
      order = shuffle(np.arange(len(spans)), len(spans), f"seed {seed} packing")
      spans = spans[order]
      self._first = _fill_rows(lengths[order] + virtual, self._length)
    self._spans = spans
    self.num_rows = len(self._first) - 1
    self.features = ("inputs", "targets", "loss_weights")
    # Feature "reference" of each row of pairs; training sets the values.
    self.reference = np.zeros(self.num_rows if has_pairs else 0, np.float32)
    if packed or objective.has_prefix or has_pairs:
      self.features += ("segments",)
    if has_pairs:
      self.features += ("reference",)
    if objective.has_prefix:
      self.features += ("prefix",)

  def read(self, number: int, epoch: int = 0) -> Row:
    """Returns the features of row `number`, which is below `num_rows`.

    `epoch` seeds the objective's random numbers.
    """
    row = {name: np.zeros(self._length, np.int32) for name in self.features}
    row["loss_weights"] = np.zeros(self._length, np.float32)
    end = 0
    for segment, span in enumerate(self._row_spans(number).tolist(), 1):
      tokens, num_inputs = self._read_example(*span, epoch)
      inputs, is_target = _shift(tokens, self._first_input), True
      if self._has_answers:
        inputs, tokens = tokens[:-1], tokens[1:]
        num_inputs -= 1
        _, is_target = self._tokens.read(span[1], span[2])
      start, begin = end, end + self._virtual
      end = begin + len(tokens)
      row["targets"][begin:end] = tokens
      row["inputs"][begin:end] = inputs
      sign = -1 if self._has_pairs and segment == 2 else 1
      row["loss_weights"][begin + num_inputs : end] = sign * is_target
      if "segments" in row:
        row["segments"][start:end] = segment
      if "prefix" in row:
        row["prefix"][start : min(end, begin + num_inputs + 1)] = 1
    if self._has_pairs:
      row["reference"] = self.reference[number]
    return row

  def pieces(self, number: int) -> list[tuple[int, int, int]]:
    """Returns (document, begin, number of tokens) per `Piece` of a row."""
    spans = self._row_spans(number)
    documents = np.searchsorted(self._begins, spans[:, 0], "right") - 1
    begins = spans[:, 0] - self._begins[documents]
    lengths = spans[:, 2] - spans[:, 0] - self._has_answers
    return list(
      zip(documents.tolist(), begins.tolist(), lengths.tolist(), strict=True)
    )

  def _row_spans(self, number: int) -> np.ndarray:
    return self._spans[self._first[number] : self._first[number + 1]]

  def _read_example(
    self, start: int, targets: int, stop: int, epoch: int
  ) -> Example:
    tokens, _ = self._tokens.read(start, stop)
    if self._tokens.has_inputs:
      return Example(tokens, targets - start)
    key = f"seed {self._seed} epoch {epoch} token {start}"
    return self._objective.example(tokens, key)


def _shift(targets: np.ndarray, first: int) -> np.ndarray:
  inputs = np.full_like(targets, first)
  inputs[1:] = targets[:-1]
  return inputs


def _cut_examples(spans: np.ndarray, length: int) -> np.ndarray:
  """Truncates examples to `length` tokens; `spans`: see TokenArray.spans."""
  start, targets, stop = spans.T
  # Keep the first targets that fit a row, then the last inputs that still fit.
  stop = np.minimum(stop, targets + length)
  return np.stack([np.maximum(start, stop - length), targets, stop], axis=1)


def _cut_conversations(
  spans: np.ndarray, answers: np.ndarray, length: int, *, each: bool
) -> tuple[np.ndarray, int]:
  """Cuts conversations to `length` tokens after an answer; drops others.

  Args:
    spans: see TokenArray.spans.
    answers: see TokenArray.answers.
    each: whether each answer becomes an example, which ends with it.

  Returns:
    The spans of the examples, [examples, 3], and how many conversations lose
    answers but not all.
  """
  start, _, stop = spans.T
  begins, ends = answers.T
  first = np.searchsorted(begins, start)  # the index of each first answer
  # The number of answers before the first that does not fit.
  kept = (
    np.searchsorted(ends, np.minimum(stop, start + length), "right") - first
  )
  counts = np.diff(first, append=len(answers))
  num_cut = int(((0 < kept) & (kept < counts)).sum())
  if each:
    which = np.repeat(np.arange(len(spans)), counts)
    fits = np.arange(len(answers)) - first[which] < kept[which]
    examples = np.stack([start[which], begins, ends], axis=1)[fits]
  else:
    # Keep all tokens of a conversation that fits, its [eod] included.
    stop = np.where(stop - start > length, ends[first + kept - 1], stop)
    examples = np.stack([start, spans[:, 1], stop], axis=1)[kept > 0]
  return examples, num_cut


def _cut_pairs(
  spans: np.ndarray, answers: np.ndarray, length: int
) -> np.ndarray:
  """Returns where both conversations of each pair are, [2 pairs, 3].

  Leaves out pairs that do not fit a row of `length` tokens. The arguments are
  TokenArray's; a row of the result is like one of `spans`.
  """
  (first, middle), (second, end) = answers[::2].T, answers[1::2].T
  chosen = np.stack([spans[:, 0], first, middle], axis=1)
  rejected = np.stack([middle, second, end], axis=1)
  # A row lacks the first token of each conversation, which is no target.
  fits = end - spans[:, 0] - 2 <= length
  return np.stack([chosen, rejected], axis=1)[fits].reshape(-1, 3)


def _fill_rows(lengths: np.ndarray, length: int) -> np.ndarray:
  """Fills rows of `length` tokens with whole documents of `lengths`, in order.

  Returns [rows + 1]: each row's first document, then the number of documents.
  """
  ends = np.cumsum(lengths).tolist()
  first, used = [0], 0
  while first[-1] < len(ends):
    after = bisect.bisect_right(ends, used + length)
    first.append(after)
    used = ends[after - 1]
  return np.array(first)
