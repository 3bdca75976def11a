# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which commands run, and the table of their times."""

import pytest

from palm_mtf.errors import UserError
from tools.bench.cases import start


@pytest.fixture
def model_dir(tmp_path):
  """Looks like a finished run."""
  (tmp_path / "tokens").mkdir()
  for name in ("vocabulary.model", "config.gin", "tokens/shard", "events"):
    (tmp_path / name).write_text(name)
  return tmp_path


def test_each_round_runs_all_commands_and_trains_from_the_start(
  model_dir, monkeypatch, measure
):
  ran, seconds = [], iter(range(100))

  def run_python(arguments):
    ran.append(arguments)
    for flag in arguments:
      if flag.startswith("--gin.MODEL_DIR="):
        kept = start.Path(flag.partition("=")[2].strip("'")).rglob("*")
        assert {x.name for x in kept} == {"vocabulary.model", "tokens", "shard"}
    return next(seconds), 0.5

  monkeypatch.setattr(start, "run_python", run_python)
  records = measure("start", f"--model_dir={model_dir}", "--rounds=3")
  secs = {x["command"]: x["cpu_secs"] for x in records}
  assert secs == dict(zip(start.NAMES, range(6, 12), strict=True))
  assert len(ran) == 18
  assert f"--gin_file={model_dir}/config.gin" in ran[-1]


def test_a_command_that_fails_says_why():
  with pytest.raises(UserError, match="failed and said NameError: name 'x'"):
    start.run_python(["-c", "x"])
