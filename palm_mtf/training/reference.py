# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference of preference training: log ratios of the initial weights.

The reference is INIT_CHECKPOINT: for an adapted run, its base or, if the run
begins with an adapter, the adapted model. It scores all pairs once, before
training begins. A file in MODEL_DIR keeps the log ratios (model/preference.py)
for runs that resume; while pairs are scored, it has those of the first pairs.
"""

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.weights_to_load import find_weights
from palm_mtf.console import progress_bar
from palm_mtf.data.batches.packing import Row, WholeRows
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.scorer import Example, Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.foreign_files import read_sealed, seal
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.training.job import TrainJob

_logger = logging.getLogger(__name__)

_AT_ONCE = 256  # pairs whose tokens are in memory at the same time
_SAVE_SECS = 60.0  # of scores that a run which is killed may lose


def set_reference(job: TrainJob) -> None:
  """Sets the feature "reference" of a run's rows, if PREFERENCE_BETA is set.

  Raises UserError if INIT_CHECKPOINT is needed, but missing, damaged or not the
  reference with which the run began.
  """
  if job.config.loss.preference_beta is None:
    return
  path, rows = ModelDir(job.model_dir).reference, job.corpus.list_rows()
  found: dict[str, object] = {"tokens": job.corpus.fingerprint}
  if not job.checkpoint:  # a run that resumes keeps its reference
    found["checkpoint"] = _find_reference(job).blake2b
    found["model"] = repr(job.config.model)
  try:
    kept, _ = read_sealed(path)
  except (OSError, ValueError):
    kept = {}
  values = kept["log_ratios"] if kept.items() >= found.items() else []
  if [*map(len, values)] != [x.num_rows for x in rows]:
    reference = _find_reference(job)
    before = kept.get("checkpoint")
    if job.checkpoint and before not in (None, reference.blake2b):
      raise UserError(
        f"INIT_CHECKPOINT: {reference.path} is not the reference of the run, "
        f"whose hash is {before}, and the pairs have changed; name the "
        "checkpoint with which the run began, or use another MODEL_DIR."
      )
    if job.checkpoint and not before:
      _logger.warning(
        f"{path} is missing or damaged, so {reference.path} scores the pairs "
        "again: it has to be the checkpoint with which the run began"
      )
    values = values or [[] for _ in rows]
    kept = found | {"checkpoint": reference.blake2b, "log_ratios": values}
    saved = time.monotonic()
    for is_last in _score(reference, job, rows, values):
      if is_last or time.monotonic() > saved + _SAVE_SECS:
        write_atomically(path, json_text(seal(kept)).encode())
        saved = time.monotonic()
    _logger.info(f"{reference.path} has scored the pairs: {path}")
  for each, log_ratios in zip(rows, values, strict=True):
    each.reference[:] = log_ratios


def _find_reference(job: TrainJob) -> Checkpoint:
  """Returns the checkpoint of the reference, held open, and its base."""
  weights = job.initial_adapter or job.initial_weights
  if not weights:  # the run resumes
    weights = find_weights("INIT_CHECKPOINT", job.config.run.init_checkpoint)
  if not weights.checkpoint:
    raise UserError(
      f"{weights.given}: the reference of PREFERENCE_BETA has to be a "
      "checkpoint of palm_mtf; train or import one."
    )
  base = job.initial_weights.files if job.initial_adapter else None
  return dataclasses.replace(weights.checkpoint, held=weights.files, base=base)


def _score(
  reference: Checkpoint,
  job: TrainJob,
  rows: Sequence[WholeRows],
  values: Sequence[list[float]],
) -> Iterator[bool]:
  """Adds the log ratios that `values` lacks; yields whether it has all.

  `values` has a list for each of `rows`, for the log ratios of its first rows.
  A row's log ratio depends on no other row.
  """
  config, num_pairs = job.config, sum(x.num_rows for x in rows)
  virtual = job.corpus.virtual
  model = config.model if job.initial_adapter else config.model.base
  with (
    LoadedDecoder(
      reference, model, config.mesh_layout, pods=config.pods
    ) as loaded,
    progress_bar("Scoring", num_pairs, counted="pairs") as advance,
  ):
    scorer = Scorer(loaded, adds_start=False)
    advance(sum(map(len, values)))
    for each, found in zip(rows, values, strict=True):
      for start in range(len(found), each.num_rows, _AT_ONCE):
        stop = min(start + _AT_ONCE, each.num_rows)
        read = map(each.read, range(start, stop))
        some = [x for row in read for x in _split(row, virtual)]
        scores = np.zeros(len(some))
        for index, log_likelihood in scorer.log_likelihoods(some):
          scores[index] = log_likelihood
        found += np.float32(scores[::2] - scores[1::2]).tolist()
        advance(stop - start)
        yield sum(map(len, values)) == num_pairs


def _split(row: Row, virtual: int) -> Iterator[Example]:
  """Yields the chosen answer of a row, then the rejected one.

  `virtual` is the number of virtual positions before each, which are left out.
  """
  for segment in (1, 2):
    own = np.flatnonzero(row["segments"] == segment)[virtual:]
    inputs, targets = row["inputs"][own], row["targets"][own]
    learned = np.flatnonzero(row["loss_weights"][own])
    first, last = learned[0], learned[-1]
    # The first input is the token with which the model begins to read.
    yield Example(
      inputs[: first + 1].tolist(), targets[first : last + 1].tolist()
    )
