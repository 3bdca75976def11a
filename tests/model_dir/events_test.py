# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Event files are read by TensorFlow; a full disk is told."""

import contextlib

import pytest

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.model_dir.events import EventsWriter


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
