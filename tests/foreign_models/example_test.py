# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of examples/t5_on_two_pods run, and print the same losses."""

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


def run(*flags):
  return subprocess.run(
    [sys.executable, "-W", "ignore", EXAMPLE / "train.py", *flags],
    cwd=ROOT,
    check=False,
    capture_output=True,
    text=True,
  )


def losses(text):
  return [float(x) for x in re.findall(r"^step \d+  loss (.+)$", text, re.M)]


@pytest.fixture
def main(monkeypatch, tmp_path):
  """The script's main function, of the flags; of one layer, not of two."""
  script = shutil.copy(EXAMPLE / "train.py", tmp_path)
  settings = (EXAMPLE / "t5.gin").read_text()
  assert "NUM_LAYERS = 2" in settings
  one_layer = settings.replace("NUM_LAYERS = 2", "NUM_LAYERS = 1")
  (tmp_path / "t5.gin").write_text(one_layer)

  def call(*flags):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    runpy.run_path(script, run_name="__main__")

  yield call
  gin.clear_config()


def test_the_command_trains_on_two_pods(main, tmp_path, capsys):
  file = tmp_path / "t5.npz"
  main("--steps=2", f"--save={file}")
  out = capsys.readouterr().out
  assert len(losses(out)) == 2
  assert out.endswith("after 2 steps all pods hold the same bits\n")
  assert np.load(file)["shared/embedding"].shape == (128, 64)


def test_a_batch_that_pods_cannot_share_is_one_line(main, capsys):
  with pytest.raises(SystemExit, match="2"):
    main("--num_pods=3")
  assert capsys.readouterr().err.splitlines() == [
    "error: a batch of 16 is not divisible by NUM_PODS = 3. Use a divisor of "
    "16, or another GLOBAL_BATCH_SIZE."
  ]


@pytest.mark.slow
def test_one_pod_two_and_two_in_servers_print_the_same_losses():
  one, two, servers = (
    run("--steps=3", *flags)
    for flags in (["--num_pods=1"], [], ["--pods=local_servers"])
  )
  assert len(losses(two.stdout)) == 3, two.stderr
  # Printed to four digits; the last may be rounded otherwise.
  assert losses(one.stdout) == pytest.approx(losses(two.stdout), abs=1.5e-4)
  assert servers.stdout == two.stdout, servers.stderr
