# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every file of a MODEL_DIR is read; a wrong MODEL_DIR is one error line."""

import json
import math

import pytest

from palm_mtf.errors import UserError
from palm_mtf.report.runs import Run, read_runs
from tests.report.conftest import log_line


def read(*folders):
  return read_runs([str(folder) for folder in folders])


def test_every_file_of_a_run_is_read(write_run):
  sample = {"step": 20, "prompt": "p", "continuation": "c"}
  rewind, result = {"step": 10, "to_step": 5}, {"step": 9, "metrics": {"a": 1}}
  files = {
    "config.gin": 'NAME = "a # b"  # x.gin:3\nSIZE = 3  # x\nmodule.f = 1\n'
    "B = 0  # default\n",
    "samples.jsonl": [sample],
    "rewinds.jsonl": [rewind],
    "eval/step_00000009/quiz-test.json": json.dumps(result),
    "plan.json": '{"mfu": 0.5, "step_secs": null, "run": {"secs": 1}}',
  }
  lines, settings = (
    [log_line(10), log_line(20)],
    {"NAME": "a # b", "SIZE": 3, "B": 0},
  )
  assert read(write_run("a", lines, files)) == [
    Run("a", lines, [rewind], [sample], [result], settings, {"B"}, {"mfu": 0.5})
  ]


def test_metrics_are_enough_and_damaged_files_are_skipped(write_run):
  results = enumerate(["{", "[]", "{}", '{"step": 1, "metrics": 2}'])
  files = {f"eval/step_00000001/{i}.json": text for i, text in results}
  damaged = write_run("b", [log_line(1)], files)
  (damaged / "config.gin").write_bytes(b"SEED = 1 # \xff")
  (damaged / "plan.json").write_bytes(b"[" * 100_000)
  for run in read(write_run("a", [log_line(1)]), damaged):
    assert run == Run(run.name, [log_line(1)], [], [], [], {}, set(), {})


def test_a_missing_or_infinite_number_makes_no_point(write_run):
  lines = [log_line(1), log_line(2, loss=math.nan), {"step": 3, "mfu": None}]
  (run,) = read(write_run("a", [*lines, log_line(4, loss=math.inf)]))
  assert run.points("loss", "step") == [(1, 7.99)]
  assert run.values("no such field") == []


def test_half_a_line_is_skipped_only_at_the_end(write_run):
  folder = write_run("a", [log_line(10)])
  path = folder / "metrics.jsonl"
  path.write_text(path.read_text() + '{"step": 20, "los')
  (run,) = read(folder)
  assert run.lines == [log_line(10)]
  path.write_text(path.read_text() + "\n" + json.dumps(log_line(20)))
  with pytest.raises(UserError) as error:
    read(folder)
  message = f"{path}, line 2: is no JSON object; remove the line."
  assert str(error.value) == message


def test_runs_are_named_by_the_last_parts_that_differ_and_read_once(write_run):
  folders = [
    write_run(name, [log_line(1)]) for name in ("x/a/run", "x/b/run", "y/a/run")
  ]
  assert [run.name for run in read(*folders[:2])] == ["a/run", "b/run"]
  names = [run.name for run in read(*folders, f"{folders[0]}/")]
  assert names == ["x/a/run", "x/b/run", "y/a/run"]


@pytest.mark.parametrize(
  ("path", "message"),
  [
    (
      "rum",
      'there is no such folder (did you mean "run"?); give the folder of a '
      "run.",
    ),
    ("run/metrics.jsonl", "is a file; give the folder of a run."),
    (
      ".",
      "holds no metrics.jsonl, but folders of runs; give one, such as './run'.",
    ),
    (
      "run/eval",
      "holds no metrics.jsonl; give the MODEL_DIR of a run that has logged a "
      "step.",
    ),
  ],
)
def test_what_is_not_a_run_is_an_error_with_a_fix(
  write_run, tmp_path, monkeypatch, path, message
):
  write_run("run", [log_line(1)], {"eval/empty": ""})
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError) as error:
    read(path)
  assert str(error.value) == f"MODEL_DIR = {path!r}: {message}"


def test_a_run_that_has_logged_no_number_yet_is_an_error(write_run):
  with pytest.raises(UserError, match=r"has no line with numbers yet; wait"):
    read(write_run("a", [{"step": 0}]))
