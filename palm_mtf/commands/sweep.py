# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf sweep`: trains runs that differ in some settings."""

# sweep/ has the steps: runs, runner, table.

import dataclasses
import json
from collections.abc import Sequence

from palm_mtf.config import ConfigOfSweep
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.tokens.cache import cache_stores
from palm_mtf.data.vocabulary.vocabulary import load_vocabulary
from palm_mtf.model_dir.atomic_files import check_model_dir, write_atomically
from palm_mtf.model_dir.layout import SweepDir
from palm_mtf.model_dir.lock import training_lock
from palm_mtf.sweep.runner import check_none_failed, cores_of_runs, train_runs
from palm_mtf.sweep.runs import LoadRun, SweepRun, check_unchanged, runs_of
from palm_mtf.sweep.table import rows_of, table_csv, table_text


def sweep(
  *, model_dir: str, config: ConfigOfSweep, load_run: LoadRun, as_json: bool
) -> None:
  """Trains the runs that have not ended yet, and prints the table of all.

  Args:
    model_dir: MODEL_DIR of the sweep, which has those of its runs.
    config: every setting, SWEEP_RUNS among them.
    load_run: function of the origin of macros and {macro: value} over the
      sweep's; returns settings and gin file of a training run.
    as_json: whether to print one JSON object a run.

  Raises:
    UserError: what was given cannot work, and nothing was trained; or a run
      failed, after all others were trained.
    StoppedError: a signal came; the same command goes on.
  """
  check_model_dir(model_dir)
  cores_of_runs(config.sweep.sweep_at_once)  # raises UserError for too many
  where = SweepDir(model_dir)
  runs = runs_of(config.sweep, config, where, load_run)
  check_unchanged(runs, where)
  with training_lock(model_dir):
    _make_data(where, runs[0])
    failed = train_runs(runs, config.sweep, where)
    _report(runs, where, as_json)
  check_none_failed(failed, where)


def _make_data(where: SweepDir, run: SweepRun) -> None:
  """Makes the vocabulary and the tokens that all runs read, where missing."""
  model, data = run.config.model, run.config.data
  if data.vocabulary == where.vocabulary:
    data = dataclasses.replace(data, vocabulary=None)  # trained if not there
  vocabulary = load_vocabulary(where.path, data, vocab_size=model.vocab_size)
  sources = open_filtered(where.path, data, model.sequence_length)
  for source in sources:
    source.check_vocabulary(vocabulary.sha256)
  cache_stores(where.path, data, sources, vocabulary)


def _report(runs: Sequence[SweepRun], where: SweepDir, as_json: bool) -> None:
  """Prints and keeps the table."""
  rows = rows_of(runs, where)
  write_atomically(where.table, table_csv(rows))
  write_atomically(where.results, json.dumps({"runs": rows}).encode())
  print("\n".join(map(json.dumps, rows)) if as_json else table_text(rows))
