# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which commands run, and the table of their times."""

import json

import pytest

from palm_mtf.errors import UserError
from tools.bench.cases import start


@pytest.fixture
def model_dir(tmp_path):
  """Looks like a finished run."""
  path = tmp_path / "done"
  (path / "tokens").mkdir(parents=True)
  for name in ("vocabulary.model", "config.gin", "tokens/shard", "events"):
    (path / name).write_text(name)
  return path


def test_all_commands_run_in_every_round_and_training_anew(
  model_dir, monkeypatch, run_bench
):
  ran, seconds = [], iter(range(100))

  def measure(arguments):
    ran.append(arguments)
    for flag in arguments:
      if flag.startswith("--gin.MODEL_DIR="):
        fresh = flag.partition("=")[2].strip("'")
        kept = start.Path(fresh).rglob("*")
        assert {x.name for x in kept} == {"vocabulary.model", "tokens", "shard"}
    return next(seconds), 0.5

  monkeypatch.setattr(start, "run_python", measure)
  flags = [f"--model_dir={model_dir}", "--rounds=3", "--json"]
  code, out, _ = run_bench("start", *flags)
  assert code == 0
  rows = [json.loads(x) for x in out.splitlines()]
  names = ["help", "import", "generate", "score", "evaluate", "train"]
  assert [x["command"] for x in rows] == names
  assert [x["cpu_secs"] for x in rows] == [6, 7, 8, 9, 10, 11]
  assert len(ran) == 18
  assert f"--gin_file={model_dir}/config.gin" in ran[-1]


def test_help_is_measured_in_a_process_of_its_own(model_dir, run_bench):
  flags = [f"--model_dir={model_dir}", "--only=help", "--rounds=1"]
  code, out, _ = run_bench("start", *flags)
  assert code == 0
  head, row = out.splitlines()
  assert head.split() == ["command", "processor", "wall"]
  name, *seconds = row.split()
  assert name == "help"
  assert all(0 < float(x) < 60 for x in seconds)


def test_a_command_that_fails_says_why():
  with pytest.raises(UserError, match="failed and said NameError: name 'x'"):
    start.run_python(["-c", "x"])
