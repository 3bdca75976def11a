# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""INIT_EXPERTS = "copy" begins with the dense model (Komatsuzaki et al. 2022).

Each run below takes its first step with the rows of a dense run that begins
with the same weights, so both first losses are losses of one model.
"""

import numpy as np
import pytest

from tests import runs
from tests.cases import slow

EXPERTS = {
  "MLP": "experts",
  "NUM_EXPERTS": 4,
  "EXPERTS_PER_TOKEN": 2,
  "INIT_EXPERTS": "copy",
}
ACCELERATORS = {"TPU": "v4-8", "MESH_SHAPE": "data:2,model:2"}
BY_EXPERTS = "batch:data,heads:model,experts:model,vocab:model"


def train(corpus, model_dir, dense, **macros) -> int:
  """Takes one step from the weights of the run `dense`; returns the code."""
  settings = {
    "INIT_CHECKPOINT": str(dense),
    "VOCABULARY": str(dense / "vocabulary.model"),
    "LEARNING_RATE": 1e-9,  # so that one step changes almost nothing
    "LOG_STEPS": 1,
    "TRAIN_STEPS": 1,
    "GLOBAL_BATCH_SIZE": 8,
    "PROMPTS": [],
  }
  return runs.run("train", corpus, model_dir, **(settings | macros))


@pytest.fixture(scope="module", name="layers")
def two_layers(corpus, tmp_path_factory):
  """A dense run with two layers, which stages and variants need."""
  path = tmp_path_factory.mktemp("layers")
  settings = {"NUM_LAYERS": 2, "TRAIN_STEPS": 4, "PROMPTS": []}
  assert runs.run("train", corpus, path, **settings) == 0
  return path


@pytest.fixture(scope="module", name="losses")
def losses_of_dense(corpus, layers, tmp_path_factory):
  """The losses of a dense run that begins with the weights of `layers`."""
  path = tmp_path_factory.mktemp("dense")
  assert train(corpus, path, layers, NUM_LAYERS=2) == 0
  return runs.read_metrics(path)[0]


@pytest.mark.parametrize(
  "macros",
  [
    slow({}),  # commands/export_test.py has such a run, too
    slow({"MESH_SHAPE": "model:2", "LAYOUT": "experts:model"}),
    slow({"MESH_SHAPE": "data:2", "LAYOUT": "batch:data,d_model_stored:data"}),
    slow({"STAGES": 2, "NUM_MICROBATCHES": 2, "NUM_PODS": 2}),
    slow({**ACCELERATORS, "LAYOUT": BY_EXPERTS}),
    slow({**ACCELERATORS, "LAYOUT": "batch:data,d_ff:model", "STAGES": 2}),
    slow(
      {
        "LAYERS": "dense, sparse",
        "VARIANTS": {"dense": {"MLP": "swiglu"}, "sparse": {}},
      }
    ),
  ],
  ids=str,
)
def test_the_first_loss_is_that_of_the_dense_model(
  macros, corpus, layers, losses, tmp_path, monkeypatch
):
  """And after a step all weights but the routers are still those copies."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  given = {"NUM_LAYERS": 2, **EXPERTS, **macros}
  assert train(corpus, tmp_path, layers, **given) == 0
  metrics = runs.read_metrics(tmp_path)[0]
  for name in ("loss", "z_loss", "validation_loss"):
    assert metrics[name] == pytest.approx(losses[name], rel=1e-6), name
  dense = runs.read_tensors(layers, 4)
  found = runs.read_tensors(tmp_path, 1)
  slots = "momentum", "second_moment"
  weights = [x for x in found if not x.endswith(slots)]
  routers = [x for x in weights if "/router" in x]
  assert len(routers) == (2 if "LAYERS" in macros else 4)
  for name in {*weights} - {*routers}:
    expected = dense[name.replace("/experts/", "/")]
    copies = np.broadcast_to(expected, found[name].shape)
    np.testing.assert_allclose(found[name], copies, 1e-6, 1e-8, err_msg=name)


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    (
      {"INIT_CHECKPOINT": None},
      'INIT_EXPERTS = "copy": copies weights of a dense model, without its '
      "optimizer; name its checkpoint in INIT_CHECKPOINT, with INIT_STATE = ",
    ),
    ({"INIT_STATE": "all"}, 'INIT_EXPERTS = "copy": copies weights of a dense'),
    (
      {"MLP": "swiglu", "NUM_EXPERTS": None, "EXPERTS_PER_TOKEN": None},
      "INIT_EXPERTS = \"copy\" and MLP = 'swiglu': the model has no experts; "
      'leave INIT_EXPERTS out, or set MLP = "experts".',
    ),
    (
      {"SHARED_EXPERTS": 1},
      'INIT_EXPERTS = "copy" and SHARED_EXPERTS = 1: the model would not begin '
      "as the dense model; set SHARED_EXPERTS = None.",
    ),
    ({"ROUTER_NORMALIZES": False}, "; set ROUTER_NORMALIZES = True."),
    (
      {"EXPERTS_PER_TOKEN": 1},
      "EXPERTS_PER_TOKEN = 1 and ROUTER_NORMALIZES = True: the only score, "
      "divided by itself, is 1, so the router would get no gradient: such a "
      "model can be decoded, but not trained.",
    ),
    ({"ROUTER_SCALE": 2.5}, "; set ROUTER_SCALE = 1.0."),
    (
      {"D_EXPERT": 32},
      "layer_000/mlp/wi_gate [32, 64], the model wants [32, 32]; layer_000/mlp",
    ),
    ({"D_EXPERT": 32}, "it was trained with, and its D_FF as D_EXPERT."),
    (
      {"INIT_EXPERTS": "none"},
      ', or set INIT_EXPERTS = "copy" to begin with its MLPs.',
    ),
    ({"EXPERT_MLP": "relu"}, "EXPERT_MLP = 'relu': "),
    (
      {"EXPERT_MLP": "geglu"},
      " was trained with MLP = 'swiglu', which INIT_EXPERTS copies; use the "
      "same.",
    ),
    (
      {"NUM_LAYERS": 2, "LAYERS": "dense, sparse"}
      | {"VARIANTS": {"dense": {"MLP": "geglu"}, "sparse": {}}},
      "MLP = 'geglu' of layers without experts: ",
    ),
  ],
)
def test_what_cannot_begin_as_the_dense_model_is_refused_in_one_line(
  macros, message, corpus, finished, tmp_path, capsys
):
  assert train(corpus, tmp_path / "new", finished, **EXPERTS | macros) == 2
  line = capsys.readouterr().err.splitlines()[-1]
  assert message in line
  assert not (tmp_path / "new" / "checkpoints").exists()


@pytest.mark.slow
def test_experts_of_a_checkpoint_are_not_copied_but_read(
  corpus, finished, tmp_path, capsys
):
  sparse, next_run = tmp_path / "sparse", tmp_path / "next"
  assert train(corpus, sparse, finished, **EXPERTS) == 0
  given = {**EXPERTS, "VOCABULARY": str(finished / "vocabulary.model")}
  assert train(corpus, next_run, sparse, **given) == 2
  path = sparse / "checkpoints" / "step_00000001"
  line = capsys.readouterr().err.splitlines()[-1]
  assert f'"copy": {path} has experts already; leave INIT_EXPERTS out.' in line
  given["INIT_EXPERTS"] = "none"
  assert train(corpus, next_run, sparse, **given) == 0
  name = "layer_000/mlp/experts/wi"
  before, after = (runs.read_tensors(x, 1)[name] for x in (sparse, next_run))
  np.testing.assert_allclose(after, before, 1e-6, 1e-8)
