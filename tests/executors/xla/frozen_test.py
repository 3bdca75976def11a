# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FROZEN: what it matches keeps its bits; the rest trains as the oracle says.

On hosts and on virtual accelerators.
"""

import dataclasses
import fnmatch
import itertools
import math
import re

import jax
import numpy as np
import pytest

from palm_mtf.accounting.communication import sent_bytes
from palm_mtf.accounting.flops import device_flops
from palm_mtf.accounting.memory import device_bytes
from palm_mtf.compilation.hlo_text import CompiledText
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.executors.xla.executor import EXECUTOR
from tests import oracle, oracle_jax
from tests.blocks import SETTINGS
from tests.cases import slow
from tests.executors.xla.program_run import pod_step, train_on
from tests.mtf_testing import (
  NUM_STEPS,
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  oracle_slots,
  random_documents,
  relative_error,
  small_config,
)
from tests.settings import PALM_LOSS, work

LAYERS = 4
TPU = {"tpu": "v4-8", "mesh_shape": "data:2,model:2"}
STORED = "batch:data,d_model_stored:data,heads:model,d_ff:model,vocab:model"

# {claim: FROZEN}
PATTERNS = {
  "the embedding and all norms": ["embedding", "*norm/scale"],
  "only attention is trained": ["embedding", "*norm/scale", "layers/*/mlp/*"],
  "the embedding and the lowest layers": ["embedding", "layers/[01]/*"],
  "one layer in the middle": ["layers/2/*"],
  "parts of some layers": ["embedding", "layers/0/*", "layers/[12]/mlp/w*"],
  "all layers": ["layers/*"],
  "all but the last norm": ["embedding", "layers/*"],
}
MESHES = {
  "hosts": SINGLE,
  "hosts, split, microbatches": mesh_layout("PaLM's 2D", num_microbatches=2),
  "hosts, stages": dataclasses.replace(
    SINGLE, stages=2, num_microbatches=2, stage_order="1f1b"
  ),
  "accelerators": MeshLayout(**TPU, layout=STORED),
  "accelerators, microbatches": MeshLayout(
    **TPU, layout="batch:data,heads:model", num_microbatches=2
  ),
}
OPTIMIZERS = {
  "PaLM's": PALM_OPTIMIZER,
  "factored, clipped, stacked scale": dataclasses.replace(
    PALM_OPTIMIZER,
    second_moment="factored",
    gradient_clip=0.05,
    update_clip=0.5,
    parameter_scale="stacked",
  ),
}
STACKED = "factored, clipped, stacked scale"
PARTS = "parts of some layers"
LOWEST = "the embedding and the lowest layers"
# adapters_test.py also trains on accelerators without changing the base.
FAST = [(PARTS, "hosts, stages", 1, "PaLM's", "none")]
SLOW = [
  (LOWEST, "accelerators", 1, STACKED, "none"),
  *itertools.product([PARTS], MESHES, (1, 2), OPTIMIZERS, ("none", "layer")),
  *itertools.product(PATTERNS, MESHES, (1,), ["PaLM's"], ("none", "layer")),
]


def is_frozen(name, patterns):
  """Says what the documentation says, by other code than the product's."""
  shown = re.sub(r"^layer_0*(\d+)/", r"layers/\1/", name)
  return any(re.fullmatch(fnmatch.translate(x), shown) for x in patterns)


@pytest.mark.parametrize(
  ("patterns", "mesh", "num_pods", "optimizer", "remat"),
  [*FAST, *(slow(*x) for x in dict.fromkeys(SLOW) if x not in FAST)],
)
def test_steps_follow_the_oracle_which_knows_no_frozen_parameter(
  patterns, mesh, num_pods, optimizer, remat
):
  """Frozen parameters keep every bit, and have no slots."""
  frozen, optimizer = PATTERNS[patterns], OPTIMIZERS[optimizer]
  config = small_config(num_layers=LAYERS, remat=remat)
  params = oracle.random_parameters(config, seed=7)
  how = {"rows": random_documents, "params": params, "frozen": frozen}
  given = MESHES[mesh], num_pods, config, optimizer
  variables, metrics = train_on(*given, **how)

  first = params
  names = [x for x in params if not is_frozen(x, frozen)]
  assert 0 < len(names) < len(params)
  adafactor = oracle.Adafactor(optimizer, {x: params[x] for x in names})
  for step in range(NUM_STEPS):
    batch = random_documents(config, batch_size=8, seed=step)
    given = {**batch, "z_loss": PALM_LOSS.z_loss}
    loss, _, gradients = oracle_jax.loss_and_gradients(config, params, **given)
    trained = ({x: y[x] for x in names} for y in (params, gradients))
    stepped = adafactor.step(*trained)
    seen = metrics[step]
    assert seen["loss"] == pytest.approx(loss, rel=1e-5)
    assert seen["grad_norm"] == pytest.approx(adafactor.gradient_norm, rel=1e-4)
    for of, values in (("parameter", params), ("update", adafactor.updates)):
      kinds = {}
      for name in names:
        kind = re.sub(r".*?(embedding|norm|attention|mlp).*", r"\1", name)
        center = of == "parameter" and name.endswith("/scale")
        kinds.setdefault(kind, []).append(np.ravel(values[name] - center))
      for kind, arrays in kinds.items():
        rms = np.sqrt(np.mean(np.concatenate(arrays) ** 2))
        assert seen[f"{of}_rms/{kind}"] == pytest.approx(rms, rel=1e-3)
      found = {x for x in seen if x.startswith(f"{of}_rms/")}
      assert found == {f"{of}_rms/{kind}" for kind in kinds}
    params = params | stepped
  slots = oracle_slots(adafactor)
  assert variables.keys() == params.keys() | slots.keys()
  for name, value in {**params, **slots}.items():
    if name in first and name not in names:
      np.testing.assert_array_equal(variables[name], np.float32(first[name]))
    else:
      actual = variables[name].reshape(value.shape)
      assert relative_error(actual, value) < 1e-3, name


# Groups with a period of three layers and of one; FROZEN splits the first.
UNLIKE = {**SETTINGS["Cohere 2"], "layers": "2*(2*window, global), window"}
UNLIKE["num_layers"] = 7


@pytest.mark.parametrize(
  "frozen",
  [
    slow(["embedding", "layers/[01]/*", "layers/4/mlp/*"]),
    slow(["layers/3/*", "layers/6/*"]),
    slow(["embedding", "layers/*"]),
  ],
)
def test_unlike_layers_with_frozen_parts_train_as_on_hosts(frozen):
  config = small_config(**UNLIKE)
  how = {"params": oracle.random_parameters(config, seed=7), "frozen": frozen}
  meshes = MESHES["hosts"], MESHES["accelerators"]
  steps = (train_on(x, 1, config, **how) for x in meshes)
  (expected, metrics), (found, numbers) = steps
  assert expected.keys() == found.keys()
  for name, value in expected.items():
    assert relative_error(found[name], value) < 1e-4, name
  for one, other in zip(metrics, numbers, strict=True):
    assert other == pytest.approx(one, rel=1e-4)


MIXED = ("embedding", "layers/0/*", "layers/2/mlp/w*")


def make_step(frozen, mesh, remat="none"):
  """Returns the programs of a pod, after making its virtual devices."""
  EXECUTOR.open_here(mesh, num_pods=1)
  model = small_config(num_layers=LAYERS, remat=remat)
  return pod_step(model, mesh, dcn_dtype="bfloat16", frozen=frozen)


def check_bytes(made, given):
  """Checks what a pod keeps and sends; `given` is its work."""
  state = made.abstract_state(made.model.placement.make_mesh(jax.devices()[:4]))
  kept = {True: 0, False: 0}
  for name, x in state.items():
    num_bytes = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    kept[name in made.model.reads] += num_bytes
  planned = device_bytes(given)
  assert kept[True] == planned.weights + planned.frozen_weights
  assert kept[False] == planned.slots
  cuts = itertools.chain(*made.cut_parts(made.parameters, 4))
  sent = sum(x.stop - x.start for x in cuts)
  assert 2 * sent == sum(sent_bytes(given).values())


@pytest.mark.parametrize("mesh", ["accelerators", "accelerators, microbatches"])
@pytest.mark.parametrize("frozen", [(), MIXED])
def test_accelerators_keep_and_send_the_bytes_of_the_plan(mesh, frozen):
  config, layout = small_config(num_layers=LAYERS), MESHES[mesh]
  pods = PodsConfig(dcn_dtype="bfloat16")
  given = work(config, layout, pods=pods, frozen=frozen)
  check_bytes(make_step(frozen, layout), given)


def dims_of(shape):
  return [int(x) for x in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if x]


def dot_flops(text, computation, times=1):
  """Returns the FLOPs of a compiled program's products, in its loops too."""
  flops, instructions = 0, text._computations[computation]
  for each in instructions.values():
    if each.opcode == "dot":
      (left, _), whole = each.operands, math.prod(dims_of(each.shape))
      summed = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", each.rest)[1]
      sizes = dims_of(instructions[left].shape)
      sizes = [sizes[int(i)] for i in summed.split(",")]
      flops += times * 2 * whole * math.prod(sizes)
    elif each.opcode == "while":
      rounds = times * text._count_rounds(computation, each)
      flops += dot_flops(text, each.attribute("body"), rounds)
    elif each.opcode in ("fusion", "call"):
      name = "calls" if each.opcode == "fusion" else "to_apply"
      flops += dot_flops(text, each.attribute(name), times)
  return flops


def step_flops(made):
  """Returns the FLOPs of the products in a compiled step of four devices."""
  mesh = made.model.placement.make_mesh(jax.devices()[:4])
  state = made.split(made.abstract_state(mesh))
  given = *state, made.abstract_batch(mesh), made.abstract_numbers(mesh)
  text = CompiledText(made.step(mesh).lower(*given).compile().as_text())
  return dot_flops(text, text._entry)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("frozen", "remat"),
  [
    (x, y)
    for x in ((), MIXED, *map(tuple, PATTERNS.values()))
    for y in ("none", "layer")
  ],
)
def test_a_compiled_step_multiplies_as_often_as_planned(frozen, remat):
  """The backward pass ends early, without gradients of frozen kernels."""
  layout = MeshLayout(tpu="v4-8", mesh_shape="data:4", layout="batch:data")
  made = make_step(frozen, layout, remat)
  config = small_config(num_layers=LAYERS, remat=remat)
  planned = device_flops(work(config, layout, 4, frozen=frozen))
  assert step_flops(made) == planned
