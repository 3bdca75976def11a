# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf sweep`: trains several runs; fits a scaling law to their losses."""

import dataclasses
import logging

from palm_mtf.config import ConfigOfSweep
from palm_mtf.data.batches.conversations import open_conversations
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.tokens.store import cache_stores
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.lock import training_lock
from palm_mtf.model_dir.paths import SweepDir
from palm_mtf.sweep import runs
from palm_mtf.sweep.scaling_law import law_record, law_text, why_no_law

_logger = logging.getLogger(__name__)


def sweep(
  *,
  model_dir: str,
  config: ConfigOfSweep,
  load_run: runs.LoadRun,
  as_json: bool,
) -> None:
  """Trains the unfinished runs; prints a table and scaling law of all runs.

  The sweep's MODEL_DIR contains the MODEL_DIRs of its runs.

  Raises UserError if settings are invalid (no run was trained), or a run failed
  (all other runs were trained). Raises StoppedError if a signal arrived; the
  same command resumes.
  """
  runs.cores_of_runs(config.sweep.sweep_at_once)  # UserError if too few cores
  where = SweepDir(model_dir)
  wanted = runs.make_runs(config.sweep, config, where, load_run)
  runs.check_unchanged(wanted, where)
  with training_lock(model_dir):
    _make_data(where, wanted[0])
    failed = runs.train_runs(wanted, config.sweep, where)
    rows = runs.tabulate(wanted, where)
    why = why_no_law(rows)
    law = None if why else law_record(rows, config.sweep.sweep_budget_flops)
    write_atomically(where.table, runs.table_csv(rows))
    results = json_text({"runs": rows, "law": law})
    write_atomically(where.results, results.encode())
    if as_json:
      print("\n".join(map(json_text, [*rows, {"law": law}])))
    else:
      print(f"{runs.table_text(rows)}\n\n{law_text(law) if law else why}")
    _logger.info(f"wrote {where.table} and {where.results}")
  runs.check_none_failed(failed, where)


def _make_data(where: SweepDir, run: runs.SweepRun) -> None:
  """Makes the vocabulary and tokens that all runs share, if missing."""
  model, data = run.config.model, run.config.data
  if data.vocabulary == where.vocabulary:
    # With None, `load_vocabulary` trains the vocabulary if it is missing.
    data = dataclasses.replace(data, vocabulary=None)
  vocabulary = load_vocabulary(where.path, data, vocab_size=model.vocab_size)
  sources = open_filtered(where.path, data, model.sequence_length)
  conversations = open_conversations(data, sources, vocabulary)
  cache_stores(where.path, data, sources, vocabulary, conversations)
