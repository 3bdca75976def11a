# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's event files: a record of an event for each line of metrics."""

import os
import socket
import time
from collections.abc import Mapping

from palm_mtf._tf import tf
from palm_mtf.model_dir.atomic_files import writing
from palm_mtf.model_dir.tensorflow_errors import as_os_errors

_VERSION = "brain.Event:2"


class EventsWriter:
  """Writes a new event file in a folder, in the calling thread."""

  # tf.summary.FileWriter writes in a thread of its own, which ends with a
  # traceback where the disk is full.

  def __init__(self, folder: str):
    """Opens the file; raises UserError where the disk is full."""
    # TensorBoard reads the files of a folder in the order of their names.
    stamp = f"{time.time():.6f}.{socket.gethostname()}"
    self._path = os.path.join(folder, f"events.out.tfevents.{stamp}")
    with writing(folder, None):
      os.makedirs(folder, exist_ok=True)
    self._records = tf.io.TFRecordWriter(self._path)
    self._add(tf.Event(file_version=_VERSION))

  def start_at(self, step: int) -> None:
    """Lets TensorBoard drop the events from `step` on of earlier files."""
    session_log = tf.SessionLog(status=tf.SessionLog.START)
    self._add(tf.Event(step=step, session_log=session_log))

  def write(self, step: int, values: Mapping[str, float | int]) -> None:
    """Writes the metrics after `step` steps, by name.

    Raises:
      UserError: the disk is full.
    """
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
