# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sweeps of small runs: training, files, stopping, and refusals."""

import contextlib
import csv
import io
import json
import os
import signal
import time

import numpy as np
import pytest

from palm_mtf.cli.main import main
from tests import processes, runs
from tests.processes import wait_until

TWO = [{"small": {"D_MODEL": 32}, "large": {"D_MODEL": 64}}]
# "one" has two evaluations, the first between two logged steps. "failing" ends
# before it imports TensorFlow.
SWEPT = [
  {
    "one": {"EVAL_STEPS": 6, "LOG_STEPS": 5},
    "failing": {"PROMPTS": ["one two " * 100]},
  }
]


def flags(corpus, model_dir, axes, **macros):
  macros = {"PROMPTS": [], "SWEEP_RUNS": axes, **macros}
  return runs.arguments("sweep", corpus, model_dir, **macros)


@pytest.fixture(scope="module")
def swept(corpus, tmp_path_factory):
  """The sweep SWEPT: folder, exit code, stdout and stderr."""
  model_dir = tmp_path_factory.mktemp("sweep")
  command = flags(corpus, model_dir, SWEPT, SWEEP_AT_ONCE=2)
  with (
    contextlib.redirect_stdout(io.StringIO()) as out,
    contextlib.redirect_stderr(io.StringIO()) as err,
  ):
    code = main(command)
  return model_dir, code, out.getvalue(), err.getvalue()


def test_each_run_is_a_model_dir_and_vocabulary_and_tokens_are_made_once(swept):
  folder = swept[0]
  assert {x.name for x in (folder / "runs").iterdir()} == {*SWEPT[0]}
  assert (folder / "vocabulary.model").is_file()
  assert len([*(folder / "tokens").glob("text_files-*")]) == 1
  run = folder / "runs" / "one"
  assert (run / "config.gin").is_file() and any((run / "checkpoints").iterdir())
  assert not (run / "vocabulary.model").exists()
  assert not any((run / "tokens").glob("*"))


def test_a_run_that_fails_is_named_with_its_exit_code_after_all_others(swept):
  _, code, _, err = swept
  assert code == 2
  last = err.splitlines()[-1]
  assert last.startswith(
    "palm_mtf: 1 of the runs failed (failing: exit code 2,"
  )
  assert "PROMPTS" in last and "train.log" in last


def test_the_table_has_the_numbers_of_metrics_jsonl(swept):
  folder = swept[0]
  rows = json.loads((folder / "sweep.json").read_text())["runs"]
  one = runs.read_metrics(folder / "runs" / "one")
  assert [x["run"] for x in rows] == [*SWEPT[0]]
  row = rows[0]
  assert row["loss"] == one[-1]["validation_loss"]
  assert row["tokens"] == one[-1]["tokens"] == 12 * 4 * 32
  # The embedding, q and o, k and v, and the MLP.
  parameters = 320 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
  assert row["parameters"] == parameters
  assert row["flops"] == row["tokens"] * (6 * parameters + 3 * 4 * 32 * 32)
  secs = [5, 1, 4, 2] * np.array([x["step_secs"] for x in one])
  assert row["secs"] == pytest.approx(secs.sum())
  with open(folder / "sweep.csv") as file:
    assert [x["run"] for x in csv.DictReader(file)] == [*SWEPT[0]]


def test_each_evaluation_is_in_the_metrics_also_between_logged_steps(swept):
  lines = runs.read_metrics(swept[0] / "runs" / "one")
  assert [x["step"] for x in lines] == [5, 6, 10, 12]
  evaluated = [x["step"] for x in lines if "validation_loss" in x]
  assert evaluated == [6, 12]


def test_the_reason_for_no_law_is_printed(swept):
  folder, _, out, _ = swept
  assert out.splitlines()[-1].startswith("no scaling law: it takes 7 finished")
  assert json.loads((folder / "sweep.json").read_text())["law"] is None


def test_runs_that_have_ended_are_not_repeated(swept, corpus, capsys):
  folder = swept[0]
  before = runs.read_files(folder / "runs" / "one")
  command = flags(corpus, folder, SWEPT, SWEEP_AT_ONCE=2)
  assert main(command) == 2  # "failing" is tried again
  assert "1 of 2 runs have ended" in capsys.readouterr().err
  assert runs.read_files(folder / "runs" / "one") == before


def test_a_run_whose_settings_changed_is_refused_by_name(swept, corpus, fails):
  folder = swept[0]
  axes = [{**SWEPT[0], "one": {"EVAL_STEPS": 6, "LOG_STEPS": 5, "D_FF": 96}}]
  line = fails(*flags(corpus, folder, axes))
  assert line == (
    'SWEEP_RUNS "one": D_FF = 96, and the run began with 64; give the run '
    f"another name, or remove {folder}/runs/one to begin again."
  )


@pytest.mark.parametrize(
  "write, reason",
  [
    (lambda path: path.write_bytes(b'D_FF = "\xff"'), "is not UTF-8"),
    (os.mkfifo, "is a FIFO, not a regular file"),
    (os.mkdir, "Is a directory"),
  ],
)
def test_settings_of_a_run_that_cannot_be_read_are_refused_by_their_path(
  write, reason, corpus, tmp_path, fails
):
  run = tmp_path / "runs" / "small"
  run.mkdir(parents=True)
  write(run / "sweep.gin")
  line = fails(*flags(corpus, tmp_path, TWO))
  assert line == (
    f"{run}/sweep.gin: {reason}; give the run another name, or remove {run} to "
    "begin again."
  )


def test_too_many_runs_are_refused_before_one_of_them_is_made(
  corpus, tmp_path, fails
):
  axes = [{f"{x}{n}": {} for n in range(60)} for x in "abc"]
  line = fails(*flags(corpus, tmp_path / "sweep", axes))
  assert line == (
    "SWEEP_RUNS: has 216,000 runs, the product of its axes; give at most 1,000."
  )
  assert not (tmp_path / "sweep").exists()


def children_of(pid):
  """Returns the processes that a process has started."""
  path = f"/proc/{pid}/task/{pid}/children"
  with open(path) as file:
    return [int(x) for x in file.read().split()]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("number", "code"),
  [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
)
def test_a_stopped_sweep_leaves_no_process_and_resumes(
  corpus, tmp_path, number, code
):
  axes = [{"long": {"TRAIN_STEPS": 100_000, "CHECKPOINT_STEPS": 50_000}}]
  command = flags(corpus, tmp_path / "sweep", axes)
  sweep = processes.start("-m", "palm_mtf", *command)
  run = tmp_path / "sweep" / "runs" / "long"
  metrics = run / "metrics.jsonl"
  wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, sweep)
  (child,) = children_of(sweep.pid)
  sweep.send_signal(number)
  _, err = sweep.communicate(timeout=100)
  assert sweep.returncode == code, err
  deadline = time.monotonic() + 20
  while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not os.path.exists(f"/proc/{child}")
  assert not (run / "outcome.txt").exists()
  # Unless the run was killed, it has saved its last step.
  if number != signal.SIGKILL:
    assert "run the same command to resume" in err
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    assert int(checkpoint.name[5:]) < 50_000


@pytest.mark.slow
def test_a_sweep_that_was_killed_ends_with_the_bits_of_one_that_was_not(
  corpus, tmp_path
):
  macros = {"CHECKPOINT_STEPS": 10, "TRAIN_STEPS": 60, "SWEEP_AT_ONCE": 2}
  whole = processes.python(
    "-m", "palm_mtf", *flags(corpus, tmp_path / "whole", TWO, **macros)
  )
  assert whole.returncode == 0, whole.stderr
  command = flags(corpus, tmp_path / "killed", TWO, **macros)
  sweep = processes.start("-m", "palm_mtf", *command)
  small = tmp_path / "killed" / "runs" / "small"
  wait_until((small / "checkpoints" / "step_00000010").exists, sweep)
  sweep.kill()
  sweep.communicate()
  done = processes.python("-m", "palm_mtf", *command)
  assert done.returncode == 0, done.stderr
  for name in TWO[0]:
    runs.assert_same_tensors(
      tmp_path / "whole" / "runs" / name,
      tmp_path / "killed" / "runs" / name,
      60,
    )


UNKNOWN = 'unknown macro NUM_LAYER (did you mean "NUM_LAYERS"?) in SWEEP_RUNS '
BATCH = {"GLOBAL_BATCH_SIZE": 3, "NUM_PODS": 2}
# (SWEEP_RUNS, the message after "SWEEP_RUNS")
AXES = [
  ([], " = []: give a list of axes, such as"),
  ([{}], ": an axis is {}; give"),
  ([{"a/b": {}}], ": a run is named 'a/b'"),
  ([{"a": 1}], ' "a": is 1; give {macro: value}'),
  ([{"a": BATCH}], ' "a": a batch of 3 is not divisible by NUM_PODS = 2.'),
  (
    [{"a": {}, "a-b": {}}, {"b-c": {}, "c": {}}],
    ': two runs are named "a-b-c"',
  ),
  (
    [{"a": {"D_FF": 64}}, {"b": {"D_FF": 32}}],
    ' "b": sets D_FF, which another',
  ),
  ([{"a": {"MODEL_DIR": "x"}}], ' "a": sets MODEL_DIR, which is of the whole'),
  (
    [{"a": {}, "b": {"VOCAB_SIZE": 400}}],
    ' "b": VOCAB_SIZE = 400, and "a" has',
  ),
  (
    [{"a": {}, "b": {"GLOBAL_BATCH_SIZE": 8}}],
    ' "b": validates on 16 rows, an',
  ),
]


@pytest.mark.parametrize(
  ("axes", "macros", "said"),
  [
    *((axes, {}, f"SWEEP_RUNS{said}") for axes, said in AXES),
    ([{"a": {"NUM_LAYER": 2}}], {}, f'{UNKNOWN}"a"'),
    ([{"a": {"D_KV": 7}}], {}, "D_KV = 7: rotary embedding turns pairs of num"),
    (
      TWO,
      {"SWEEP_HELD_OUT": ["smal"]},
      "SWEEP_HELD_OUT = ['smal']: no axis of SWEEP_RUNS has \"smal\" (did you "
      'mean "small"?)',
    ),
    (TWO, {"SWEEP_AT_ONCE": 10_000}, "SWEEP_AT_ONCE = 10000: more runs than"),
  ],
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_is_made(
  corpus, tmp_path, fails, axes, macros, said
):
  folder = tmp_path / "sweep"
  assert fails(*flags(corpus, folder, axes, **macros)).startswith(said)
  assert not folder.exists()
