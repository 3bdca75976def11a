# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: metrics.jsonl, a line a logged step, and TensorBoard."""

from collections.abc import Mapping

from palm_mtf.model_dir.events import EventsWriter
from palm_mtf.model_dir.json_lines import (
  JsonLinesWriter,
  read_json_lines,
  write_json_lines,
)
from palm_mtf.model_dir.layout import ModelDir


class MetricsWriter:
  """Appends metrics to metrics.jsonl and to TensorBoard's event files.

  Attributes:
    last_step: last step with a line, 0 for none.
  """

  def __init__(self, model_dir: str, step: int):
    """Continues the metrics of `model_dir` after `step` steps."""
    path = ModelDir(model_dir).metrics
    # The steps after the checkpoint are run again, and stand here once.
    lines = read_json_lines(path, number="step")
    kept = [x for x in lines if x["step"] <= step]
    write_json_lines(path, kept)
    self.last_step = kept[-1]["step"] if kept else 0
    self._lines = JsonLinesWriter(path)
    self._events = EventsWriter(model_dir)
    self._events.start_at(step + 1)

  def write(self, step: int, values: Mapping[str, float | int]) -> None:
    """Appends the metrics after `step` steps, by name.

    Raises:
      UserError: the disk is full.
    """
    self._lines.write({"step": step, **values})
    self.last_step = step
    self._events.write(step, values)

  def sync(self) -> None:
    """Waits until metrics.jsonl is on the disk, also if power is lost."""
    self._lines.sync()

  def close(self) -> None:
    """Closes the files."""
    self._lines.close()
    self._events.close()
