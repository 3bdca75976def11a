# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever a MODEL_DIR holds is read; what is wrong is one line."""

import json
import math

import pytest

from palm_mtf.errors import UserError
from palm_mtf.report.runs import read_runs
from tests.report.conftest import log_line, write_lines


def read(*folders):
  return read_runs([str(folder) for folder in folders])


def test_lines_events_settings_manifest_and_samples_are_read(write_run):
  folder = write_run(
    "a",
    [log_line(10), {"event": "rewind", "step": 10, "loss": 9.0}, log_line(20)],
    config='NAME = "a # b"  # recipes/x.gin:3\nSIZE = 3  # x\nmodule.f = 1\n',
    samples=[{"step": 20, "prompt": "p", "continuation": "c"}],
    manifest={"shapes": {"w": [3, 4], "s": [4]}},
  )
  (run,) = read(folder)
  assert run.name == "a"
  assert [line["step"] for line in run.lines] == [10, 20]
  assert run.events == [{"event": "rewind", "step": 10, "loss": 9.0}]
  assert run.settings == {"NAME": "a # b", "SIZE": 3}
  assert run.num_parameters == 16
  assert run.samples[0]["continuation"] == "c"


def test_rewinds_are_events(write_run):
  folder = write_run("a", [log_line(10)])
  write_lines(folder / "rewinds.jsonl", [{"step": 10, "to_step": 5}])
  (run,) = read(folder)
  assert run.events == [{"event": "rewind", "step": 10, "to_step": 5}]


def test_metrics_alone_are_enough(write_run):
  (run,) = read(write_run("a", [log_line(10)]))
  assert (run.settings, run.manifest, run.samples) == ({}, {}, [])
  assert run.num_parameters is None


def test_tokens_are_those_the_line_says_or_the_sum_of_the_batches(write_run):
  said = write_run("a", [log_line(10, tokens=7), log_line(20, tokens=9)])
  lines = [log_line(10), log_line(30, global_batch_tokens=128)]
  summed, unknown = write_run("b", lines), write_run("c", [{"step": 1, "x": 2}])
  runs = read(said, summed, unknown)
  tokens = [[line.get("tokens") for line in run.lines] for run in runs]
  assert tokens == [[7, 9], [640, 640 + 20 * 128], [None]]
  assert [run.has_tokens for run in runs] == [True, True, False]


def test_a_missing_or_infinite_number_is_a_point_less(write_run):
  lines = [log_line(1), log_line(2, loss=math.nan), {"step": 3, "mfu": None}]
  (run,) = read(write_run("a", [*lines, log_line(4, loss=math.inf)]))
  assert run.points("loss", "step") == [(1, 7.99)]
  assert run.values("no such field") == []


def test_the_half_line_of_a_run_that_goes_on_is_passed_over(write_run):
  folder = write_run("a", [log_line(10)])
  with open(folder / "metrics.jsonl", "a") as file:
    file.write('{"step": 20, "los')
  (run,) = read(folder)
  assert len(run.lines) == 1


def test_another_broken_line_is_named(write_run):
  folder = write_run("a", [log_line(10)])
  path = folder / "metrics.jsonl"
  path.write_text(path.read_text() + "half\n" + json.dumps(log_line(20)))
  with pytest.raises(UserError) as error:
    read(folder)
  assert str(error.value) == (
    f"{path}, line 2: is no JSON object; remove the line."
  )


def test_runs_are_named_by_the_last_parts_that_differ(write_run):
  folders = [
    write_run(name, [log_line(1)]) for name in ("x/a/run", "x/b/run", "y/a/run")
  ]
  assert [run.name for run in read(*folders[:2])] == ["a/run", "b/run"]
  names = [run.name for run in read(*folders)]
  assert names == ["x/a/run", "x/b/run", "y/a/run"]


def test_a_run_that_is_given_twice_is_shown_once(write_run):
  folder = write_run("a", [log_line(1)])
  assert len(read(folder, f"{folder}/")) == 1


@pytest.mark.parametrize(
  ("path", "message"),
  [
    (
      "quikstart",
      'there is no such folder (did you mean "quickstart"?); give that of a '
      "run.",
    ),
    ("quickstart/metrics.jsonl", "is a file; give the folder of a run."),
    (
      "",
      "holds no metrics.jsonl, but folders of runs; give one, such as "
      "'{here}/quickstart'.",
    ),
    (
      "empty",
      "holds no metrics.jsonl; give the MODEL_DIR of a run that has logged a "
      "step.",
    ),
  ],
)
def test_what_is_no_run_is_told_with_what_is_meant(
  write_run, tmp_path, path, message
):
  write_run("quickstart", [log_line(1)])
  (tmp_path / "empty").mkdir()
  given = str(tmp_path / path).rstrip("/")
  with pytest.raises(UserError) as error:
    read(given)
  assert str(error.value) == (
    f"MODEL_DIR = {given!r}: " + message.format(here=tmp_path)
  )


def test_a_run_that_has_logged_no_number_yet_is_told(write_run):
  folder = write_run("a", [])
  write_lines(folder / "metrics.jsonl", [{"event": "start", "step": 0}])
  with pytest.raises(UserError, match=r"has no line with numbers yet; wait"):
    read(folder)
