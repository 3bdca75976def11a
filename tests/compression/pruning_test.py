# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that begin with a pruned model, and keep its zeros.

Smaller models keep the heads and channels with the highest scores.
"""

import json
import types

import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.compression.pruning import check_pruning, prune
from palm_mtf.errors import UserError
from tests import oracle, runs
from tests.blocks import SETTINGS as BLOCKS
from tests.cases import slow
from tests.mtf_testing import random_tokens, small_config

SETTINGS = {
  "PRUNE": "magnitude",
  "SPARSITY": 0.5,
  "KEEP_ZEROS": True,
  "PROMPTS": [],
  "LOG_STEPS": 1,
}
KERNELS = ("/q", "/k", "/v", "/o", "/wi", "/wi_gate", "/wo")


def train(corpus, model_dir, dense, **macros) -> int:
  """Trains a pruned form of the run `dense`; returns the exit code."""
  vocabulary = str(dense / "vocabulary.model")
  given = {"INIT_CHECKPOINT": str(dense), "VOCABULARY": vocabulary}
  return runs.run("train", corpus, model_dir, **(given | SETTINGS | macros))


def read_zeros(model_dir, step):
  """Returns {kernel of a layer: which weights are 0}."""
  tensors = runs.read_tensors(model_dir, step)
  return {x: y == 0 for x, y in tensors.items() if x.endswith(KERNELS)}


def test_a_run_begins_with_the_pruned_model_and_keeps_its_zeros(
  corpus, finished, tmp_path, capsys
):
  """Half of each kernel, the smallest weights; all other tensors train."""
  assert train(corpus, tmp_path, finished, TRAIN_STEPS=2) == 0
  before, after = (
    runs.read_tensors(*x) for x in ((finished, 12), (tmp_path, 2))
  )
  zeros = read_zeros(tmp_path, 2)
  assert len(zeros) == 7
  for name, found in zeros.items():
    order = np.argsort(np.abs(before[name]), axis=None)
    expected = np.zeros(found.size, bool)
    expected[order[: found.size // 2]] = True
    np.testing.assert_array_equal(found.ravel(), expected, err_msg=name)
  assert (after["embedding"] != 0).mean() > 0.9
  manifest = tmp_path / "checkpoints" / "step_00000002" / "manifest.json"
  origin = json.loads(manifest.read_text())["origin"]
  assert origin["kind"] == "pruned"
  assert origin["checkpoint"].startswith(str(finished))
  assert train(corpus, tmp_path, finished, KEEP_ZEROS=False) == 2
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("palm_mtf: KEEP_ZEROS = False: ")
  assert "was written with True; keep that value, or start a new opt" in line


@pytest.fixture(scope="module", name="dense")
def two_layers(corpus, tmp_path_factory):
  """A dense run with two layers, which stages need."""
  path = tmp_path_factory.mktemp("dense")
  settings = {"NUM_LAYERS": 2, "TRAIN_STEPS": 4, "PROMPTS": []}
  assert runs.run("train", corpus, path, **settings) == 0
  return path


@pytest.fixture(scope="module", name="pruned")
def pruned_by_wanda(corpus, dense, tmp_path_factory):
  """A run whose only step changes nothing after pruning."""
  path = tmp_path_factory.mktemp("pruned")
  still = {"TRAIN_STEPS": 1, "LEARNING_RATE": 0.0}
  given = {"PRUNE": "wanda", "NUM_LAYERS": 2, "SPARSITY": "2:4"}
  assert train(corpus, path, dense, **given, **still) == 0
  return path


@pytest.mark.parametrize(
  "macros",
  [
    slow({}),
    slow(
      {
        "OPTIMIZER": "muon",
        "MOMENTUM": 0.95,
        "BETA2": 0.95,
        "WEIGHT_DECAY": 0.1,
      }
    ),
    slow({"MESH_SHAPE": "data:2,model:2", "LAYOUT": "batch:data,d_ff:model"}),
    slow({"STAGES": 2, "NUM_MICROBATCHES": 2, "NUM_PODS": 2}),
    slow({"NUM_PODS": 2, "PODS": "local_servers"}),
    slow(
      {
        "TPU": "v4-8",
        "MESH_SHAPE": "data:2,model:2",
        "LAYOUT": "batch:data,d_ff:model",
      }
    ),
  ],
  ids=str,
)
def test_zeros_are_the_same_after_20_steps_in_any_layout(
  macros, corpus, dense, pruned, tmp_path, monkeypatch
):
  """Wanda's two of four inputs; other weights train."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  given = {"PRUNE": "wanda", "NUM_LAYERS": 2, "SPARSITY": "2:4"}
  given |= {"TRAIN_STEPS": 20, "GLOBAL_BATCH_SIZE": 8}
  assert train(corpus, tmp_path, dense, **given, **macros) == 0
  expected, found = read_zeros(pruned, 1), read_zeros(tmp_path, 20)
  runs.assert_same(found, expected)
  for name, zeros in found.items():
    rows = 2 if name.endswith("/o") else 1  # dimensions of inputs
    matrix = zeros.reshape(np.prod(zeros.shape[:rows]), -1).T
    counts = matrix.reshape(len(matrix), -1, 4).sum(-1)
    np.testing.assert_array_equal(counts, 2, err_msg=name)
  before, after = (runs.read_tensors(*x) for x in ((pruned, 1), (tmp_path, 20)))
  for name in found:
    assert (before[name] != after[name]).any()


@pytest.mark.slow
def test_a_pruned_run_resumes_to_the_same_bits(corpus, dense, tmp_path):
  given = {"NUM_LAYERS": 2, "TRAIN_STEPS": 8}
  assert train(corpus, tmp_path / "whole", dense, **given) == 0
  resumed = runs.copy_until(tmp_path / "whole", tmp_path / "resumed", 4)
  assert train(corpus, resumed, dense, **given) == 0
  runs.assert_same_tensors(tmp_path / "whole", resumed, 8)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_exports_and_imports_have_the_zeros_and_train_with_them(
  form, corpus, pruned, tmp_path
):
  """A model that was imported has its mask in its weights, too."""
  output = tmp_path / ("model.gguf" if form == "gguf" else "model")
  flags = ["--model_dir", str(pruned), f"--format={form}"]
  assert main(["export", *flags, "--output", str(output)]) == 0
  imported = tmp_path / "imported"
  assert main(["import", str(output), "--output", str(imported)]) == 0
  given = {"PRUNE": "none", "SPARSITY": None, "NUM_LAYERS": 2, "TRAIN_STEPS": 3}
  names = "vocabulary.model", "tokenizer.json"
  (vocabulary,) = [x for x in imported.iterdir() if x.name in names]
  given["VOCABULARY"] = str(vocabulary)
  assert train(corpus, tmp_path / "run", imported, **given) == 0
  runs.assert_same(read_zeros(tmp_path / "run", 3), read_zeros(pruned, 1))


@pytest.mark.slow
def test_a_warning_says_that_training_changes_the_zeros(
  corpus, dense, pruned, tmp_path, capsys
):
  given = {"PRUNE": "none", "SPARSITY": None, "KEEP_ZEROS": False}
  given |= {"VOCABULARY": str(dense / "vocabulary.model")}
  given |= {"NUM_LAYERS": 2, "TRAIN_STEPS": 3}
  assert train(corpus, tmp_path, pruned, **given) == 0
  log = capsys.readouterr().err
  assert f"KEEP_ZEROS = False: {pruned}/checkpoints/step_00000001 is pr" in log
  zeros = read_zeros(tmp_path, 3)
  assert all(x.mean() < 0.1 for x in zeros.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_a_smaller_model_trains_as_an_ordinary_one(
  method, corpus, dense, tmp_path
):
  """It has the shapes of its settings, and weights of the larger model."""
  small = {"NUM_LAYERS": 2, "NUM_HEADS": 1, "D_FF": 24, "SPARSITY": None}
  given = {**small, "PRUNE": method, "TRAIN_STEPS": 1, "LEARNING_RATE": 0.0}
  assert train(corpus, tmp_path, dense, **given, KEEP_ZEROS=False) == 0
  before, after = (runs.read_tensors(*x) for x in ((dense, 4), (tmp_path, 1)))
  for layer in ("layer_000", "layer_001"):
    old, new = (x[f"{layer}/mlp/wo"] for x in (before, after))
    assert new.shape == (24, 32)
    rows = [int(np.flatnonzero((old == x).all(1))[0]) for x in new]
    assert rows == sorted(set(rows))
    wi = before[f"{layer}/mlp/wi"][:, rows]
    np.testing.assert_array_equal(after[f"{layer}/mlp/wi"], wi)
    if method == "magnitude":
      best = np.argsort(-np.square(old, dtype=float).sum(1), kind="stable")
      assert rows == sorted(best[:24])


RUN = types.SimpleNamespace(prune="magnitude", sparsity=None)
# {block: settings of the smaller model}. The larger one has 4 heads, 2 of a key
# head, and 10 channels.
SMALLER = {
  "PaLM": dict(num_heads=2, d_ff=7),
  "GPT-2": dict(num_heads=3, d_ff=4),
  "LLaMA 3": dict(num_heads=2, num_kv_heads=1, d_ff=6),
  "Qwen 3": dict(num_heads=2, num_kv_heads=2),
  "Mistral": dict(num_heads=1, num_kv_heads=1),
}
SIZES = dict(num_heads=4, d_ff=10)


def config_of(block, **changes):
  """Returns the settings of a small model of a block."""
  return small_config(**{**BLOCKS.get(block, {}), **SIZES, **changes})


def smaller(block, params, statistics=None):
  """Returns the model with the sizes of SMALLER, and its pruned parameters."""
  dense, model = config_of(block), config_of(block, **SMALLER[block])
  config = types.SimpleNamespace(model=model, run=RUN)
  found = prune(config, dense, params.__getitem__, statistics or {})
  return model, params | found


@pytest.mark.parametrize("block", SMALLER)
def test_heads_and_channels_that_add_nothing_leave_the_loss_as_it_was(block):
  """Other heads and channels of each layer are 0 in o and wo, at random."""
  dense, sizes = config_of(block), SIZES | SMALLER[block]
  params = oracle.random_parameters(dense, seed=3)
  rng = np.random.default_rng(4)
  for name, value in params.items():
    if name.endswith("/wo"):
      value[rng.permutation(10)[sizes["d_ff"] :]] = 0.0
    if name.endswith("/o"):
      groups = value.reshape(dense.num_kv_heads or 1, -1, *value.shape[1:])
      num_groups = sizes.get("num_kv_heads", 1)
      groups[rng.permutation(len(groups))[num_groups:]] = 0.0
      for group in groups:  # a view of the kernel
        count = sizes["num_heads"] // num_groups
        group[rng.permutation(len(group))[count:]] = 0.0
  batch = random_tokens(dense, batch_size=2, seed=5)
  expected, *_ = oracle.loss(dense, params, **batch, z_loss=0.0)
  model, found = smaller(block, params)
  shapes = {x: y.shape for x, y in found.items()}
  assert shapes == oracle.parameter_shapes(model)
  actual, *_ = oracle.loss(model, found, **batch, z_loss=0.0)
  assert actual == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
  "setting", [{"positions": "alibi"}, {"qk_norm": "rms_norm_all_heads"}]
)
def test_heads_that_depend_on_all_heads_are_not_removed(setting):
  """ALiBi's slopes do, and a norm of all heads together (OLMoE)."""
  model, optimizer = config_of("PaLM", **setting, num_heads=2), None
  config = types.SimpleNamespace(model=model, run=RUN, optimizer=optimizer)
  with pytest.raises(UserError, match="joins heads; keep NUM_HEADS = 4"):
    check_pruning(config, config_of("PaLM", **setting))


def test_wanda_keeps_the_channels_that_add_most_to_the_stream():
  """Their sum of squares is the score where inputs are uncorrelated."""
  dense = config_of("PaLM")
  params = oracle.random_parameters(dense, seed=3)
  x = np.diag(np.random.default_rng(6).lognormal(size=10))
  of = {"layer_000/mlp/wo": x, "layer_001/mlp/wo": x[::-1, ::-1]}
  heads = [dense.num_heads * dense.d_kv]
  statistics = {
    x: types.SimpleNamespace(sums=np.ones(heads)) for x in params if "/o" in x
  } | {x: types.SimpleNamespace(sums=(y**2).sum(0)) for x, y in of.items()}
  _, found = smaller("PaLM", params, statistics)
  for name, inputs in of.items():
    added = [
      np.sum(np.outer(inputs[:, i], params[name][i]) ** 2) for i in range(10)
    ]
    kept = sorted(np.argsort(added)[-7:])
    np.testing.assert_array_equal(found[name], params[name][kept])
    wi = name.replace("/wo", "/wi")
    np.testing.assert_array_equal(found[wi], params[wi][:, kept])


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    slow(
      {"INIT_CHECKPOINT": None}, "PRUNE = 'magnitude': prunes the weights of"
    ),
    slow(
      {"PRUNE": "none"}, "SPARSITY = 0.5: needs a way to choose weights; set "
    ),
    slow(
      {"SPARSITY": 1.0}, "SPARSITY = 1.0: give a number from 0.01 to 0.99, or"
    ),
    slow(
      {"SPARSITY": "4:8"}, "SPARSITY = '4:8': give a number from 0.01 to 0.9"
    ),
    slow(
      {"KEEP_ZEROS": False}, "training would change the zeros; set KEEP_ZEROS"
    ),
    slow(
      {"SPARSITY": None}, "set SPARSITY = 0.5, or lower one of NUM_HEADS, NUM"
    ),
    ({"D_FF": 32}, "set SPARSITY = None, or keep NUM_HEADS, NUM_KV_HEADS and"),
    ({"D_FF": 65}, "give at most the NUM_HEADS, NUM_KV_HEADS and D_FF of"),
    slow(
      {"ADAPTER": "lora", "ADAPTER_RANK": 2, "ADAPTER_ALPHA": 2.0},
      'adapt in the next run; set ADAPTER = "none".',
    ),
    slow({"D_MODEL": 16}, "the model wants [320, 16]"),
    slow(
      {"PRUNE": "sparsegpt", "SPARSITY": None, "NUM_HEADS": 1},
      'no heads and channels are chosen so; set PRUNE = "wanda".',
    ),
  ],
  ids=str,
)
def test_wrong_settings_are_refused_in_one_line(
  macros, message, corpus, finished, tmp_path, capsys
):
  assert train(corpus, tmp_path / "new", finished, **macros) == 2
  *_, line = capsys.readouterr().err.splitlines()
  assert line.startswith("palm_mtf: ")
  assert message in line
  assert not (tmp_path / "new" / "checkpoints").exists()
