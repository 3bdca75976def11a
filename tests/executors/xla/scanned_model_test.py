# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs of accelerators loop over periods of layers; gradients are exact."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from palm_mtf.accounting.communication import step_bytes
from palm_mtf.accounting.flops import device_flops
from palm_mtf.compilation.hlo_text import CompiledText
from palm_mtf.config import LossConfig, MeshLayout
from palm_mtf.executors.xla.device_model import compile_function
from tests import neighbours_cases
from tests.blocks import Z_LOSS, block_config, make_case
from tests.cases import slow
from tests.executors.xla.frozen_test import step_flops
from tests.executors.xla.program_run import lower_gradients, pod_step
from tests.mtf_testing import MOVED, SINGLE, small_config
from tests.settings import work

# The oracle's losses have no terms of routers.
LOSS = LossConfig(z_loss=Z_LOSS, balance_loss=0.0)


def make_step(config, layout=SINGLE, features=("inputs", "targets")):
  """Returns a step of two rows on some devices, and the devices' mesh."""
  made = pod_step(config, layout, num_rows=2, loss=LOSS, features=features)
  devices = jax.devices()[: layout.num_devices]
  return made, made.model.placement.make_mesh(devices)


def read_gradients(made, mesh, parts):
  """Returns the whole gradients of `made.gradients`, by array."""

  def join(parts):
    return {name: made.join(name, x) for name, x in parts.items()}

  split = dict.fromkeys(parts, PartitionSpec(mesh.axis_names))
  specs = {name: made.spec(name) for name in parts}
  return compile_function(mesh, join, [split], specs)(parts)


def loops_of_layers(layers, num_layers):
  """Returns the iterations of each loop, and the number of lines."""
  config = block_config("Cohere 2", layers=layers, num_layers=num_layers)
  text = lower_gradients(*make_step(config)).as_text()
  end = re.compile(r"dense<(\d+)> : tensor<i32>\n.+ = stablehlo\.compare  ?LT")
  return sorted(int(x) for x in end.findall(text)), len(text.splitlines())


@pytest.mark.parametrize(
  ("name", "shape", "rules", "remat"),
  [
    slow("Mixtral", "data:2,model:2", "batch:data,experts:model", "none"),
    slow("Mixtral", "data:4", "batch:data", "layer"),
    slow("OLMoE", "data:4", "batch:data", "none"),
    slow("OLMoE", "data:2,model:2", "batch:data,d_ff:model", "layer"),
    slow("DeepSeek-V3", "data:2,model:2", "batch:data,d_ff:model", "none"),
    slow("DeepSeek-V3", "data:2,model:2", "batch:data,experts:model", "layer"),
  ],
)
def test_a_step_multiplies_experts_as_often_as_planned(
  name, shape, rules, remat
):
  """XLA pads the rows of each expert to whole blocks."""
  layout = MeshLayout(tpu="v4-8", mesh_shape=shape, layout=rules)
  config = block_config(name, remat=remat)
  planned = device_flops(work(config, layout, 4))
  assert step_flops(pod_step(config, layout)) == planned


def test_each_group_has_two_loops_and_more_periods_add_no_lines():
  """The loops are those of the forward and of the backward pass."""
  loops, num_lines = loops_of_layers("2*(window, global), 3*global", 7)
  assert loops == [2, 2, 3, 3]
  more = loops_of_layers("5*(window, global), 4*global", 14)
  assert more == ([4, 4, 5, 5], num_lines)


@pytest.mark.parametrize(
  ("name", "changes", "layout"),
  [
    # Groups with a period of two layers and of one.
    (
      "Cohere 2",
      {"num_layers": 6, "layers": "2*(window, global), 2*global"},
      SINGLE,
    ),
    slow("Gemma 3", {"remat": "layer"}, SINGLE),
    slow("GPT-3", {"remat": "attention"}, SINGLE),
    slow("Mixtral", {}, SINGLE),
    slow("DeepSeek-V3", {}, SINGLE),
    slow("GLaM", {"remat": "layer"}, SINGLE),
    ("GLaM", {"remat": "layer"}, MOVED),
    slow("Switch", {}, MOVED),
    slow("DeepSeek-V3", {}, MOVED),
  ],
)
def test_gradients_of_unlike_layers_are_the_oracles(name, changes, layout):
  check_gradients(make_case(name, **changes), layout)


@pytest.mark.slow
@pytest.mark.parametrize(
  "layout",
  [
    SINGLE,
    MeshLayout(mesh_shape="data:2,model:2", layout="batch:data,heads:model"),
  ],
)
def test_gradients_with_neighbours_are_the_oracles(layout):
  config = dataclasses.replace(neighbours_cases.CONFIG, remat="layer")
  check_gradients(neighbours_cases.make_case(config), layout)


def check_gradients(case, layout):
  """Compares the losses and gradients of a step on accelerators."""
  made, mesh = make_step(case.config, layout, list(case.batch))
  state = {}
  for array in made.parameters:
    values = [case.params[x] for x in made.names_of(array)]
    state[array] = np.float32(values).reshape(made.shape(array))
  for array in made.variables.keys() - state.keys():
    state[array] = np.zeros(made.shape(array), np.float32)
  batch = {x: y[np.newaxis] for x, y in case.batch.items()}
  numbers = made.abstract_numbers(mesh).items()
  numbers = {name: np.zeros(x.shape, x.dtype) for name, x in numbers}
  found, losses = made.gradients(mesh)(state, batch, numbers)
  num_tokens = batch["targets"].size
  losses = dict(zip(made.model.losses, losses / num_tokens, strict=True))
  found = read_gradients(made, mesh, found)
  assert (losses["loss"], losses["z_loss"]) == pytest.approx(case.losses, 1e-5)
  gradients = {}
  for array, x in found.items():
    names = made.names_of(array)
    values = np.asarray(x).reshape(len(names), -1) / num_tokens
    gradients |= dict(zip(names, values, strict=True))
  assert gradients.keys() == case.params.keys()
  for name, (direction, slope) in case.slopes.items():
    error = abs(gradients[name].astype(float) @ direction.ravel() - slope)
    assert error < 1e-5 * np.linalg.norm(gradients[name]) + 1e-6, name
  for name, counts in case.states.items():
    np.testing.assert_allclose(gradients[name] * num_tokens, counts, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "passes"), [("layer", 5), ("none", 4)])
def test_a_step_moves_tokens_to_their_experts_and_back(remat, passes):
  """REMAT moves them to their experts once more, but not back.

  GLaM's test model has one layer with experts, each of which takes up to 5 of
  the 9 tokens of a sequence.
  """
  config = block_config("GLaM", remat=remat)
  compiled = lower_gradients(*make_step(config, MOVED)).compile()
  moves = CompiledText(compiled.as_text()).collectives
  moves = [x for x in moves if x.kind == "all_to_all"]
  sent = sum(x.times * x.sent_bytes for x in moves)
  rows, width = config.num_experts * 5, 4  # of one sequence; float32
  numbers = passes * rows * config.d_model + 2 * rows  # with gates
  assert sent == numbers * width / 2  # a device keeps half of its rows
  planned = step_bytes(work(config, MOVED, 2))
  assert planned["all_to_all", ("data",)] == MOVED.num_devices * sent


@pytest.mark.slow
def test_a_step_needs_no_second_copy_of_weights_and_slots():
  """Besides the gradients, it needs fewer bytes than all of them."""
  config = small_config(num_layers=12, d_ff=4096)
  made, mesh = make_step(config)
  state = made.abstract_state(mesh)
  kept, gradients = (
    sum(math.prod(state[x].shape) * state[x].dtype.itemsize for x in names)
    for names in (state, made.parameters)
  )
  given = *made.split(state), made.abstract_batch(mesh)
  lowered = made.step(mesh).lower(*given, made.abstract_numbers(mesh))
  found = lowered.compile().memory_analysis()
  assert found.temp_size_in_bytes - gradients < kept


@pytest.mark.slow
def test_a_step_with_neighbours_multiplies_as_often_as_planned():
  """Gradients of cross-attention repeat its products of q and k."""
  config, layers = neighbours_cases.CONFIG, 2  # that attend to neighbours
  layout = MeshLayout(tpu="v4-8", mesh_shape="data:4", layout="batch:data")
  features = ["inputs", "targets", "neighbours"]
  found = step_flops(pod_step(config, layout, features=features))
  pairs = config.sequence_length * 2 * 2 * (2 * config.chunk_length)
  again = layers * 2 * config.num_heads * config.d_kv * pairs
  assert found == device_flops(work(config, layout, 4)) + again
