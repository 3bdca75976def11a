# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Models have the parameters of their names; memory follows the layout."""

import concurrent.futures
import dataclasses
import multiprocessing

import pytest

from palm_mtf.accounting.memory import device_bytes
from palm_mtf.config import MeshLayout
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
from tests.mtf_testing import feed_of
from tests.settings import work
from tools.bench import models

# 3.3M parameters, 40 MB of weights and slots, and next to no activations.
WIDE = dataclasses.replace(
  models.benchmark_config("float32"),
  num_layers=1,
  d_kv=16,
  d_ff=1024,
  vocab_size=3000,
  sequence_length=4,
)
LAYOUTS = [
  MeshLayout(mesh_shape="data:4", layout=f"batch:data{more}")
  for more in ("", ",d_model_stored:data")
]


@pytest.mark.parametrize("size", models.SIZES)
def test_a_model_has_the_parameters_of_its_name(size):
  count = models.num_parameters(models.benchmark_config("float32", size))
  assert count / 1e6 == pytest.approx(float(size.removesuffix("M")), rel=0.015)


def peak_of_steps(layout):
  """Returns by how much this process grows in three steps."""
  tokens = models.random_tokens(WIDE, 8)
  before = resident_bytes()
  with models.training_program(WIDE, batch_size=8, mesh_layout=layout) as (
    session,
    program,
  ):
    batch = {"inputs": tokens, "targets": tokens}
    for step in range(3):
      session.run(program.update.operations, feed_of(program, batch, step))
  return largest_resident_bytes() - before


@pytest.mark.slow  # two processes
def test_the_peak_of_a_process_follows_what_devices_keep():
  with concurrent.futures.ProcessPoolExecutor(
    1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
  ) as processes:
    whole, split = processes.map(peak_of_steps, LAYOUTS)
  kept = []
  for layout in LAYOUTS:
    of_device = device_bytes(
      work(WIDE, layout, optimizer=models.PALM_OPTIMIZER)
    )
    kept.append(4 * (of_device.weights + of_device.slots))
  assert kept[1] * 4 == kept[0]
  # Besides a weight and its two slots, a process holds at most, split in the
  # same way, the gradient, the sum of all devices' gradients, and the next
  # values of the three: 8 numbers instead of 3.
  saved = kept[0] - kept[1]
  assert 0.8 * saved < whole - split < 8 / 3 * saved
