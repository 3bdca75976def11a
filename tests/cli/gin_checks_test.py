# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.gin of a stranger's run is read as data."""

import pytest

from palm_mtf.cli import gin_checks
from palm_mtf.cli.gin_files import load
from palm_mtf.cli.gin_statements import read_file
from palm_mtf.errors import UserError


def check(tmp_path, *lines):
  path = tmp_path / "config.gin"
  path.write_text("".join(f"{line}\n" for line in lines))
  gin_checks.check_runs_no_code(read_file(path))


@pytest.mark.parametrize(
  "lines",
  [
    ("SEED = 3", "PROMPTS = ['a', \"b\"]", "D_FF = %D_MODEL"),
    ("HEADERS = {'a': [1, (2.0, None)]}",),
    (
      "from __gin__ import dynamic_registration",
      "from palm_mtf.tasks import records",
      "from palm_mtf.tasks import palm_mixture",
      "records.places.folder = '/data'",
      "palm_mixture.books.files = %TEXT_FILES",
    ),
    (  # from an earlier version, which bound its own functions in gin
      "from palm_mtf import config",
      "from palm_mtf import train",
      "train.train.model = @config.PalmConfig()",
      "config.PalmConfig.d_ff = %D_FF",
    ),
    ("PalmConfig.d_ff = 64", "AdafactorConfig.learning_rate = 0.5"),
  ],
)
def test_literals_of_macros_and_of_our_tasks_are_data(tmp_path, lines):
  check(tmp_path, *lines)


@pytest.mark.parametrize(
  ("lines", "bad"),
  [
    (("import subprocess",), "import subprocess"),
    (("import my_tasks",), "import my_tasks"),
    (("from os import path",), "from os import path"),
    (("import palm_mtfx.tasks",), "import palm_mtfx.tasks"),
    (("A = @gin.singleton()",), "A = @gin.singleton()"),
    (("A = [{1: @f}]",), "A = [{1: @f}]"),
    (("A = %my_tasks.NAME",), "A = %my_tasks.NAME"),
    (
      (
        "from palm_mtf.tasks import code_execution as x",
        "SAMPLE_TOKENS = @x.subprocess.getoutput()",
      ),
      "SAMPLE_TOKENS = @x.subprocess.getoutput()",
    ),
    (
      (
        "from palm_mtf.tasks import records",
        "records.places.folder = @records.Path()",
      ),
      "records.places.folder = @records.Path()",
    ),
    (
      ("from palm_mtf.tasks import code as c", "c.programs.allowed = True"),
      "c.programs.allowed = True",
    ),
    (
      ("import palm_mtf.tasks.code", "palm_mtf.tasks.code.programs.secs = 9"),
      "palm_mtf.tasks.code.programs.secs = 9",
    ),
    (("os.system.command = 'true'",), 'os.system.command = "true"'),
    (
      ("PalmConfig.d_ff = [@f()]",),
      "PalmConfig.d_ff = [@f()]",
    ),
    (
      (
        "from palm_mtf.tasks import code_execution as x",
        "PalmConfig.d_ff = @x.subprocess.getoutput()",
      ),
      "PalmConfig.d_ff = @x.subprocess.getoutput()",
    ),
    (
      (
        "from palm_mtf import config",
        "config.PalmConfig.d_ff = [@config.os()]",
      ),
      "config.PalmConfig.d_ff = [@config.os()]",
    ),
  ],
)
def test_whatever_could_run_code_is_refused_by_its_line(tmp_path, lines, bad):
  with pytest.raises(UserError) as info:
    check(tmp_path, "SEED = 3", *lines)
  assert str(info.value) == (
    f"{tmp_path}/config.gin:{1 + len(lines)}: {bad}: runs or permits code from "
    "the author of this run; if you trust the author, add --trust_config."
  )


def test_an_included_file_is_data_too(tmp_path):
  (tmp_path / "more.gin").write_text("import subprocess\n")
  with pytest.raises(UserError, match=r"more\.gin:1: import subprocess: runs"):
    check(tmp_path, "include 'more.gin'")


def test_a_run_is_checked_before_its_modules_and_files_of_the_user_are_not(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "of_a_stranger.py").write_text("raise SystemExit('it ran')\n")
  run = tmp_path / "config.gin"
  run.write_text("include 'recipes/quickstart.gin'\nimport of_a_stranger\n")
  directory = "MODEL_DIR='x'"
  with pytest.raises(UserError, match="import of_a_stranger: runs or permits"):
    load("generate", [], [directory], model_dir=str(tmp_path))
  with pytest.raises(UserError, match="SystemExit: it ran"):
    load("generate", [str(run)], [directory]).build()
  run.write_text("include 'recipes/quickstart.gin'\nD_FF = 64\n")
  (tmp_path / "mine.gin").write_text("import json\nSEED = 5\n")
  settings = load(
    "generate", ["mine.gin"], [directory], model_dir=str(tmp_path)
  ).build()[1]
  assert (settings.model.d_ff, settings.run.seed) == (64, 5)
