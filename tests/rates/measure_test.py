# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What MFU is measured against: all chips of a run, or of all its hosts."""

import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.flops import utilization
from palm_mtf.cli import gin_files
from palm_mtf.config import Config
from palm_mtf.rates import measure
from palm_mtf.rates.measure import run_flops_per_sec


def settings(recipe: str, layout: str, num_pods: int, chip: str) -> Config:
  """Returns the settings of a run on the devices of a layout."""
  files = [f"recipes/{recipe}.gin", f"layouts/{layout}.gin"]
  macros = {"MODEL_DIR": "x", "TEXT_FILES": "*", "CHIP": chip}
  macros |= {"NUM_PODS": num_pods, "ACTIVATION_DTYPE": "float32"}
  given = [f"{name}={value!r}" for name, value in macros.items()]
  return gin_files.load("train", files, given).build()[1]


def test_the_log_of_palms_own_run_would_say_46_2_percent():
  """238.3K tokens per second on two pods of 3,072 chips (PaLM 4.1)."""
  config = settings("palm_540b", "tpu_palm_540b", 2, "tpu_v4")
  peak = run_flops_per_sec(config)
  assert peak == 6144 * 275e12
  found = utilization(238_300, config.model, peak)
  assert f"{found['mfu']:.1%}" == "46.2%"


@pytest.mark.parametrize(
  ("num_pods", "num_hosts", "at_once"), [(2, 1, 2), (2, 2, 1), (4, 2, 2)]
)
def test_a_measured_peak_is_that_of_all_hosts_with_the_pods_each_has(
  monkeypatch, num_pods, num_hosts, at_once
):
  seen = []

  def measured(dtype, pods):
    seen.append((dtype, pods))
    return 1e12

  monkeypatch.setattr(measure, "measured_flops_per_sec", measured)
  config = settings("quickstart", "data_parallel", num_pods, "measured")
  assert run_flops_per_sec(config, num_hosts) == num_hosts * 1e12
  assert seen == [(tf.float32, at_once)]
