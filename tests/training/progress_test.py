# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Progress of a run, if stderr is a file."""

import signal
import time

import pytest

from palm_mtf.config import RunConfig
from palm_mtf.training import progress as progress_module
from palm_mtf.training.progress import TrainProgress, count_rows_left
from tests import processes, runs
from tests.log_lines import without_stamps


def test_a_file_gets_lines_with_step_loss_speed_mfu_and_time_left(capsys):
  with TrainProgress(step=10, train_steps=20) as progress:
    progress.update(15, loss=2.5, tokens_per_sec=12345.6, mfu=0.456)
    progress.update(20, loss=2.25, tokens_per_sec=12345.6, mfu=0.456)
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: step 20/20  loss 2.250  12,346 tokens/s  MFU 45.6%  0:00 left\n"
  )


def test_the_time_left_counts_no_time_before_the_first_numbers(
  capsys, monkeypatch
):
  times = iter([0.0, 100.0, 120.0, 140.0, 160.0])
  monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(times))
  with TrainProgress(step=0, train_steps=40) as progress:
    for step in (10, 20, 30, 40):
      progress.update(step, loss=2.5, tokens_per_sec=100, mfu=0.5)
  ends = [x.split()[-2:] for x in capsys.readouterr().err.splitlines()]
  assert ends[0] == ["MFU", "50.0%"]
  assert ends[1:] == [["0:40", "left"], ["0:20", "left"], ["0:00", "left"]]


def test_the_time_of_a_run_is_predicted_once(capsys):
  with TrainProgress(step=0, train_steps=40) as progress:
    progress.predict_time(1.5, 150.0)
    progress.predict_time(9.5, 950.0)
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: training will take about 2:30 minutes on this machine: 1.50 s "
    "per step, and validation losses\n"
  )


@pytest.mark.parametrize(
  ("step", "rows"),
  [
    # 20 steps of 4 rows and 10 of 6; losses at 10, 20 and 30, of 8 rows each.
    (0, 20 * 4 + 10 * 6 + 3 * 8 / 3),
    (9, 11 * 4 + 10 * 6 + 3 * 8 / 3),
    (10, 10 * 4 + 10 * 6 + 2 * 8 / 3),
    (25, 5 * 6 + 8 / 3),
    (30, 0),
  ],
)
def test_a_loss_is_a_third_of_a_step_of_as_many_rows(step, rows):
  run = RunConfig(
    train_steps=30,
    global_batch_size=[[0, 4], [20, 6]],
    seed=0,
    log_steps=1,
    eval_steps=10,
    eval_batches=2,
    checkpoint_steps=10,
    keep_checkpoints=1,
    chip="measured",
    prompts=[],
    sample_tokens=1,
  )
  assert count_rows_left(run, step) == pytest.approx(rows)


# A run whose batch 5 waits in C without end, even if it receives signals.
HANGS_AT_STEP_5 = """
import ctypes, sys
from palm_mtf.cli.main import main
from palm_mtf.data.batches.corpus import Batches

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
from palm_mtf.training.progress import Watchdog
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
