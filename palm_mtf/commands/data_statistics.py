# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf data statistics`: what a corpus holds, and what of it twice.

Documents, bytes, tokens, duplicates, and how much of the held-out documents, or
of another evaluation set, is in the training documents. The work is in
data/statistics/survey.py; this prints it.
"""

import dataclasses
import json
import logging
from collections.abc import Sequence

from palm_mtf.config import CorpusConfig, DataConfig
from palm_mtf.data.sources.open import open_sources
from palm_mtf.data.sources.read_files import MACROS
from palm_mtf.data.sources.text_files import TextFiles
from palm_mtf.data.statistics.contamination import Contamination, Examples
from palm_mtf.data.statistics.near_duplicates import Group
from palm_mtf.data.statistics.survey import Measured, Survey, survey
from palm_mtf.data.vocabulary.vocabulary import Vocabulary, load_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import check_model_dir

_logger = logging.getLogger(__name__)


def data_statistics(
  *, model_dir: str, config: CorpusConfig, as_json: bool = False
) -> None:
  """Prints the statistics of the documents that a run learns from.

  Args:
    model_dir: where vocabulary.model is, or is trained, if VOCABULARY is None;
      where it cannot be trained, tokens are not counted.
    config: documents, vocabulary, and OVERLAP_FILES, read like TEXT_FILES.
    as_json: print one JSON object instead of a table for people.

  Raises:
    UserError: there is no text, or VOCABULARY is no fitting model.
  """
  check_model_dir(model_dir)
  sources = open_sources(config.data)
  evaluation_sets = {}
  overlap_files = config.inspection.overlap_files
  if overlap_files is not None:
    examples = _read_examples(overlap_files, config.data)
    evaluation_sets["OVERLAP_FILES"] = examples
  vocabulary = _find_vocabulary(model_dir, config)
  result = survey(sources, vocabulary, evaluation_sets)
  if as_json:
    print(json.dumps(_as_json(result)))
  else:
    print("\n".join(_lines(result)))


def _read_examples(globs: str | Sequence[str], data: DataConfig) -> Examples:
  """Returns all documents of OVERLAP_FILES, of whatever split."""
  files = TextFiles(
    [globs] if isinstance(globs, str) else globs,
    text_field=data.text_field,
    validation_share=data.validation_share,
    name="OVERLAP_FILES",
    settings=MACROS._replace(files="OVERLAP_FILES"),
  )
  examples = Examples()
  for _, document in files.documents():
    examples.add(document)
  files.report_skipped()
  return examples


def _find_vocabulary(model_dir: str, config: CorpusConfig) -> Vocabulary | None:
  """Returns the vocabulary of the run, or None, and says why."""
  try:
    return load_vocabulary(
      model_dir, config.data, vocab_size=config.model.vocab_size
    )
  except UserError as error:
    if config.data.vocabulary is not None:
      raise
    _logger.warning(f"tokens are not counted: {error}")
    return None


def _as_json(result: Survey) -> dict[str, object]:
  """Returns what --json prints."""

  def groups(found: Sequence[Group]) -> list[dict[str, object]]:
    return [
      {"size": each.size, "start": result.starts[each.digest]} for each in found
    ]

  def flat(measured: Measured) -> dict[str, object]:
    found = measured.duplicates
    values = dataclasses.asdict(measured.counts) | dataclasses.asdict(found)
    values["largest_exact"] = groups(found.largest_exact)
    values["largest_near"] = groups(found.largest_near)
    return values

  return {
    "sources": {name: flat(each) for name, each in result.sources.items()},
    "all": flat(result.total),
    "overlap": {
      name: dataclasses.asdict(each)
      for name, each in result.contamination.items()
    },
  }


def _lines(result: Survey) -> list[str]:
  """Returns what is printed for people."""
  measured = dict(result.sources)
  if len(measured) > 1:
    measured["all"] = result.total
  header = ("source", "documents", "bytes", "tokens", "held out")
  header += ("exact copies", "near copies", "longest")
  longest = result.total.counts
  return [
    *_table([header, *(_row(*each) for each in measured.items())]),
    "",
    *_copies_lines(result),
    _line("longest document", f"{longest.longest_bytes:,} bytes"),
    _line("", repr(longest.longest_start)),
    *_held_out_lines(result),
    *(
      line
      for name, overlap in result.contamination.items()
      if name != "validation"
      for line in (
        _line(name, f"{overlap.examples:,} documents"),
        *_overlap_lines(overlap),
      )
    ),
  ]


def _line(name: str, text: str) -> str:
  return f"{name:18} {text}"


def _row(name: str, measured: Measured) -> tuple[str, ...]:
  counts, found = measured
  return (
    name,
    f"{counts.documents:,}",
    f"{counts.bytes:,}",
    "not counted" if counts.tokens is None else f"{counts.tokens:,}",
    _percent(counts.held_out_documents, counts.documents),
    _percent(found.exact_documents, counts.documents),
    _percent(found.near_texts, counts.documents),
    f"{counts.longest_bytes:,}",
  )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns aligned lines: names to the left, numbers to the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join(
      [
        row[0].ljust(widths[0]),
        *(x.rjust(width) for x, width in zip(row[1:], widths[1:], strict=True)),
      ]
    )
    for row in rows
  ]


def _copies_lines(result: Survey) -> list[str]:
  found, total_bytes = result.total.duplicates, result.total.counts.bytes
  return [
    _line(
      "exact copies",
      f"{found.exact_documents:,} documents, {found.exact_bytes:,} bytes "
      f"({_percent(found.exact_bytes, total_bytes)}) repeat another's text",
    ),
    *_group_lines(found.largest_exact, "documents", result),
    _line(
      "near copies",
      f"{found.near_texts:,} texts, {found.near_bytes:,} bytes "
      f"({_percent(found.near_bytes, total_bytes)}) beyond one of each group",
    ),
    _line(
      "  groups",
      f"{found.near_groups:,}, of texts with about 80% of their "
      "5-word runs in common",
    ),
    *_group_lines(found.largest_near, "texts", result),
  ]


def _group_lines(
  groups: Sequence[Group], what: str, result: Survey
) -> list[str]:
  return [
    _line(f"  {each.size:,} {what}", repr(result.starts[each.digest]))
    for each in groups
  ]


def _held_out_lines(result: Survey) -> list[str]:
  counts, found = result.total.counts, result.total.duplicates
  line = _line("held out", f"{counts.held_out_documents:,} documents")
  if not counts.held_out_documents:
    return [line]
  return [
    line,
    _line(
      "  exact copies",
      f"{found.exact_across:,} have the text of a training document",
    ),
    _line(
      "  near copies",
      f"{found.near_across:,} more are near copies of a training document",
    ),
    *_overlap_lines(result.contamination["validation"]),
  ]


def _overlap_lines(overlap: Contamination) -> list[str]:
  share = _percent(overlap.contaminated, overlap.judged)
  lines = [
    _line(
      "  contaminated",
      f"{overlap.contaminated:,} ({share}) have 70% or more of their 8-grams "
      "in training",
    ),
    _line(
      "  8-grams",
      f"{100 * overlap.ngram_share:.2f}% of all are in training documents",
    ),
    _line(
      "  short",
      f"{overlap.short:,} have fewer than 8 words; training documents have "
      f"{overlap.contaminated_short:,} whole",
    ),
  ]
  if overlap.judged < overlap.examples:
    lines.append(_line("  judged", f"a sample of {overlap.judged:,} of them"))
  return lines


def _percent(part: int, whole: int) -> str:
  return f"{100 * part / max(1, whole):.2f}%"
