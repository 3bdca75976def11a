# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of examples/t5_on_two_pods run, and print the same losses."""

import os
import re
import runpy
import shutil
import subprocess
import sys

import gin
import numpy as np
import pytest

from tests.source_files import ROOT

EXAMPLE = ROOT / "examples" / "t5_on_two_pods"


def run(*flags, **environment):
  return subprocess.run(
    [sys.executable, "-W", "ignore", EXAMPLE / "train.py", *flags],
    cwd=ROOT,
    env=os.environ | environment,
    check=False,
    capture_output=True,
    text=True,
  )


def losses(text):
  return [float(x) for x in re.findall(r"^step \d+  loss (.+)$", text, re.M)]


@pytest.fixture
def main(monkeypatch, tmp_path):
  """Runs a copy of the script whose model has one layer instead of two."""
  folder = shutil.copytree(EXAMPLE, tmp_path / "example")
  monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

  def call(*flags):
    monkeypatch.setattr(sys, "argv", ["train.py", "--gin.NUM_LAYERS=1", *flags])
    with pytest.raises(SystemExit) as ended:
      runpy.run_path(f"{folder}/train.py", run_name="__main__")
    return ended.value.code

  yield call
  gin.clear_config()


@pytest.mark.slow
def test_the_command_trains_on_two_pods(main, tmp_path, capsys):
  file = tmp_path / "t5.npz"
  assert main("--gin.TRAIN_STEPS=2", f"--gin.SAVE_PATH='{file}'") == 0
  out = capsys.readouterr().out
  assert len(losses(out)) == 2
  assert out.endswith("after 2 steps all pods hold the same bits\n")
  assert np.load(file)["shared/embedding"].shape == (128, 64)


def test_a_wrong_binding_is_one_line(main, capsys):
  assert main("--gin.NUM_POD=1") == 2
  assert capsys.readouterr() == (
    "",
    "palm_mtf: NUM_POD = 1 (command line): nothing refers to NUM_POD (did you "
    'mean "NUM_PODS"?); remove it.\n',
  )


@pytest.mark.slow
def test_one_pod_two_and_two_in_servers_print_the_same_losses():
  one, two, servers = (
    run("--gin.TRAIN_STEPS=3", *flags)
    for flags in (["--gin.NUM_PODS=1"], [], ["--gin.PODS='local_servers'"])
  )
  assert len(losses(two.stdout)) == 3, two.stderr
  # Printed to four digits; the last digit may be rounded differently.
  assert losses(one.stdout) == pytest.approx(losses(two.stdout), abs=1.5e-4)
  assert servers.stdout == two.stdout, servers.stderr


@pytest.mark.slow
def test_rehearsed_tpus_print_the_losses_of_cpus():
  flags = (
    *("--gin.TRAIN_STEPS=2", "--gin.NUM_PODS=1", "--gin.NUM_LAYERS=1"),
    "--gin.DeviceMesh.mesh_shape='data:4'",
  )
  cpus = run(*flags)
  tpus = run(*flags, "--gin.DeviceMesh.tpu='v4-8'", JAX_PLATFORMS="cpu")
  assert len(losses(cpus.stdout)) == 2, cpus.stderr
  assert losses(tpus.stdout) == pytest.approx(losses(cpus.stdout), abs=1.5e-4)
  assert tpus.stdout.endswith("all pods hold the same bits\n"), tpus.stderr
