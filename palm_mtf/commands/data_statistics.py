# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf data statistics`: counts documents, bytes, tokens and epochs."""

import dataclasses
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config import CorpusConfig, StatisticsConfig
from palm_mtf.console import format_table
from palm_mtf.data.batches.packing import Objective, WholeRows, make_objective
from palm_mtf.data.batches.row_streams import BLOCK_ROWS, Mixture
from palm_mtf.data.filters import filtered_source
from palm_mtf.data.sources.document import (
  TRAIN,
  VALIDATION,
  Document,
  Source,
  num_repeats,
  read_with_progress,
)
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.tokens.shard import Shard, TokenArray
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text

_logger = logging.getLogger(__name__)

_START_CHARACTERS = 60
_START_IDS = 10


@dataclasses.dataclass
class TextCounts:
  """Counts of the documents of one source, or of all sources."""

  documents: int = 0  # each counted once, however often a run reads it
  bytes: int = 0  # of all texts as UTF-8, or of token ids as arrays
  tokens: int | None = None  # with an [eod] per document; None if not counted
  held_out_documents: int = 0
  held_out_bytes: int = 0
  longest_bytes: int = 0  # size of the longest document
  longest_start: str = ""  # beginning of its text, so that the user finds it

  def add(self, split: str, document: Document, tokens: int | None) -> None:
    """Counts a document; `tokens` excludes [eod], and is None if unknown."""
    num_bytes = document.num_bytes
    self.documents += 1
    self.bytes += num_bytes
    if tokens is not None:
      self.tokens = (self.tokens or 0) + tokens + 1
    if split == VALIDATION:
      self.held_out_documents += 1
      self.held_out_bytes += num_bytes
    if num_bytes > self.longest_bytes:
      self.longest_bytes = num_bytes
      self.longest_start = _start_of(document)


class EpochLengths:
  """Tokens per training document of one source, to count an epoch's rows."""

  def __init__(self) -> None:
    self._inputs, self._texts = array("q"), array("q")

  def add(self, document: Document, num_inputs: int, num_text: int) -> None:
    """Adds a document once per read in an epoch; token counts omit [eod]."""
    times = num_repeats(document)
    self._inputs.extend([num_inputs] * times)
    self._texts.extend([num_text + 1] * times)

  def tokens(self, has_inputs: bool) -> TokenArray:
    """Returns documents of these lengths, with ids 0, which packing ignores."""
    inputs, texts = (
      np.frombuffer(x, np.int64) for x in (self._inputs, self._texts)
    )
    ends = np.cumsum(inputs + texts)
    total = int(ends[-1]) if len(ends) else 0
    tokens = np.broadcast_to(np.uint16(0), [total])  # a view of one number
    return TokenArray(
      [Shard(tokens, np.stack([ends - texts, ends]), has_inputs)]
    )


class Survey(NamedTuple):
  """The counts of a corpus."""

  sources: dict[str, TextCounts]  # by source name
  total: TextCounts  # of all sources together
  # One item per source; the items are empty if tokens were not counted.
  lengths: list[EpochLengths]


def survey(
  sources: Sequence[Source],
  count_tokens: Callable[..., Iterator[tuple]] | None,
) -> Survey:
  """Reads all sources and returns their counts.

  Args:
    sources: sources of a run; each logs a warning if it skips documents.
    count_tokens: the method `count` of an `Encoder`; None to count no tokens.

  Raises:
    UserError: a source cannot be read.
  """
  found = Survey({}, TextCounts(), [])
  for source in sources:
    counted, length = TextCounts(), EpochLengths()
    documents = read_with_progress(source, "Measuring")
    if count_tokens:
      counts_of = count_tokens(documents)
    else:
      counts_of = ((*each, None) for each in documents)
    for split, document, parts in counts_of:
      tokens = None if parts is None else sum(parts)
      if split == TRAIN and parts is not None:
        length.add(document, *parts)
      counted.add(split, document, tokens)
      found.total.add(split, document, tokens)
    source.report_skipped()
    found.sources[source.name] = counted
    found.lengths.append(length)
  return found


def _start_of(document: Document) -> str:
  text = document.text if document.inputs is None else document.inputs
  if isinstance(text, str):
    return text[:_START_CHARACTERS]
  return f"token ids {', '.join(map(str, text[:_START_IDS].tolist()))}"


class Reading(NamedTuple):
  """How much a run reads of one source."""

  rate: float  # share of the run's tokens, or of its rows if PACKING pads rows
  epoch_tokens: int  # tokens of all training documents, [eod] included
  epochs: float | None  # passes over these tokens; None if there are none


def epochs_of_run(
  sources: Sequence[Source],
  lengths: Sequence[EpochLengths],
  config: StatisticsConfig,
  objective: Objective,
) -> Mapping[str, Reading]:
  """Returns how much a run reads of each source, by the source's name.

  `lengths` has an item per source.
  """
  num_rows, packing = config.num_rows, config.data.packing
  sequence_length = config.model.sequence_length
  rates = np.array([source.rate for source in sources])
  rates /= rates.sum()
  has_padding = packing in ("packed", "single")
  if has_padding:
    rates = Mixture(rates, seed=config.seed).rows_of_block / BLOCK_ROWS
  found = {}
  for source, rate, each in zip(
    sources, map(float, rates), lengths, strict=True
  ):
    tokens, epochs = each.tokens(source.has_inputs), None
    if len(tokens) and has_padding:  # rows hold varying numbers of tokens
      rows = WholeRows(
        tokens,
        sequence_length,
        packed=packing == "packed",
        seed=config.seed,
        objective=objective,
      )
      epochs = num_rows * rate / rows.num_rows
    elif len(tokens):
      epochs = num_rows * sequence_length * rate / len(tokens)
    found[source.name] = Reading(rate, len(tokens), epochs)
  return found


def data_statistics(
  *, model_dir: str, config: StatisticsConfig, as_json: bool
) -> None:
  """Prints statistics of the training and held-out documents of a run."""
  sources = filtered_source.open_filtered(model_dir, config.data)
  vocabulary = _find_vocabulary(model_dir, config)
  epochs: Mapping[str, Reading] = {}
  if vocabulary is None:
    result = survey(sources, None)
  else:
    with Encoder(vocabulary) as encoder:
      result = survey(sources, encoder.count)
    if config.num_rows is not None:
      objective = make_objective(
        config.model.objective, config.data, vocabulary
      )
      epochs = epochs_of_run(sources, result.lengths, config, objective)
  removed = {
    x.name: x.counts
    for x in sources
    if isinstance(x, filtered_source.FilteredSource)
  }
  if as_json:
    found: dict[str, object] = {
      "sources": {x: vars(each) for x, each in result.sources.items()},
      "all": vars(result.total),
    }
    if epochs:
      found["epochs"] = {name: x._asdict() for name, x in epochs.items()}
    print(json_text({**found, "filters": removed} if removed else found))
  else:
    print("\n".join(_format(config, result, removed, epochs)))


def _find_vocabulary(model_dir: str, config: CorpusConfig) -> Vocabulary | None:
  """Opens VOCABULARY or, if None, MODEL_DIR's; None if that one is unusable."""
  try:
    return load_vocabulary(
      model_dir, config.data, vocab_size=config.model.vocab_size
    )
  except UserError as error:
    # If VOCABULARY is not set, continue: only token counts need a vocabulary.
    if config.data.vocabulary is not None:
      raise
    _logger.warning(f"tokens are not counted: {error}")
    return None


def _format(
  config: StatisticsConfig,
  result: Survey,
  removed: Mapping[str, Mapping[str, int]],
  epochs: Mapping[str, Reading],
) -> Iterator[str]:
  """Yields the lines of the table, of the filters and of the epochs."""
  counts = dict(result.sources)
  if len(counts) > 1:
    counts["all"] = result.total
  header = ("source", "documents", "bytes", "tokens", "held out", "longest")
  rows = (_format_row(*each) for each in counts.items())
  yield format_table([header, *rows], "<>>>>>")
  yield ""
  yield f"longest document   {result.total.longest_bytes:,} bytes"
  yield f"{'':18} {result.total.longest_start!r}"
  yield f"held out           {result.total.held_out_documents:,} documents"
  for name, removals in removed.items():
    yield f"filters            {name}"
    for what, count in removals.items():
      yield f"  {count:,} {what.replace('_', ' ')}"
  if epochs:
    yield (
      f"epochs             {config.train_steps:,} steps read "
      f"{config.num_rows:,} rows of {config.model.sequence_length:,} tokens"
    )
  for name, reading in epochs.items():
    number = "none" if reading.epochs is None else f"{reading.epochs:.2f}"
    yield (
      f"  {number:16} {name}: {reading.epoch_tokens:,} training tokens, rate "
      f"{reading.rate:.4g}"
    )


def _format_row(name: str, counts: TextCounts) -> tuple[str, ...]:
  held_out = 100 * counts.held_out_documents / max(1, counts.documents)
  return (
    name,
    f"{counts.documents:,}",
    f"{counts.bytes:,}",
    "not counted" if counts.tokens is None else f"{counts.tokens:,}",
    f"{held_out:.2f}%",
    f"{counts.longest_bytes:,}",
  )
