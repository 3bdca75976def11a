# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FROZEN: what it matches keeps its bits; the rest trains as the oracle says.

On hosts and on virtual accelerators.
"""

import dataclasses
import fnmatch
import itertools
import re

import numpy as np
import pytest

from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.programs.train_program import build_train_program
from tests import oracle, oracle_jax
from tests.executors.xla.program_run import build_on_accelerators
from tests.mtf_testing import (
  NUM_STEPS,
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  oracle_slots,
  random_documents,
  relative_error,
  small_config,
  train,
)

LAYERS = 4
TWO_PODS = PodsConfig(num_pods=2, dcn_dtype="float32")
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
FAST = [
  (PARTS, "hosts, split, microbatches", 2, STACKED, "none"),
  (PARTS, "accelerators, microbatches", 2, STACKED, "none"),
  ("only attention is trained", "hosts", 1, "PaLM's", "layer"),
  ("the embedding and the lowest layers", "hosts, stages", 1, "PaLM's", "none"),
]
SLOW = [
  *itertools.product([PARTS], MESHES, (1, 2), OPTIMIZERS, ("none", "layer")),
  *itertools.product(PATTERNS, MESHES, (1,), ["PaLM's"], ("none", "layer")),
]


def is_frozen(name, patterns):
  """Says what the documentation says, by other code than the product's."""
  shown = re.sub(r"^layer_0*(\d+)/", r"layers/\1/", name)
  return any(re.fullmatch(fnmatch.translate(x), shown) for x in patterns)


@pytest.mark.parametrize(
  ("patterns", "mesh", "num_pods", "optimizer", "remat"),
  [
    *FAST,
    *(
      pytest.param(*x, marks=pytest.mark.slow)
      for x in dict.fromkeys(SLOW)
      if x not in FAST
    ),
  ],
)
def test_steps_follow_the_oracle_which_knows_no_frozen_parameter(
  patterns, mesh, num_pods, optimizer, remat
):
  """Frozen parameters keep every bit, and have no slots."""
  frozen, optimizer, layout = (
    PATTERNS[patterns],
    OPTIMIZERS[optimizer],
    MESHES[mesh],
  )
  config = small_config(num_layers=LAYERS, remat=remat)
  params = oracle.random_parameters(config, seed=7)
  variables, metrics = train(
    config,
    optimizer,
    rows=random_documents,
    mesh=layout,
    params=params,
    pods=dataclasses.replace(TWO_PODS, num_pods=num_pods),
    frozen=frozen,
    build=build_on_accelerators if layout.tpu else build_train_program,
    batch_size=8,
  )

  first = params
  names = [x for x in params if not is_frozen(x, frozen)]
  assert 0 < len(names) < len(params)
  adafactor = oracle.Adafactor(optimizer, {x: params[x] for x in names})
  for step in range(NUM_STEPS):
    batch = random_documents(config, batch_size=8, seed=step)
    loss, _, gradients = oracle_jax.loss_and_gradients(
      config, params, **batch, z_loss=optimizer.z_loss
    )
    stepped = adafactor.step(
      {x: params[x] for x in names}, {x: gradients[x] for x in names}
    )
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
      assert {x for x in seen if x.startswith(f"{of}_rms/")} == {
        f"{of}_rms/{kind}" for kind in kinds
      }
    params = params | stepped
  slots = oracle_slots(adafactor)
  assert variables.keys() == params.keys() | slots.keys()
  for name, value in {**params, **slots}.items():
    if name in first and name not in names:
      np.testing.assert_array_equal(variables[name], np.float32(first[name]))
    else:
      actual = variables[name].reshape(value.shape)
      assert relative_error(actual, value) < 1e-3, name
