# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import contextlib
import math

import pytest

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.model_dir.metrics import EventsWriter, MetricsWriter
from tests import strict_json


def test_every_line_is_json_also_after_one_of_an_earlier_version(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "loss": 4.5, "my_task/share": NaN}\n')
  writer = MetricsWriter(str(tmp_path), 1)
  writer.write(2, {"loss": 4.25, "my_task/share": math.inf})
  writer.close()
  assert strict_json.load_lines(path) == [
    {"step": 1, "loss": 4.5, "my_task/share": None},
    {"step": 2, "loss": 4.25, "my_task/share": None},
  ]


def test_events_are_in_the_file_when_write_returns_and_the_files_in_order(
  tmp_path,
):
  found = []
  for step in (5, 7):
    with contextlib.closing(EventsWriter(str(tmp_path))) as events:
      events.start_at(step)
      events.write(step, {"loss": 2.5, "tokens": step})
      *_, path = sorted(tmp_path.iterdir())
      found.append(list(tf.train.summary_iterator(str(path))))
  for step, (version, start, event) in zip((5, 7), found, strict=True):
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == tf.SessionLog.START
    assert start.step == event.step == step
    values = {x.tag: x.simple_value for x in event.summary.value}
    assert values == {"loss": 2.5, "tokens": step}
    assert 0 < version.wall_time <= start.wall_time <= event.wall_time


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
  real = tf.io.TFRecordWriter
  monkeypatch.setattr(tf.io, "TFRecordWriter", lambda path: real("/dev/full"))
  with pytest.raises(
    UserError, match=r"^no disk space left for .*/events\.out"
  ):
    EventsWriter(str(tmp_path))
