# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Wherever pods are, they train the same bits."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

from palm_mtf.cluster.local_servers import cores_of_pods
from tests import runs

NUM_STEPS = 200


@contextlib.contextmanager
def served(num_pods):
  """Yields the addresses of servers with a pod's share of this machine."""
  threads = len(cores_of_pods(num_pods)[0])
  command = f"-m palm_mtf pods serve --listen 127.0.0.1:0 --threads {threads}"
  with contextlib.ExitStack() as stack:
    processes = []
    for _ in range(num_pods):
      process = subprocess.Popen(
        [sys.executable, *command.split()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
      )
      processes.append(stack.enter_context(process))
      stack.callback(process.terminate)
    yield [process.stdout.readline().split()[-1] for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize("num_pods", [2, 3, 4])
def test_pods_in_all_three_places_hold_the_same_bits_for_200_steps(
  num_pods, tmp_path
):
  """Pods are compared after every step, the three places at the end."""
  corpus = runs.write_corpus(tmp_path / "corpus")

  def train(place, **macros):
    process = runs.start(
      "train",
      corpus,
      tmp_path / place,
      NUM_PODS=num_pods,
      PODS=place,
      GLOBAL_BATCH_SIZE=12,
      ACTIVATION_DTYPE="bfloat16",
      DCN_DTYPE="bfloat16",
      FINGERPRINT_STEPS=1,
      TRAIN_STEPS=NUM_STEPS,
      CHECKPOINT_STEPS=NUM_STEPS,
      EVAL_STEPS=NUM_STEPS,
      PROMPTS=[],
      **macros,
    )
    _, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    return runs.read_tensors(tmp_path / place, NUM_STEPS)

  found = {place: train(place) for place in ("in_process", "local_servers")}
  with served(num_pods) as addresses:
    islands = [[address] for address in addresses]
    found["cluster"] = train("cluster", ISLANDS=islands)
  expected = found["in_process"]
  assert any(name.endswith("/momentum") for name in expected)
  for name, tensors in found.items():
    assert tensors.keys() == expected.keys()
    for variable, value in expected.items():
      np.testing.assert_array_equal(
        tensors[variable], value, err_msg=f"{variable}, {name}"
      )
