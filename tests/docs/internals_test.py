# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The recipes of the page work, and a training step runs as it says."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import processes, runs
from tests.doc_pages import Page
from tests.internals_page import change_files, read_spine
from tests.source_files import ROOT

PAGE = Page("docs/internals.md")
slow = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Project:
  """A copy of the project."""

  root: Path

  def python(self, *arguments: object) -> subprocess.CompletedProcess:
    """Runs Python in the copy, which it imports."""
    done = processes.python(
      *arguments,
      cwd=self.root,
      variables={"PYTHONPATH": f"{self.root}:{self.root / 'tools'}"},
    )
    return done

  def palm_mtf(self, *arguments: object) -> subprocess.CompletedProcess:
    """Runs a command of the copy with success."""
    done = self.python("-m", "palm_mtf", *arguments)
    assert done.returncode == 0, done.stderr
    return done

  def pytest(self, *arguments: str) -> None:
    """Runs some tests of the copy with success."""
    done = self.python("-m", "pytest", "-q", *arguments)
    assert done.returncode == 0, done.stdout

  def train(self, corpus: Path, name: str, **macros: object) -> Path:
    """Trains two steps; returns MODEL_DIR."""
    model_dir = self.root / name
    settings = {"TRAIN_STEPS": 2, "LOG_STEPS": 1, "PROMPTS": [], **macros}
    files = [settings.pop("gin_file")] if "gin_file" in settings else []
    self.palm_mtf(
      *runs.arguments("train", corpus, model_dir, **settings),
      *(f"--gin_file={file}" for file in files),
    )
    return model_dir


@pytest.fixture
def project(tmp_path: Path) -> Project:
  """A copy of the project, to be changed."""
  root = tmp_path / "project"
  for name in ("palm_mtf", "gin", "tasks", "tests"):
    shutil.copytree(
      ROOT / name,
      root / name,
      symlinks=True,
      ignore=shutil.ignore_patterns("__pycache__"),
    )
  for name in ("pyproject.toml", "README.md", "setup.py"):
    shutil.copy(ROOT / name, root)
  # An installation has this name for the folder.
  (root / "palm_mtf" / "tasks").symlink_to("../tasks")
  return Project(root)


@pytest.fixture
def changed(block, project: Project) -> Project:
  """The copy with a block of the page applied, in the style of the project."""
  change_files(block.text, project.root)
  folders = [project.root / x for x in ("palm_mtf", "tasks", "tests")]
  for words in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
    done = project.python("-m", "ruff", *words, *folders)
    assert done.returncode == 0, done.stdout + done.stderr
  return project


@pytest.fixture(scope="module")
def traced(corpus, tmp_path_factory) -> dict:
  """What `tests.traced_step` finds in a run of one step."""
  folder = tmp_path_factory.mktemp("traced")
  macros = dict.fromkeys(["TRAIN_STEPS", "LOG_STEPS", "CHECKPOINT_STEPS"], 1)
  flags = runs.arguments("train", corpus, folder / "run", **macros, PROMPTS=[])
  file = folder / "trace.json"
  done = processes.python(
    *("-m", "tests.traced_step", json.dumps(flags), file), cwd=ROOT
  )
  assert done.returncode == 0, done.stderr
  return json.loads(file.read_text("utf-8"))


@slow
@PAGE.shows("cli/main.py: main")
def test_each_function_of_a_step_is_called_by_the_one_above_it(block, traced):
  for functions, callers in read_spine(block.text):
    for function in functions:
      assert function in traced["callers"], f"{function} does not run"
      found = set(traced["callers"][function])
      assert not callers or found & set(callers), f"{function} by {callers}"


@slow
@PAGE.shows("--- palm_mtf/config/optimizer.py")
def test_a_setting_is_a_macro_that_training_reads(block, changed, corpus):
  flags = runs.arguments("train", corpus, changed.root / "run")
  shown = changed.palm_mtf(
    *flags, "--gin.WARMUP_STEPS=4", "--print_config"
  ).stdout
  assert re.search(r"^WARMUP_STEPS = 4  # ", shown, re.M)
  wrong = changed.python("-m", "palm_mtf", *flags, "--gin.WARMUP_STEPS=-1")
  assert wrong.returncode == 2
  assert wrong.stderr.startswith("palm_mtf: WARMUP_STEPS = -1: ")
  lines = runs.read_metrics(changed.train(corpus, "run", WARMUP_STEPS=4))
  rates = [line["learning_rate"] for line in lines]
  assert rates == pytest.approx([0.01 * 1 / 4, 0.01 * 2 / 4])


@slow
@PAGE.shows("--- /dev/null\n+++ palm_mtf/optim/lion.py")
def test_an_optimizer_trains_saves_its_slots_and_is_planned(
  block, changed, corpus
):
  settings = {"CHECKPOINT_STEPS": 1, "LEARNING_RATE": 0.01}
  settings["gin_file"] = "optim/lion.gin"
  here = changed.train(corpus, "here", **settings)
  one, two = (runs.read_tensors(here, step) for step in (1, 2))
  # Each number moves by the learning rate in each step.
  moved = np.abs(two["embedding"] - one["embedding"])
  np.testing.assert_allclose(moved, 0.01, rtol=1e-3)
  assert one.keys() == {
    *(x for x in one if not x.endswith("/momentum")),
    *(f"{x}/momentum" for x in one if not x.endswith("/momentum")),
  }
  flags = "--gin_file=recipes/quickstart.gin", "--gin_file=optim/lion.gin"
  assert changed.palm_mtf("plan", *flags, "--gin.CHIP='a100'").stdout
  changed.pytest("tests/gin_test.py", "-k", "optim or follow")


@slow
@PAGE.shows("--- palm_mtf/config/model.py")
def test_a_norm_trains_decodes_and_has_the_numbers_of_its_formula(
  block, changed, corpus
):
  # Each compares all of tests/blocks.py with the oracle.
  changed.pytest(
    "tests/architecture/block_test.py",
    "tests/generation/decode/step_test.py",
    "tests/export/saved_model/decoder_test.py",
    *("-k", "statistics"),
  )
  model_dir = changed.train(corpus, "run", NORM="tanh_norm")
  losses = [line["loss"] for line in runs.read_metrics(model_dir)]
  assert len(losses) == 2 and np.isfinite(losses).all()
  flags = "--model_dir", model_dir
  assert changed.palm_mtf("generate", *flags, "--prompt", "one two").stdout
  saved = changed.python(
    *("-m", "palm_mtf", "export", *flags, "--output", changed.root / "hf")
  )
  assert saved.returncode == 2
  assert "NORM = 'tanh_norm'" in saved.stderr


@PAGE.shows("--- palm_mtf/cli/command_table.py")
def test_a_command_prints(block, changed, finished):
  done = changed.palm_mtf("checkpoints", "newest", finished)
  assert done.stdout == f"{finished}/checkpoints/step_00000012\n"
  empty = changed.python("-m", "palm_mtf", "checkpoints", "newest", "gin")
  assert (empty.returncode, empty.stderr) == (
    2,
    "palm_mtf: gin: has no whole checkpoint; train first.\n",
  )
  assert (
    "checkpoints newest" in changed.palm_mtf("checkpoints", "--help").stdout
  )


@pytest.mark.slow
@PAGE.shows("--- /dev/null\n+++ palm_mtf/export/raw.py")
def test_a_format_is_written_and_keeps_to_the_import_table(
  block, changed, finished
):
  output = changed.root / "weights.raw"
  flags = "--model_dir", finished, "--format=raw", "--output", output
  done = changed.palm_mtf("export", *flags)
  assert "a file of float32 numbers" in done.stdout
  tensors = runs.read_tensors(finished, 12)
  numbers = np.fromfile(output, np.float32)
  embedding = tensors["embedding"].ravel()
  np.testing.assert_array_equal(numbers[: embedding.size], embedding)
  changed.pytest("tests/architecture_test.py")


@slow
@PAGE.shows("--- /dev/null\n+++ gin/layouts/heads_and_mlp.gin")
def test_a_layout_trains_on_two_devices_with_the_same_loss(
  block, changed, corpus
):
  one = changed.train(corpus, "one")
  two = changed.train(corpus, "two", gin_file="layouts/heads_and_mlp.gin")
  lines = [runs.read_metrics(x) for x in (one, two)]
  one, two = ([each["loss"] for each in x] for x in lines)
  assert two == pytest.approx(one, rel=1e-5)


@slow
@PAGE.shows("--- /dev/null\n+++ tasks/spelling.py")
def test_a_task_is_evaluated(block, changed, finished):
  done = changed.palm_mtf(
    *("evaluate", "--model_dir", finished, "--json"),
    "--gin_file=eval/spelling.gin",
  )
  assert "spelling" in done.stdout and "accuracy" in done.stdout


@pytest.mark.slow
@PAGE.shows("--- palm_mtf/training/loop.py")
def test_an_action_runs_after_its_steps(block, changed, corpus):
  model_dir = changed.root / "run"
  flags = runs.arguments("train", corpus, model_dir, TRAIN_STEPS=5, PROMPTS=[])
  done = changed.palm_mtf(*flags)
  assert re.findall(r"after step (\d+): [\d,]+ bytes", done.stderr) == [
    "2",
    "4",
  ]
