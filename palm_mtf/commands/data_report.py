# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf data report`: files, filters, duplicates and batches of a run.

A run with the settings in the report's "gin" and the files in "files" reads
the same batches.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from palm_mtf.commands.data import count_documents
from palm_mtf.config import Config, FilterConfig
from palm_mtf.config.data import NEAR
from palm_mtf.console import print_results
from palm_mtf.data.batches.corpus import batch_hash, corpus_of_run
from palm_mtf.data.filters.decide import count_removed, decide
from palm_mtf.data.filters.filtered_source import (
  evaluation_examples,
  read_evaluation_sets,
)
from palm_mtf.data.ngrams import ContainedExamples
from palm_mtf.data.sources.file_list import list_files
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.user_text import read_json_lines

_FORM = "give what `palm_mtf data report --json` printed"
_COMPARED = ("vocabulary_sha256", "tokens", "batches")
_MEASURED = ("contaminated", "exact_duplicates", "near_duplicates")


def data_report(
  *,
  model_dir: str,
  config: Config,
  config_files: Callable[..., Mapping[str, str]],
  against: str | None,
  as_json: bool,
) -> int:
  """Prints the report; returns 1 if it differs from the report `against`."""
  before = _read(against) if against else {}
  files = list_files(model_dir, config.data, config.model.sequence_length)
  report: dict[str, Any] = {"files": files}
  changed = [*_list_changes(before["files"], files)] if before else []
  if not changed:  # other files would be encoded for nothing
    report |= _describe(model_dir, config)
    report["gin"] = config_files()["config.gin"]
    differ = [x for x in _COMPARED if before and report[x] != before.get(x)]
    changed = [f"{name} differ" for name in differ]
  if as_json:
    print(json_text(report | {"changed": changed}))
    return int(bool(changed))
  for path, file in files.items():
    given = file["license"] or "no licence"
    print(f"{file['blake2b']}  {file['bytes']:,} bytes  {given}  {path}")
  for each in (*report.pop("sources", ()), report):
    found = {x: y for x, y in each.items() if x not in ("files", "gin")}
    print_results(found, as_json) if found else None
  print("".join(f"{line}\n" for line in changed), end="")
  return int(bool(changed))


def _read(path: str) -> dict[str, Any]:
  what = f"--against = {path!r}"
  lines = read_json_lines(path, what, _FORM, needed=_FORM)
  ((_, _, report), *others) = lines
  files = report.get("files")
  if others or not isinstance(files, dict):
    raise UserError(f"{what}: is not one report with 'files'; {_FORM}.")
  for path, file in files.items():
    if not isinstance(file, dict) or type(file.get("blake2b")) is not str:
      raise UserError(f"{what}: has no hash of {path}; {_FORM}.")
  return report


def _list_changes(
  before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
  old, new = ({x: y["blake2b"] for x, y in z.items()} for z in (before, now))
  changes = {}
  for these, others, what in ((old, new, "is missing"), (new, old, "is new")):
    # A file may have moved, so count how often each hash occurs.
    more = collections.Counter(these.values())
    more.subtract(others.values())
    for path, digest in these.items():
      if more[digest] > 0 and others.get(path) != digest:
        more[digest] -= 1
        changes[path] = "was changed" if path in others else what
  return (f"{path} {what}" for path, what in changes.items())


def _describe(model_dir: str, config: Config) -> dict[str, Any]:
  """Returns hashes of tokens and batches, and counts of each source."""
  data, run = config.data, config.run
  vocabulary = load_vocabulary(
    model_dir, data, vocab_size=config.model.vocab_size
  )
  corpus = corpus_of_run(model_dir, config, vocabulary)
  batches = corpus.batches(run.batch_sizes, config.fault_tolerance.skips)
  steps = {*config.inspection.inspect_steps, run.train_steps - 1}
  tasks = config.evaluation.eval_tasks
  examples = ContainedExamples(
    itertools.chain(
      read_evaluation_sets(data),
      *(evaluation_examples(x, "EVAL_TASKS") for x in tasks),
    )
  )
  # Count what filters would remove, also if the run does not remove it.
  found = decide(
    open_sources(data, config.model.sequence_length),
    FilterConfig(remove_duplicates=NEAR),
    examples if examples.num_examples else None,
  )
  sources = []
  for source, store, decisions in zip(
    corpus.sources, corpus.stores, found, strict=True
  ):
    counts = count_removed(decisions)
    read = max(1, counts["documents_read"])
    shares = {f"share_{x}": counts[f"removed_{x}"] / read for x in _MEASURED}
    known = {"source": source.name, **count_documents(store)}
    sources.append(known | shares)
  return {
    "vocabulary_sha256": vocabulary.sha256,
    "tokens": corpus.fingerprint,
    "batches": {
      str(step): batch_hash(batches.batch(step)) for step in sorted(steps)
    },
    "evaluation_examples": examples.num_examples,
    "short_evaluation_examples": examples.num_short,  # not looked for
    "sources": sources,
  }
