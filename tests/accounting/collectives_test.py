# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The closed form of what a step moves is what the lowered program moves."""

import collections
import dataclasses

import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.collectives import step_bytes
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.pods import PodsConfig
from palm_mtf.mesh.traffic import traffic
from palm_mtf.programs.train_program import build_train_program
from tests.mtf_testing import LAYOUTS, PALM_OPTIMIZER, mesh_layout, small_config

SERIAL = {"block": "serial"}
MULTI_HEAD = {"attention": "multi_head"}
FACTORED = {"second_moment": "factored"}
TWO_D = LAYOUTS["PaLM's 2D"]


def lowered_bytes(config, mesh, optimizer, batch_size, pods):
  """Returns what `traffic` finds in all runs of a step, of all pods."""
  with tf.Graph().as_default():
    program = build_train_program(
      config, mesh, optimizer, batch_size=batch_size, seed=0, pods=pods
    )
    moved = traffic([program.update, *program.metrics.values()])
    for _ in range(mesh.num_microbatches - 1):
      moved += traffic([pod.accumulate for pod in program.pods])
  return moved


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("layout", "changes", "num_microbatches", "num_pods", "optimizer"),
  [
    (LAYOUTS["batch over data"], {}, 1, 1, {}),
    (LAYOUTS["all over data and model"], MULTI_HEAD, 2, 1, FACTORED),
    (LAYOUTS["two axes but no batch"], MULTI_HEAD, 1, 1, {}),
    slow(LAYOUTS["two axes but no batch"], SERIAL, 1, 1, {}),
    (LAYOUTS["padded vocab over three"], {}, 1, 2, {}),
    (LAYOUTS["fully sharded"], {"activation_dtype": "bfloat16"}, 2, 1, {}),
    slow(TWO_D, {"remat": "layer"}, 2, 1, {}),
    (TWO_D, {"remat": "layer", **SERIAL, **MULTI_HEAD}, 1, 1, {}),
    (
      TWO_D,
      {"remat": "attention", "activation_dtype": "bfloat16"},
      2,
      2,
      FACTORED,
    ),
    (("data:2", "batch:data"), {}, 2, 2, {}),
    (
      ("data:2,model:2", "batch:model,vocab:data,d_model_stored:model"),
      {"remat": "layer"},
      1,
      1,
      {},
    ),
    (
      ("data:2,model:2", "heads:model,vocab:data,d_model_residual:model"),
      SERIAL,
      1,
      1,
      {},
    ),
  ],
)
def test_the_lowered_step_moves_the_bytes_of_the_closed_form(
  layout, changes, num_microbatches, num_pods, optimizer
):
  config = small_config(num_layers=1, **changes)
  mesh = MeshLayout(
    mesh_shape=layout[0], layout=layout[1], num_microbatches=num_microbatches
  )
  optimizer = dataclasses.replace(PALM_OPTIMIZER, **optimizer)
  pods = PodsConfig(num_pods=num_pods)
  of_one_pod = step_bytes(
    config, mesh, optimizer, pod_batch_size=8 // num_pods, num_pods=num_pods
  )
  expected = collections.Counter(
    {key: num_pods * value for key, value in of_one_pod.items()}
  )
  actual = lowered_bytes(config, mesh, optimizer, 8, pods)
  assert actual == expected
  assert actual.total() > 0


def test_gradients_stored_split_move_half_on_their_way():
  """And weights once more: FSDP moves 3 / 2 of what data parallelism does."""
  config = small_config(vocab_size=16)
  whole, split = (
    step_bytes(
      config,
      MeshLayout(mesh_shape="data:4", layout=layout),
      PALM_OPTIMIZER,
      pod_batch_size=4,
    )
    for layout in ("batch:data", "batch:data,d_model_stored:data")
  )
  ratio = split["reduce_scatter", ("data",)] / whole["all_reduce", ("data",)]
  # More by the embedding's second gradient.
  assert ratio == pytest.approx(0.5, abs=0.03)
  assert split.total() / whole.total() == pytest.approx(1.5, abs=0.1)


def test_microbatches_move_activations_as_often_and_gradients_once():
  config = small_config()
  one, four = (
    step_bytes(
      config,
      mesh_layout("all over data and model", num_microbatches=n),
      PALM_OPTIMIZER,
      pod_batch_size=8,
    )
    for n in (1, 4)
  )
  assert one == four
