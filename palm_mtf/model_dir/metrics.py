# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: metrics.jsonl and TensorBoard's event files."""

import os
import socket
import time
from collections.abc import Mapping

from palm_mtf._tf import tf
from palm_mtf.model_dir.atomic_files import as_os_errors, writing
from palm_mtf.model_dir.json_lines import (
  JsonLinesWriter,
  read_json_lines,
  write_json_lines,
)
from palm_mtf.model_dir.paths import ModelDir

_VERSION = "brain.Event:2"


class MetricsWriter:
  """Appends metrics to metrics.jsonl and to TensorBoard's event files."""

  def __init__(self, model_dir: str, step: int):
    """Continues the metrics of `model_dir` after `step` steps."""
    path = ModelDir(model_dir).metrics
    # Drop the lines of later steps, because training repeats these steps.
    lines = read_json_lines(path, number="step")
    kept = [x for x in lines if x["step"] <= step]
    write_json_lines(path, kept)
    # Last step with a line in metrics.jsonl.
    self.last_step = kept[-1]["step"] if kept else 0
    self._lines = JsonLinesWriter(path)
    self._events = EventsWriter(model_dir)
    self._events.start_at(step + 1)

  def write(self, step: int, values: Mapping[str, float | int]) -> None:
    """Appends a step's metrics; raises UserError if the disk is full."""
    self._lines.write({"step": step, **values})
    self.last_step = step
    self._events.write(step, values)

  def sync(self) -> None:
    """Waits until metrics.jsonl is on the disk, to survive a power loss."""
    self._lines.sync()

  def close(self) -> None:
    """Closes the files."""
    self._lines.close()
    self._events.close()


class EventsWriter:
  """Writes a new event file in a folder, in the calling thread.

  tf.summary.FileWriter is not used, because its thread ends with a traceback if
  the disk is full.
  """

  def __init__(self, folder: str):
    """Opens the file; raises UserError if the disk is full."""
    # The name contains the time, because TensorBoard reads files in name order.
    stamp = f"{time.time():.6f}.{socket.gethostname()}"
    self._path = os.path.join(folder, f"events.out.tfevents.{stamp}")
    with writing(folder, None):
      os.makedirs(folder, exist_ok=True)
    self._records = tf.io.TFRecordWriter(self._path)
    self._add(tf.Event(file_version=_VERSION))

  def start_at(self, step: int) -> None:
    """Makes TensorBoard drop older events of steps that training repeats."""
    session_log = tf.SessionLog(status=tf.SessionLog.START)
    self._add(tf.Event(step=step, session_log=session_log))

  def write(self, step: int, values: Mapping[str, float | int]) -> None:
    """Writes a step's metrics; raises UserError if the disk is full."""
    values = [
      tf.Summary.Value(tag=name, simple_value=value)
      for name, value in values.items()
    ]
    self._add(tf.Event(step=step, summary=tf.Summary(value=values)))

  def _add(self, event: tf.Event) -> None:
    event.wall_time = time.time()
    with writing(self._path, None), as_os_errors():
      self._records.write(event.SerializeToString())
      self._records.flush()

  def close(self) -> None:
    """Closes the file."""
    self._records.close()
