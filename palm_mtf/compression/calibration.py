# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The text over which statistics are collected, as batches of one size."""

from collections.abc import Sequence

import numpy as np

from palm_mtf.config import Config
from palm_mtf.config.run import BatchSizes
from palm_mtf.data.batches.corpus import Batch, corpus_of_run
from palm_mtf.data.batches.packing import row_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.user_text import read_text

_NUM_ROWS = 128  # of the run's training text, as in GPTQ (section 4)
_TOKENS_AT_ONCE = 2048  # so that reading the weights takes little of the time


def calibration_batches(
  model_dir: str,
  config: Config,
  vocabulary: Vocabulary,
  paths: Sequence[str] = (),
) -> list[Batch]:
  """Returns batches of rows of SEQUENCE_LENGTH tokens.

  The rows are cut from the text files `paths`, joined by [eod]; or, without
  paths, are the first 128 training rows of the run. A last row that is not full
  is left out. Rows that only fill the last batch are padding, whose segments or
  loss weights are 0.

  Raises UserError if the text cannot be read, or fills no row.
  """
  length = config.model.sequence_length
  if paths:
    rows = _cut_files(config, vocabulary, paths)
  else:
    training = corpus_of_run(model_dir, config, vocabulary)
    stream = training.batches(BatchSizes(1))
    some = [stream.batch(i) for i in range(_NUM_ROWS)]
    rows = {k: np.concatenate([x[k] for x in some]) for k in some[0]}
  if not {"segments", "loss_weights"} & set(rows):
    rows["loss_weights"] = np.ones(rows["inputs"].shape, np.float32)
  count = len(rows["inputs"])
  size = min(count, max(1, _TOKENS_AT_ONCE // length))
  padded = {
    k: np.pad(x, [[0, -count % size], *[[0, 0]] * (x.ndim - 1)])
    for k, x in rows.items()
  }
  return [
    {k: x[start : start + size] for k, x in padded.items()}
    for start in range(0, count, size)
  ]


def _cut_files(
  config: Config, vocabulary: Vocabulary, paths: Sequence[str]
) -> Batch:
  length = config.model.sequence_length
  ids: list[int] = []
  for path in paths:
    what = f"--calibration = {path!r}"
    text = read_text(path, what, "there has to be a text", keeps_mark=True)
    ids += [vocabulary.eod_id] * bool(ids) + vocabulary.encode(text)
  count = len(ids) // length
  if not count:
    raise UserError(
      f"--calibration = {', '.join(paths)}: {len(ids):,} tokens fill no row of "
      f"SEQUENCE_LENGTH = {length:,}; give more text, or lower it."
    )
  targets = np.array(ids[: count * length], np.int32).reshape(count, length)
  first = row_start(config.data, vocabulary)
  inputs = np.pad(targets[:, :-1], [[0, 0], [1, 0]], constant_values=first)
  return {"inputs": inputs, "targets": targets}
