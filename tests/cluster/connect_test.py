# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Wherever pods are, they train the same bits."""

import pytest

from palm_mtf.cluster.local_servers import cores_of_pods
from tests import runs
from tests.cluster.served import Served


@pytest.mark.slow
@pytest.mark.parametrize("num_pods", [2, 3, 4])
def test_pods_in_all_three_places_hold_the_same_bits_for_200_steps(
  num_pods, corpus, tmp_path
):
  """Pods are compared after every step, the three places at the end."""

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
      TRAIN_STEPS=200,
      CHECKPOINT_STEPS=200,
      EVAL_STEPS=200,
      PROMPTS=[],
      **macros,
    )
    runs.finish(process)

  train("in_process")
  train("local_servers")
  with Served(num_pods, len(cores_of_pods(num_pods)[0])) as servers:
    train("cluster", ISLANDS=servers.islands)
  for place in ("local_servers", "cluster"):
    runs.assert_same_tensors(tmp_path / "in_process", tmp_path / place, 200)
  names = runs.read_tensors(tmp_path / "in_process", 200)
  assert any(name.endswith("/momentum") for name in names)
