# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of an earlier version resumes, evaluates and generates.

old_run/ is a run of commit 0b681b3, which had every module in the root of the
package: four steps of a model with one layer, on two pods. Its config.gin
imports modules by their old names. That commit computed the expected numbers.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from palm_mtf.cli.main import main

OLD_RUN = Path(__file__).parent / "old_run"
LOSS_OF_STEP_4, LOSS_OF_STEP_8 = 5.449884, 4.8088


@pytest.fixture
def old_run(tmp_path, monkeypatch):
  """Copies the run and its text, whose path is relative, to a new folder."""
  shutil.copytree(OLD_RUN, tmp_path, dirs_exist_ok=True)
  monkeypatch.chdir(tmp_path)
  return tmp_path / "run"


@pytest.mark.slow
def test_it_resumes_from_its_own_config_and_writes_one_of_macros(
  old_run, capsys
):
  config = ["--gin_file=run/config.gin", "--gin.TRAIN_STEPS=8"]
  assert main(["train", *config]) == 0
  said = capsys.readouterr().err
  assert "resuming from run/checkpoints/step_00000004" in said
  assert "kernels" not in said  # that commit did not record kernels
  # That commit did not shuffle documents, so batches differ now, but the loss
  # falls as much.
  assert "the tokens differs from that checkpoint's" in said
  # The run began before NORM_SCALE existed.
  assert "NORM_SCALE = 'zero_centered': the run began in a version" in said
  lines = (old_run / "metrics.jsonl").read_text().splitlines()
  losses = [json.loads(x).get("validation_loss") for x in lines]
  assert losses[-1] == pytest.approx(LOSS_OF_STEP_8, abs=0.05)
  _, *lines = (old_run / "config.gin").read_text().splitlines()
  assert lines[0] == "from __gin__ import dynamic_registration"
  assert all(re.match("$|(# CHIP_|)[A-Z0-9_]+ = ", line) for line in lines[1:])


@pytest.mark.parametrize(
  "flag", ["--model_dir=run", "--gin_file=run/config.gin"]
)
def test_it_evaluates(old_run, capsys, flag):
  assert main(["evaluate", flag, "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["validation_loss"] == pytest.approx(LOSS_OF_STEP_4, rel=1e-5)


def test_it_generates(old_run, capsys):
  flags = ["--model_dir=run", "--prompt=the of", "--gin.TEMPERATURE=0.0"]
  # That commit put token 0 before every prompt, as we do under this packing.
  flags.append("--gin.PACKING='packed'")
  assert main(["generate", *flags, "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["continuation"] == "ssss"
