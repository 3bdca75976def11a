# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself: metrics.jsonl and TensorBoard event files.

One JSON object a line, one line a logged step. A resumed run first drops the
lines after the step it resumes from, so that each step stands there once.
"""

import json
import os
from collections.abc import Mapping

from palm_mtf._tf import tf
from palm_mtf.disk import write_atomically, writing

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
  """Appends to both records; each line is on the disk when `write` returns."""

  def __init__(self, model_dir: str, step: int):
    """Continues the records of `model_dir` after `step` steps."""
    path = os.path.join(model_dir, METRICS_FILE)
    _drop_lines_after(path, step)
    self._file = open(path, "a", encoding="utf-8")
    with tf.Graph().as_default():  # it refuses to be made where eager code runs
      self._events = tf.summary.FileWriter(model_dir)
    # TensorBoard drops the events after `step` that an earlier run left.
    self._events.add_session_log(
      tf.SessionLog(status=tf.SessionLog.START), step + 1
    )

  def write(self, step: int, values: Mapping[str, float | int]) -> None:
    """Records `values` at `step`, the number of steps done.

    Raises:
      UserError: the disk is full.
    """
    with writing(self._file.name, None):
      self._file.write(json.dumps({"step": step, **values}) + "\n")
      self._file.flush()
    self._events.add_summary(summary_of(values), step)
    self._events.flush()

  def close(self) -> None:
    """Closes both records."""
    self._file.close()
    self._events.close()


def summary_of(values: Mapping[str, float | int]) -> tf.Summary:
  """Returns what TensorBoard shows of numbers, by name."""
  return tf.Summary(
    value=[
      tf.Summary.Value(tag=name, simple_value=value)
      for name, value in values.items()
    ]
  )


def _drop_lines_after(path: str, step: int) -> None:
  """Keeps the whole lines of steps up to `step`."""
  if not os.path.exists(path):
    return
  kept = []
  with open(path, encoding="utf-8") as file:
    for line in file:
      try:
        if json.loads(line)["step"] <= step:
          kept.append(line)
      except ValueError:
        continue  # the half line of a killed run
  write_atomically(path, "".join(kept).encode())
