# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of `palm_mtf train` with LEARNERS; the learners are threads here."""

import contextlib

import numpy as np
import pytest

from palm_mtf.learners import run as learners_run
from tests import runs
from tests.learners.learner_runs import Member

SETTINGS = {
  "LEARNERS": "127.0.0.1:0",
  "EXCHANGE": "diloco",
  "OUTER_STEPS": 2,
  "NUM_PODS": 2,
  "NUM_LAYERS": 2,
  "GLOBAL_BATCH_SIZE": 8,
  "GRACE_SECS": 0.2,
  "TRAIN_STEPS": 12,
  "CHECKPOINT_STEPS": 4,
}


@pytest.fixture(name="train")
def train_with(monkeypatch, corpus, tmp_path):
  """Returns a function that trains with members; the run's folder is tmp."""

  def train(members, folder=tmp_path, **macros):
    @contextlib.contextmanager
    def serve(config, handler):
      threads = [Member(handler, name, **x) for name, x in members.items()]
      for thread in threads:
        thread.start()
      yield 0
      for thread in threads:
        thread.join()

    monkeypatch.setattr(learners_run, "serve_learners", serve)
    return runs.run("train", corpus, folder, **(SETTINGS | macros))

  return train


@pytest.mark.slow
def test_two_learners_train(train, tmp_path):
  assert train({"a": {}, "b": {}}) == 0
