# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A hanging process ends with stacks and code 1; a working process does not."""

import signal
import time

import pytest

from tests import processes, runs

# A run whose batch 5 waits in C without end, even if it receives signals.
HANGS_AT_STEP_5 = """
import ctypes, sys
from palm_mtf.cli.main import main
from palm_mtf.data.batches.batches import Batches

read = Batches.batch

def batch(self, step):
  while step == 5:
    ctypes.CDLL(None).sleep(1000)
  return read(self, step)

Batches.batch = batch
sys.exit(main(sys.argv[1:]))
"""

WATCHES = """
import sys, time
from palm_mtf.training.watchdog import Watchdog
with Watchdog(1.0, lambda: "step_00000004") as watchdog:
  watchdog.note_step(7)
  {body}
print("worked", flush=True)
"""


@pytest.mark.slow
def test_a_run_whose_step_hangs_says_where_and_exits_with_1(corpus, tmp_path):
  settings = {"WATCHDOG_SECS": 10, "EVAL_STEPS": 12, "PROMPTS": []}
  arguments = runs.arguments("train", corpus, tmp_path, **settings)
  process = processes.start("-c", HANGS_AT_STEP_5, *arguments)
  out, error = process.communicate(timeout=300)
  assert process.returncode == 1, error
  assert "in _run_step" in error and "in batch" in error
  last = error.splitlines()[-1]
  assert "(WATCHDOG_SECS = 10), after step 5; the newest checkpoint is" in last
  assert "step_00000004; above is what each thread was doing" in last
  assert not out
  goes_on = runs.run("train", corpus, tmp_path, PROMPTS=[])
  assert goes_on == 0, "the same command"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("body", "code"),
  [
    ("time.sleep(30)", 1),
    ("[(time.sleep(0.25), watchdog.note_step(i)) for i in range(8)]", 0),
    ("watchdog.expect_slow(); time.sleep(3)", 0),
    ("watchdog.expect_slow(); watchdog.note_step(8); time.sleep(30)", 1),
  ],
)
def test_only_a_step_that_takes_too_long_ends_the_process(body, code):
  process = processes.start("-c", WATCHES.format(body=body))
  out, error = process.communicate(timeout=60)
  assert process.returncode == code, error
  assert out == ("" if code else "worked\n")
  assert ("no step was done for" in error) == bool(code)


@pytest.mark.slow
def test_time_in_which_the_process_was_stopped_does_not_count():
  body = "print('on', flush=True); time.sleep(0.6)"
  process = processes.start("-c", WATCHES.format(body=body))
  assert process.stdout.readline() == "on\n"
  process.send_signal(signal.SIGSTOP)
  time.sleep(2.5)
  process.send_signal(signal.SIGCONT)
  out, error = process.communicate(timeout=60)
  assert (process.returncode, out) == (0, "worked\n"), error
