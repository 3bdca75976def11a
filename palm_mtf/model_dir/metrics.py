# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: metrics.jsonl, a line a logged step, and TensorBoard."""

from collections.abc import Mapping

from palm_mtf._tf import tf
from palm_mtf.model_dir.json_lines import (
  JsonLinesWriter,
  read_json_lines,
  write_json_lines,
)
from palm_mtf.model_dir.layout import ModelDir


class MetricsWriter:
  """Appends metrics to metrics.jsonl and to TensorBoard's event files."""

  def __init__(self, model_dir: str, step: int):
    """Continues the metrics of `model_dir` after `step` steps."""
    path = ModelDir(model_dir).metrics
    # The steps after the checkpoint are run again, and stand here once.
    kept = [x for x in read_json_lines(path) if x["step"] <= step]
    write_json_lines(path, kept)
    self._lines = JsonLinesWriter(path)
    with tf.Graph().as_default():  # FileWriter refuses eager execution
      self._events = tf.summary.FileWriter(model_dir)
    # TensorBoard drops the events after `step` that an earlier run left.
    self._events.add_session_log(
      tf.SessionLog(status=tf.SessionLog.START), step + 1
    )

  def write(self, step: int, values: Mapping[str, float | int]) -> None:
    """Appends the metrics after `step` steps, by name.

    Raises:
      UserError: the disk is full.
    """
    self._lines.write({"step": step, **values})
    self._events.add_summary(summary_of(values), step)
    self._events.flush()

  def close(self) -> None:
    """Closes the files."""
    self._lines.close()
    self._events.close()


def summary_of(values: Mapping[str, float | int]) -> tf.Summary:
  """Returns TensorBoard's form of metrics, by name."""
  return tf.Summary(
    value=[
      tf.Summary.Value(tag=name, simple_value=value)
      for name, value in values.items()
    ]
  )
