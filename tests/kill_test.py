# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that is killed often ends with the bits of an undisturbed run."""

import json
import random
import time

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import newest_whole
from tests import runs
from tests.processes import wait_until

KILLS = 30
SETTINGS = {
  "TRAIN_STEPS": 600,
  "LOG_STEPS": 1,
  "EVAL_STEPS": 100,
  "CHECKPOINT_STEPS": 5,
  "KEEP_CHECKPOINTS": 3,
}
# The run is killed within this many steps after it has begun to train.
LONGEST_LIFE_STEPS = 25


def find_logged_step(model_dir):
  """Returns the newest step in metrics.jsonl, 0 if there is none."""
  path = model_dir / "metrics.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  # The last line of a killed run may be incomplete.
  return max((json.loads(x)["step"] for x in lines if x[-1:] == "}"), default=0)


def find_kept_step(model_dir):
  """Returns the step of the newest checkpoint whose bytes are whole."""
  newest = newest_whole(str(model_dir))
  return newest.manifest.step if newest else 0


def is_saving(model_dir):
  return any((model_dir / "checkpoints").glob(".partial_*"))


def kill_once(process, model_dir, *, num_steps, during_save, wait_secs):
  """Kills a process a number of steps and seconds after it began to train."""
  kept = find_kept_step(model_dir)
  drops = find_logged_step(model_dir) > kept  # lines after the checkpoint
  if drops:
    wait_until(lambda: find_logged_step(model_dir) <= kept, process)
  wait_until(lambda: find_logged_step(model_dir) >= kept + num_steps, process)
  if during_save:
    wait_until(lambda: is_saving(model_dir), process)
  time.sleep(wait_secs)
  assert process.poll() is None, "it has ended: give it more steps"
  process.kill()
  process.communicate()


@pytest.mark.slow
def test_a_run_killed_thirty_times_ends_with_the_bits_of_one_left_in_peace(
  tmp_path,
):
  corpus = runs.write_corpus(tmp_path / "corpus")
  peaceful, killed = tmp_path / "peaceful", tmp_path / "killed"
  assert runs.run("train", corpus, peaceful, **SETTINGS) == 0
  rng = random.Random(0)
  kept = 0
  for kill in range(KILLS):
    process = runs.start("train", corpus, killed, **SETTINGS)
    kill_once(
      process,
      killed,
      during_save=kill % 2 == 1,
      num_steps=rng.randint(1, LONGEST_LIFE_STEPS),
      wait_secs=rng.uniform(0, 0.02),
    )
    before, kept = kept, find_kept_step(killed)
    assert kept >= before, "what was whole stays whole"
  assert runs.run("train", corpus, killed, **SETTINGS) == 0
  assert_same_results(peaceful, killed)


def assert_same_results(peaceful, killed):
  """Compares whole checkpoints: parameters, slots and manifests."""
  expected, found = (
    runs.read_files(d / "checkpoints") for d in (peaceful, killed)
  )
  assert found.keys() == expected.keys(), "nothing half or damaged is left"
  for name, content in expected.items():
    assert found[name] == content, name
  tensors = runs.read_tensors(killed, SETTINGS["TRAIN_STEPS"])
  assert all(np.isfinite(each).all() for each in tensors.values())
  expected, found = (runs.read_metrics(d) for d in (peaceful, killed))
  assert [x["step"] for x in found] == [*range(1, SETTINGS["TRAIN_STEPS"] + 1)]
  assert [*map(runs.without_times, found)] == [
    *map(runs.without_times, expected)
  ]
