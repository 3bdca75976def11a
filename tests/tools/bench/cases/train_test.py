# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The peak of memory follows the layout; checkouts take turns."""

import json
import shutil

import pytest

from palm_mtf.accounting.memory import device_bytes
from palm_mtf.config import MeshLayout
from tests import processes
from tools.bench import models


@pytest.mark.slow  # two processes
def test_the_peak_follows_what_devices_keep(run_bench):
  kept, peaks = [], []
  config = models.benchmark_config("float32", "4.8M")
  for layout in ("batch:data", "batch:data,d_model_stored:data"):
    flags = ["--mesh_shape=data:4", f"--layout={layout}", "--dtype=float32"]
    code, out, _ = run_bench(
      "train", "--size=4.8M", *flags, "--rounds=1", "--json"
    )
    assert code == 0
    peaks.append(json.loads(out)["peak_bytes"])
    mesh = MeshLayout(mesh_shape="data:4", layout=layout)
    of_device = device_bytes(config, mesh, models.PALM_OPTIMIZER)
    kept.append(4 * (of_device.weights + of_device.slots))
  assert kept[1] * 4 == pytest.approx(kept[0], rel=0.01)
  # Besides a weight and its two slots, a process holds at most, split in the
  # same way, the gradient, the sum of all devices' gradients, and the next
  # values of the three: 8 numbers instead of 3.
  saved = peaks[0] - peaks[1]
  assert 0.8 * (kept[0] - kept[1]) < saved < 8 / 3 * (kept[0] - kept[1])


@pytest.mark.slow
def test_another_checkout_takes_turns_with_its_own_code(tmp_path):
  for name in ("palm_mtf", "tools", "gin"):
    shutil.copytree(processes.ROOT / name, tmp_path / name)
  with (tmp_path / "tools/bench/cases/train.py").open("a") as case:
    case.write("\nimport sys\n\nprint('the copy works', file=sys.stderr)\n")
  bench = processes.ROOT / "tools" / "bench"
  flags = ["--size=4.8M", "--rounds=1", "--base", tmp_path]
  done = processes.python(bench, "train", "--json", *flags)
  assert done.returncode == 0, done.stderr
  _, base = map(json.loads, done.stdout.splitlines())
  assert base["program"] == "base" and base["ratio"] > 0
  assert done.stderr.count("the copy works") == 1
