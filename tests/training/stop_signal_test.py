# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A stop signal is noted whenever it comes; patience has an end.

commands/train_test.py stops whole runs from another process.
"""

import os
import signal

import pytest

from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.training.job import TrainJob
from palm_mtf.training.loop import TrainLoop
from palm_mtf.training.stop_signal import StopRequest
from tests import runs


def send(number):
  os.kill(os.getpid(), number)


def test_the_first_signal_counts_and_the_same_again_interrupts():
  with StopRequest() as stop:
    assert stop.signal_name == ""
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
      send(number)
      assert stop.signal_name == "SIGHUP"
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    send(signal.SIGINT)


def test_a_signal_that_was_ignored_before_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
  try:
    with StopRequest() as stop:
      send(signal.SIGHUP)
      assert stop.signal_name == ""
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  finally:
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
  ("owner", "name", "step"),
  [
    pytest.param(TrainLoop, "_validate", 2, marks=pytest.mark.slow),
    pytest.param(TrainLoop, "_validate", 4, marks=pytest.mark.slow),  # the last
    (TrainLoop, "_save", 3),
    pytest.param(TrainJob, "keep_samples", 2, marks=pytest.mark.slow),
  ],
)
def test_a_signal_while_a_run_evaluates_saves_or_samples_stops_it_after_that(
  owner, name, step, corpus, tmp_path, monkeypatch, capsys
):
  settings = {"TRAIN_STEPS": 4, "CHECKPOINT_STEPS": 3, "EVAL_STEPS": 2}
  if name == "keep_samples":
    settings["SAMPLE_STEPS"] = 2
  else:
    settings["PROMPTS"] = []
  model_dir = tmp_path / "lr[0.01]"  # which TensorFlow takes for a pattern
  real, sent = getattr(owner, name), []

  def interrupted(self, *given):
    now = given[0].manifest.step if given else self._step
    if now == step and not sent:
      sent.append(step)
      send(signal.SIGTERM)
    return real(self, *given)

  with monkeypatch.context() as patched:
    patched.setattr(owner, name, interrupted)
    assert runs.run("train", corpus, model_dir, **settings) == 128 + 15
  out, err = capsys.readouterr()
  assert out == ""
  assert "stopped by SIGTERM" in err
  assert newest_whole(str(model_dir)).manifest.step == step
  assert runs.run("train", corpus, model_dir, **settings) == 0
  assert [x["step"] for x in runs.read_metrics(model_dir)][-1] == 4
