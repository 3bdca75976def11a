# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The text over which statistics are collected, as batches of one row."""

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


def calibration_batches(
  model_dir: str,
  config: Config,
  vocabulary: Vocabulary,
  paths: Sequence[str] = (),
) -> list[Batch]:
  """Returns batches of one row of SEQUENCE_LENGTH tokens.

  The rows are cut from the text files `paths`, joined by [eod]; or, without
  paths, are the first 128 training rows of the run. A last row that is not full
  is left out.

  Raises UserError if the text cannot be read, or fills no row.
  """
  if not paths:
    stream = corpus_of_run(model_dir, config, vocabulary).batches(BatchSizes(1))
    return [stream.batch(i) for i in range(_NUM_ROWS)]
  length, ids = config.model.sequence_length, []
  for path in paths:
    what = f"--calibration = {path!r}"
    text = read_text(path, what, "there has to be a text", keeps_mark=True)
    ids += [vocabulary.eod_id] * bool(ids) + vocabulary.encode(text)
  if len(ids) < length:
    raise UserError(
      f"--calibration = {', '.join(paths)}: {len(ids):,} tokens fill no row of "
      f"SEQUENCE_LENGTH = {length:,}; give more text, or lower it."
    )
  first, found = row_start(config.data, vocabulary), []
  for start in range(0, len(ids) - length + 1, length):
    targets = np.array([ids[start : start + length]], np.int32)
    inputs = np.pad(targets[:, :-1], [[0, 0], [1, 0]], constant_values=first)
    found.append({"inputs": inputs, "targets": targets})
  return found
