# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf data statistics`: counts documents, tokens, duplicates, overlap."""

# Overlap is what section 8 of the PaLM paper calls contamination: the share of
# an evaluation set's examples that occur in the training documents. The
# held-out documents count as an evaluation set too.

import dataclasses
import itertools
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config import CorpusConfig, StatisticsConfig
from palm_mtf.console import format_table
from palm_mtf.data import ngrams
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


class Measured(NamedTuple):
  """The counts and the duplicates of one source, or of all sources together."""

  counts: TextCounts
  duplicates: ngrams.Duplicates


@dataclasses.dataclass(frozen=True)
class Survey:
  """The statistics of a corpus."""

  sources: dict[str, Measured]  # by source name
  total: Measured  # all sources together, with duplicates across sources
  # Maps each evaluation set to its contamination by all training documents.
  # The set "validation" is the validation split of all sources.
  contamination: dict[str, ngrams.Contamination]
  # {digest of a group of duplicates: beginning of its text}, for the largest
  # groups. The output shows this text instead of the digest.
  starts: dict[bytes, str]
  # One item per source; the items are empty if tokens were not counted.
  lengths: list[EpochLengths]


def survey(
  sources: Sequence[Source],
  count_tokens: Callable[..., Iterator[tuple]] | None,
  evaluation_sets: dict[str, ngrams.Examples],
) -> Survey:
  """Reads all sources twice and returns their statistics.

  Args:
    sources: sources of a run; each logs a warning if it skips documents.
    count_tokens: the method `count` of an `Encoder`; None to count no tokens.
    evaluation_sets: evaluation sets by name, without the validation split.

  Raises:
    UserError: a source cannot be read.
  """
  counts, sketches, lengths = (
    [kind() for _ in sources]
    for kind in (TextCounts, ngrams.Sketches, EpochLengths)
  )
  total, held_out = TextCounts(), ngrams.Examples()
  # First reading: counts, sketches of all documents to find duplicates, and
  # n-grams of held-out documents to find contamination.
  for source, counted, sketch, length in zip(
    sources, counts, sketches, lengths, strict=True
  ):
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
      total.add(split, document, tokens)
      sketch.add(document, split)
      if split == VALIDATION:
        held_out.add(document)
    source.report_skipped()
  measured = {
    source.name: Measured(counted, ngrams.find_duplicates([sketch]))
    for source, counted, sketch in zip(sources, counts, sketches, strict=True)
  }
  everything = Measured(total, ngrams.find_duplicates(sketches))
  del sketches, sketch  # frees memory for the second reading
  searches = {
    name: ngrams.ContaminationSearch(examples)
    for name, examples in {"validation": held_out, **evaluation_sets}.items()
  }
  starts = _search(sources, [*measured.values(), everything], searches)
  found = {name: each.result() for name, each in searches.items()}
  return Survey(measured, everything, found, starts, lengths)


def _search(
  sources: Sequence[Source],
  measured: Sequence[Measured],
  searches: Mapping[str, ngrams.ContaminationSearch],
) -> dict[bytes, str]:
  """Adds training documents to `searches`; returns {digest: start of text}."""
  wanted = {
    group.digest
    for each in measured
    for group in each.duplicates.largest_exact + each.duplicates.largest_near
  }
  starts = {}
  for source in sources:
    for split, document in read_with_progress(source, "Comparing"):
      digest = document.digest()
      if digest in wanted:
        starts[digest] = _start_of(document)
      if split == TRAIN:
        for search in searches.values():
          search.add(document)
  return starts


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
  *, model_dir: str, config: StatisticsConfig, as_json: bool = False
) -> None:
  """Prints statistics of the training and held-out documents of a run."""
  sources = filtered_source.open_filtered(model_dir, config.data)
  evaluation_sets = {}
  overlap_files = config.inspection.overlap_files
  if overlap_files is not None:
    examples = evaluation_sets["OVERLAP_FILES"] = ngrams.Examples()
    for document in filtered_source.read_all(
      overlap_files, config.data, "OVERLAP_FILES"
    ):
      examples.add(document)
  vocabulary = _find_vocabulary(model_dir, config)
  epochs = {}
  if vocabulary is None:
    result = survey(sources, None, evaluation_sets)
  else:
    with Encoder(vocabulary) as encoder:
      result = survey(sources, encoder.count, evaluation_sets)
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
    found = _make_record(result)
    if epochs:
      found["epochs"] = {name: x._asdict() for name, x in epochs.items()}
    print(json_text({**found, "filters": removed} if removed else found))
  else:
    lines = (
      _format_survey(result),
      _format_filters(removed),
      _format_epochs(config, epochs),
    )
    print("\n".join(itertools.chain(*lines)))


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


def _make_record(result: Survey) -> dict[str, object]:
  def flat(measured: Measured) -> dict[str, object]:
    found = measured.duplicates
    values = dataclasses.asdict(measured.counts) | dataclasses.asdict(found)
    for name in ("largest_exact", "largest_near"):
      # A group of copies is named by the beginning of its text, not by its
      # digest, because JSON cannot represent bytes.
      values[name] = [
        {"size": each.size, "start": result.starts[each.digest]}
        for each in getattr(found, name)
      ]
    return values

  return {
    "sources": {name: flat(each) for name, each in result.sources.items()},
    "all": flat(result.total),
    "overlap": {
      name: dataclasses.asdict(each)
      for name, each in result.contamination.items()
    },
  }


def _format_survey(result: Survey) -> Iterator[str]:
  measured = dict(result.sources)
  if len(measured) > 1:
    measured["all"] = result.total
  header = ("source", "documents", "bytes", "tokens", "held out")
  header += ("exact copies", "near copies", "longest")
  rows = (_format_row(*each) for each in measured.items())
  yield format_table([header, *rows], "<>>>>>>>")
  yield ""
  counts, found = result.total
  share = _format_percent(found.exact_bytes, counts.bytes)
  yield (
    f"exact copies       {found.exact_documents:,} documents, "
    f"{found.exact_bytes:,} bytes ({share}) repeat another's text"
  )
  yield from _format_groups(found.largest_exact, "documents", result)
  share = _format_percent(found.near_bytes, counts.bytes)
  yield (
    f"near copies        {found.near_texts:,} texts, {found.near_bytes:,} "
    f"bytes ({share}) beyond one of each group"
  )
  # The line says "about", because MinHash only estimates the share.
  yield (
    f"  groups           {found.near_groups:,}, of texts with about 80% of "
    "their 5-word runs in common"
  )
  yield from _format_groups(found.largest_near, "texts", result)
  yield f"longest document   {counts.longest_bytes:,} bytes"
  yield f"{'':18} {counts.longest_start!r}"
  yield f"held out           {counts.held_out_documents:,} documents"
  if counts.held_out_documents:
    yield (
      f"  exact copies     {found.exact_across:,} have the text of a training "
      "document"
    )
    yield (
      f"  near copies      {found.near_across:,} more are near copies of a "
      "training document"
    )
    yield from _format_overlap(result.contamination["validation"])
  for name, overlap in result.contamination.items():
    if name != "validation":
      yield f"{name:18} {overlap.examples:,} documents"
      yield from _format_overlap(overlap)


def _format_filters(removed: dict[str, dict[str, int]]) -> Iterator[str]:
  for name, counts in removed.items():
    yield f"filters            {name}"
    for what, count in counts.items():
      yield f"  {count:,} {what.replace('_', ' ')}"


def _format_epochs(
  config: StatisticsConfig, epochs: Mapping[str, Reading]
) -> Iterator[str]:
  if not epochs:
    return
  length = config.model.sequence_length
  yield (
    f"epochs             {config.train_steps:,} steps read "
    f"{config.num_rows:,} rows of {length:,} tokens"
  )
  for name, reading in epochs.items():
    found = reading.epochs
    yield (
      f"  {'none' if found is None else f'{found:.2f}':16} {name}: "
      f"{reading.epoch_tokens:,} training tokens, rate {reading.rate:.4g}"
    )


def _format_row(name: str, measured: Measured) -> tuple[str, ...]:
  counts, found = measured
  return (
    name,
    f"{counts.documents:,}",
    f"{counts.bytes:,}",
    "not counted" if counts.tokens is None else f"{counts.tokens:,}",
    _format_percent(counts.held_out_documents, counts.documents),
    _format_percent(found.exact_documents, counts.documents),
    _format_percent(found.near_texts, counts.documents),
    f"{counts.longest_bytes:,}",
  )


def _format_groups(
  groups: Sequence[ngrams.Group], what: str, result: Survey
) -> Iterator[str]:
  for group in groups:
    name = f"  {group.size:,} {what}"
    yield f"{name:18} {result.starts[group.digest]!r}"


def _format_overlap(overlap: ngrams.Contamination) -> Iterator[str]:
  # As in the PaLM paper (section 8), an example is contaminated if at least 70%
  # of its 8-grams occur in training documents.
  share = _format_percent(overlap.contaminated, overlap.judged)
  yield (
    f"  contaminated     {overlap.contaminated:,} ({share}) have 70% or more "
    "of their 8-grams in training"
  )
  yield (
    f"  8-grams          {100 * overlap.ngram_share:.2f}% of all are in "
    "training documents"
  )
  # Count short examples separately: finding one in a large text proves little,
  # because such a text contains most sequences of a few words.
  yield (
    f"  short            {overlap.short:,} have fewer than 8 words; training "
    f"documents have {overlap.contaminated_short:,} whole"
  )
  # If a set is too large for memory, only a sample of its examples is searched.
  if overlap.judged < overlap.examples:
    yield f"  searched         a sample of {overlap.judged:,} of them"


def _format_percent(part: int, whole: int) -> str:
  return f"{100 * part / max(1, whole):.2f}%"
