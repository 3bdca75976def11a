# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the trace of a step in MODEL_DIR/traces: a Chrome trace and a picture.

step_00000020.json
step_00000020.png
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.layout import ModelDir
from palm_mtf.programs.train_program import TrainProgram
from palm_mtf.report.timeline import headline, png
from palm_mtf.report.traces import read_timeline
from palm_mtf.trace.chrome import chrome_trace
from palm_mtf.trace.records import read_trace


class KeptTrace(NamedTuple):
  """What there is to say of a step's trace, and its figures (overlap.py)."""

  says: str
  figures: Mapping[str, float]


def keep_trace(
  model_dir: str,
  step: int,
  program: TrainProgram,
  calls: Sequence[tf.RunMetadata],
) -> KeptTrace:
  """Writes both files of a step.

  Args:
    model_dir: where to.
    step: its number, from 1.
    program: that was run, in its graph.
    calls: what was recorded of each call into the session, the last at the end.

  Raises:
    UserError: the disk is full.
  """
  trace = read_trace(calls, program)
  written = chrome_trace(trace, step)
  timeline = read_timeline(written)
  path = ModelDir(model_dir).trace(step)
  write_atomically(f"{path}.json", json.dumps(written).encode())
  write_atomically(f"{path}.png", png(timeline))
  return KeptTrace(f"{headline(timeline)}: {path}.png", timeline.figures)
