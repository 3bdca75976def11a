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
from tests.mtf_testing import LAYOUTS, PALM_OPTIMIZER, small_config


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


def case(
  layout,
  *,
  microbatches=1,
  gradient_dtype="activation",
  pods=1,
  second_moment="full",
  slow=False,
  **changes,
):
  mesh_shape, rules = LAYOUTS.get(layout, ("data:2,model:2", layout))
  mesh = MeshLayout(
    mesh_shape=mesh_shape,
    layout=rules,
    num_microbatches=microbatches,
    gradient_dtype=gradient_dtype,
  )
  optimizer = dataclasses.replace(PALM_OPTIMIZER, second_moment=second_moment)
  return pytest.param(
    small_config(num_layers=1, **changes),
    mesh,
    optimizer,
    PodsConfig(num_pods=pods),
    marks=pytest.mark.slow if slow else (),
  )


MULTI_HEAD, SERIAL = {"attention": "multi_head"}, {"block": "serial"}
TWO_D, NO_BATCH = "PaLM's 2D", "two axes but no batch"


@pytest.mark.parametrize(
  ("config", "mesh", "optimizer", "pods"),
  [
    case("batch over data"),
    case(TWO_D, gradient_dtype="float32", activation_dtype="bfloat16"),
    case(
      "all over data and model",
      microbatches=2,
      second_moment="factored",
      **MULTI_HEAD,
    ),
    case(NO_BATCH, **MULTI_HEAD),
    case(NO_BATCH, slow=True, **SERIAL),
    case("padded vocab over three", pods=2),
    case("fully sharded", microbatches=2, activation_dtype="bfloat16"),
    case(TWO_D, microbatches=2, slow=True, remat="layer"),
    case(TWO_D, remat="layer", **SERIAL, **MULTI_HEAD),
    case(
      TWO_D,
      microbatches=2,
      pods=2,
      second_moment="factored",
      remat="attention",
      activation_dtype="bfloat16",
    ),
    case("batch over data", microbatches=2, pods=2),
    case("batch:model,vocab:data,d_model_stored:model", remat="layer"),
    case("heads:model,vocab:data,d_model_residual:model", **SERIAL),
  ],
)
def test_the_lowered_step_moves_the_bytes_of_the_closed_form(
  config, mesh, optimizer, pods
):
  n = pods.num_pods
  of_one_pod = step_bytes(
    config, mesh, optimizer, pod_batch_size=8 // n, num_pods=n
  )
  expected = collections.Counter({k: n * v for k, v in of_one_pod.items()})
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
