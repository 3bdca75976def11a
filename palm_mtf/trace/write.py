# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The file of a traced step: MODEL_DIR/traces/step_00000020.json."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.layout import ModelDir
from palm_mtf.programs.train_program import TrainProgram
from palm_mtf.trace.chrome import chrome_trace
from palm_mtf.trace.overlap import step_figures
from palm_mtf.trace.records import read_trace


class KeptTrace(NamedTuple):
  """A trace that is written."""

  says: str  # its line on stderr
  figures: Mapping[str, float]  # metrics of the step


def keep_trace(
  model_dir: str,
  step: int,
  program: TrainProgram,
  calls: Sequence[tf.RunMetadata],
) -> KeptTrace:
  """Writes the file of a step.

  Args:
    model_dir: MODEL_DIR.
    step: number of the step, from 1.
    program: training program.
    calls: [calls] TensorFlow's records of each call into the session.
  """
  trace = read_trace(calls, program)
  path = f"{ModelDir(model_dir).trace(step)}.json"
  write_atomically(path, json_text(chrome_trace(trace, step)).encode())
  figures = step_figures(trace)
  return KeptTrace(
    f"{_headline(step, trace.num_pods, figures)}: {path}", figures
  )


def _headline(step: int, num_pods: int, figures: Mapping[str, float]) -> str:
  """Returns the figures of a traced step in a line."""
  text = f"step {step} took {_ms(figures['traced_step_secs'])}"
  if num_pods == 1:
    return text
  text += f"; {figures['traced_dcn_bytes'] / 1e6:,.1f} MB crossed between pods"
  # Pods of one process hand tensors over in memory.
  if "traced_gbits_per_sec" not in figures:
    return f"{text}, in memory"
  return (
    f"{text} at {figures['traced_gbits_per_sec']:.2f} Gb/s, "
    f"{_ms(figures['traced_hidden_secs'])} of it hidden behind computation, "
    f"{_ms(figures['traced_exposed_secs'])} exposed"
  )


def _ms(secs: float) -> str:
  return f"{1e3 * secs:,.3g} ms" if secs < 1 else f"{1e3 * secs:,.0f} ms"
