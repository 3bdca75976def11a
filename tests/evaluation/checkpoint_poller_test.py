# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""EVAL_CHECKPOINTS selects the newest checkpoint, some, or each new one."""

import itertools
import shutil
import time
import types

import pytest

from palm_mtf.config import TaskEvalConfig
from palm_mtf.errors import UserError
from palm_mtf.evaluation import checkpoint_poller
from palm_mtf.evaluation.checkpoint_poller import find_checkpoints
from tests.checkpoint_files import SHAPES, write


def find(folder, choice, train_steps=30, wait_secs=0.0, shapes=SHAPES):
  config = TaskEvalConfig(eval_checkpoints=choice, eval_wait_secs=wait_secs)
  return find_checkpoints(str(folder), shapes, config, train_steps)


def steps(checkpoints):
  return [each.manifest.step for each in checkpoints]


def error(folder, choice, **settings):
  with pytest.raises(UserError) as info:
    find(folder, choice, **settings)
  assert "\n" not in str(info.value)
  return str(info.value)


@pytest.fixture
def folder(tmp_path):
  for step in (10, 20):
    write(tmp_path, step)
  return tmp_path


def test_the_newest_or_those_of_a_list(folder):
  assert steps(find(folder, "newest")) == [20]
  assert steps(find(folder, [20, 10])) == [20, 10]


def test_every_one_comes_once_as_it_is_written_up_to_the_last_step(
  folder, monkeypatch
):
  to_come = iter([[25], [], [30, 40]])

  def sleep(secs):
    assert secs > 0
    for step in next(to_come):
      write(folder, step)

  # Replace only this module's clock; other threads keep the real one.
  clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
  monkeypatch.setattr(checkpoint_poller, "time", clock)
  found = find(folder, "every", wait_secs=60.0)
  assert steps(found) == [10, 20, 25, 30]


def test_waiting_has_an_end_and_says_so(folder, capsys):
  assert steps(find(folder, "every")) == [10, 20]
  assert (
    "no checkpoint after step 20 came within EVAL_WAIT_SECS = 0; the same "
    "command resumes" in capsys.readouterr().err
  )


def test_one_that_training_removes_meanwhile_is_passed_over(folder, capsys):
  found = find(folder, "every")
  assert next(found).manifest.step == 10
  write(folder, 30)
  shutil.rmtree(folder / "checkpoints" / "step_00000020")
  assert steps(itertools.islice(found, 1)) == [30]
  assert "DAMAGED" not in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_one_line(folder, tmp_path):
  assert error(folder, [10, 15]) == (
    f"EVAL_CHECKPOINTS: {str(folder)!r} has no checkpoint of step 15; it has: "
    "10, 20."
  )
  assert "holds no checkpoint" in error(tmp_path / "none", "newest")
  other = {**SHAPES, "embedding": (8, 2)}
  for choice in ("newest", [10]):
    assert "it is of another model" in error(folder, choice, shapes=other)
  data = folder / "checkpoints" / "step_00000010" / "weights.data"
  data.write_text("damaged")
  assert "is damaged: weights.data" in error(folder, [10])
