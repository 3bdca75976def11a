# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose pods exchange parameters seldom."""

import os
import pathlib
import shutil
import signal

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import newest_whole
from tests import runs
from tests.processes import wait_until

SETTINGS = {
  "NUM_LAYERS": 2,
  "GLOBAL_BATCH_SIZE": 8,
  "TRAIN_STEPS": 8,
  "CHECKPOINT_STEPS": 4,
  "EVAL_STEPS": 4,
  "LOG_STEPS": 1,
  "PROMPTS": [],
}
DILOCO = {"EXCHANGE": "diloco", "OUTER_STEPS": 4}
TWO = {**DILOCO, "NUM_PODS": 2}
# Fragments are on their way in every second step.
STREAMING = {
  **TWO,
  "FRAGMENTS": 2,
  "OVERLAP_STEPS": 1,
  "MERGE_ALPHA": 0.5,
  "OUTER_DTYPE": "e3m0",
  "CHECKPOINT_STEPS": 2,
}
PLAIN = {"OUTER_LR": 1.0, "OUTER_MOMENTUM": 0.0}
ADAMW = {
  "OPTIMIZER": "adamw",
  "BETA2": 0.95,
  "WEIGHT_DECAY": 0.1,
  "LEARNING_RATE_SCHEDULE": "constant",
}
SGD = {
  "OPTIMIZER": "sgd",
  "BETA1": 0.0,
  "LEARNING_RATE": 0.1,
  "LEARNING_RATE_SCHEDULE": "constant",
  "GRADIENT_CLIP": 1e9,  # each pod clips by the norm of its own gradients
}
VIRTUAL_TPU = {
  "TPU": "v4-8",
  "MESH_SHAPE": "data:2,model:2",
  "LAYOUT": "batch:data,heads:model,d_ff:model,vocab:model",
}


def train(corpus, model_dir, **macros) -> pathlib.Path:
  assert runs.run("train", corpus, model_dir, **(SETTINGS | macros)) == 0
  return model_dir


def call(*arguments) -> None:
  assert runs.main([str(x) for x in arguments]) == 0


def losses(model_dir):
  return [runs.without_times(x) for x in runs.read_metrics(model_dir)]


@pytest.fixture(scope="module", name="streamed")
def streaming_run(corpus, tmp_path_factory):
  """A run with STREAMING, which has a checkpoint of every second step."""
  return train(corpus, tmp_path_factory.mktemp("streamed"), **STREAMING)


@pytest.mark.slow
@pytest.mark.parametrize(
  "macros",
  [{}, ADAMW, {**ADAMW, "NUM_MICROBATCHES": 2, "DROPOUT": 0.1}, VIRTUAL_TPU],
  ids=str,
)
def test_one_pod_that_takes_its_own_parameters_trains_as_ever(
  macros, corpus, tmp_path, monkeypatch
):
  """Outer rate 1 and momentum 0 change no bit of parameters and slots."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  plain = runs.read_tensors(train(corpus, tmp_path / "a", **macros), 8)
  macros = {**macros, **DILOCO, **PLAIN}
  found = runs.read_tensors(train(corpus, tmp_path / "b", **macros), 8)
  own = {name: found[f"pods/0/{name}"] for name in plain}
  runs.assert_same(plain, own)
  runs.assert_same(
    {x: y for x, y in plain.items() if x in found},
    {x: y for x, y in found.items() if x in plain},
  )
  assert {*found} & {*plain}
  assert (
    losses(tmp_path / "a")[-1]["loss"] == losses(tmp_path / "b")[-1]["loss"]
  )


@pytest.mark.slow
@pytest.mark.parametrize("macros", [{}, {"DROPOUT": 0.1}], ids=str)
def test_a_sync_after_each_step_of_sgd_is_a_step_by_all_pods_gradients(
  macros, corpus, tmp_path
):
  """To 1e-6, because the sums are in another order; pods drop other units."""
  macros = {**SGD, "NUM_PODS": 2, **macros}
  plain = runs.read_tensors(train(corpus, tmp_path / "a", **macros), 8)
  macros = {**macros, **DILOCO, **PLAIN, "OUTER_STEPS": 1}
  found = runs.read_tensors(train(corpus, tmp_path / "b", **macros), 8)
  for name, value in plain.items():
    np.testing.assert_allclose(found[name], value, 1e-5, 1e-6, err_msg=name)
  one, other = (losses(tmp_path / x)[-1] for x in "ab")
  assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
  assert other["validation_loss"] == pytest.approx(one["validation_loss"])


@pytest.mark.slow
def test_pods_are_equal_after_a_sync_and_have_their_own_slots(corpus, tmp_path):
  found = runs.read_tensors(train(corpus, tmp_path, **TWO), 8)
  parameters = [x for x in found if f"{x}/outer_momentum" in found]
  assert len(parameters) == 18
  for name in parameters:
    for pod in (0, 1):
      np.testing.assert_array_equal(found[f"pods/{pod}/{name}"], found[name])
  first, second = (found[f"pods/{x}/layer_000/mlp/wi/momentum"] for x in (0, 1))
  assert (first != second).any()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_killed_run_resumes_to_the_same_bits(
  step, corpus, streamed, tmp_path
):
  """It was killed in the next steps, or while it wrote the next checkpoint."""
  killed = tmp_path / "run"
  shutil.copytree(streamed, killed)
  folder = killed / "checkpoints"
  for path in folder.iterdir():
    if path.name > f"step_{step:08d}":
      path.rename(folder / f"partial_{path.name}")
  for path in sorted(folder.glob("partial_*"))[1:]:
    shutil.rmtree(path)
  train(corpus, killed, **STREAMING)
  runs.assert_same_tensors(streamed, killed, 8)
  assert losses(killed) == losses(streamed)


@pytest.mark.slow
def test_a_signal_between_syncs_saves_what_pods_hold(corpus, tmp_path):
  """Never while a fragment is on its way; the run resumes to the same bits."""
  given = {**STREAMING, "OUTER_STEPS": 8, "OVERLAP_STEPS": 2}
  long = dict.fromkeys(["TRAIN_STEPS", "CHECKPOINT_STEPS"], 100_000)
  long |= {**given, **SETTINGS, **long, "EVAL_STEPS": 100_000}
  stopped, once = tmp_path / "a", tmp_path / "b"
  process = runs.start("train", corpus, stopped, **long)
  try:
    wait_until(
      lambda: (
        (stopped / "metrics.jsonl").exists()
        and len(runs.read_metrics(stopped)) > 4
      ),
      process,
    )
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
  finally:
    if process.poll() is None:
      process.kill()
  assert process.returncode == 128 + signal.SIGTERM
  step = newest_whole(str(stopped)).manifest.step
  assert step % 4 in (0, 1)  # 4 steps from sync to sync, and 2 of overlap
  until = step + 16 - step % 8
  for path in (stopped, once):
    train(corpus, path, **(long | {"TRAIN_STEPS": until}))
  runs.assert_same_tensors(stopped, once, until)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("macros", "tolerance"),
  [
    ({"PODS": "local_servers"}, 0),
    # Sums over devices are in another order, and e3m0 would make it visible.
    ({"MESH_SHAPE": "data:2", "LAYOUT": "batch:data"}, 1e-5),
    (
      {
        "MESH_SHAPE": "data:2,model:2",
        "LAYOUT": "batch:data,d_model_stored:data,d_ff:model,vocab:model",
      },
      1e-5,
    ),
    ({"STAGES": 2, "NUM_MICROBATCHES": 2}, 1e-5),
    (VIRTUAL_TPU, 1e-5),
    ({**VIRTUAL_TPU, "STAGES": 2, "NUM_MICROBATCHES": 2}, 1e-5),
  ],
  ids=str,
)
def test_layouts_servers_and_accelerators_take_the_same_steps(
  macros, tolerance, corpus, tmp_path
):
  """In processes, because JAX makes virtual devices once per process."""
  given = {**SETTINGS, **STREAMING, "OUTER_DTYPE": "float32"}
  found = []
  for folder, more in (("a", {}), ("b", macros)):
    os.environ["JAX_PLATFORMS"] = "cpu"
    started = runs.start("train", corpus, tmp_path / folder, **given, **more)
    runs.finish(started)
    found.append(runs.read_tensors(tmp_path / folder, 8))
  one, other = found
  assert one.keys() == other.keys()
  for name, value in one.items():
    np.testing.assert_allclose(other[name], value, tolerance, tolerance, name)


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_pods(corpus, tmp_path):
  """New pods begin with the state of other pods; fewer pods drop states."""
  train(corpus, tmp_path, **TWO, TRAIN_STEPS=4)
  for num_pods, step in ((4, 8), (1, 12)):
    given = {**DILOCO, "NUM_PODS": num_pods, "TRAIN_STEPS": step}
    train(corpus, tmp_path, **given)
    found = runs.read_tensors(tmp_path, step)
    name = "layer_001/mlp/wi"
    assert sum(x.endswith(f"/{name}") for x in found) == num_pods
  assert losses(tmp_path)[-1]["loss"] < losses(tmp_path)[0]["loss"]


@pytest.mark.slow
def test_commands_read_the_outer_parameters(corpus, streamed, tmp_path, capsys):
  """Its pods differ, as they keep half of their own parameters at a sync."""
  found = runs.read_tensors(streamed, 8)
  assert (found["pods/0/embedding"] != found["pods/1/embedding"]).any()
  path = str(streamed)
  given = ["--model_dir", path]
  (line,) = runs.printed("evaluate", *given, "--json")
  expected = losses(streamed)[-1]["validation_loss"]
  assert line["validation_loss"] == pytest.approx(expected, rel=1e-6)
  output = tmp_path / "arrays"
  call("export", *given, "--format=npz", "--output", output)
  (file,) = output.glob("*.npz")
  with np.load(file) as exported:
    for name in ("embedding", "layer_001/mlp/wi"):
      np.testing.assert_array_equal(exported[name], found[name])
  call("checkpoints", "verify", path)
  call("lineage", path)
  call("generate", *given, "--prompt", "one two")
  # A run from its weights begins with the outer parameters.
  begun = {"INIT_CHECKPOINT": path, "LEARNING_RATE": 0.0, "TRAIN_STEPS": 4}
  begun |= {"VOCABULARY": f"{path}/vocabulary.model"}
  train(corpus, tmp_path / "next", **begun)
  after = runs.read_tensors(tmp_path / "next", 4)
  np.testing.assert_array_equal(after["embedding"], found["embedding"])
  capsys.readouterr()
  state = {**begun, "INIT_STATE": "all", "TRAIN_STEPS": 12}
  given = SETTINGS | state
  assert runs.run("train", corpus, tmp_path / "all", **given) == 2
  assert "each pod of that run has its own optimizer" in capsys.readouterr().err
  given = SETTINGS | {"TRAIN_STEPS": 12}
  assert runs.run("train", corpus, streamed, **given) == 2
  said = capsys.readouterr().err
  assert "EXCHANGE = 'gradients': " in said and "keep that value" in said


@pytest.mark.slow
@pytest.mark.parametrize(
  "macros",
  [
    {"FROZEN": ["embedding"]},
    {"ADAPTER": "lora", "ADAPTER_RANK": 2, "ADAPTER_ALPHA": 4},
    {"PRUNE": "magnitude", "SPARSITY": 0.5, "KEEP_ZEROS": True},
  ],
  ids=str,
)
def test_what_is_not_trained_stays_and_zeros_stay_zeros(
  macros, corpus, finished, tmp_path
):
  """Frozen parameters, an adapter's base, and pruned weights, in 4 bits."""
  given = {**STREAMING, **macros, "FRAGMENTS": 1, "CHECKPOINT_STEPS": 4}
  given |= {"INIT_CHECKPOINT": str(finished), "NUM_LAYERS": 1}
  given |= {"VOCABULARY": str(finished / "vocabulary.model")}
  train(corpus, tmp_path, **given)
  found = runs.read_tensors(tmp_path, 8)
  if "FROZEN" in macros:
    before = runs.read_tensors(finished, 12)
    np.testing.assert_array_equal(found["embedding"], before["embedding"])
    assert "pods/0/embedding" not in found
  elif "ADAPTER" in macros:
    assert "embedding" not in found
    assert any(x.endswith("lora_b/outer_momentum") for x in found)
  else:
    kernel = found["layer_000/mlp/wi"]
    assert 0.4 < (kernel == 0).mean() < 0.6
    assert ((found["pods/1/layer_000/mlp/wi"] == 0) == (kernel == 0)).all()


@pytest.mark.slow
def test_loads_of_experts_are_the_mean_of_the_pods(corpus, tmp_path):
  """They are measured, so that momentum and 4 bits do not change them."""
  experts = {"MLP": "experts", "NUM_EXPERTS": 4, "EXPERTS_PER_TOKEN": 2}
  experts |= {"ROUTER": "sigmoid", "ROUTER_BIAS": True}
  given = {**TWO, **experts, "OUTER_DTYPE": "e3m0", "MERGE_ALPHA": 1.0}
  train(corpus, tmp_path, **given)
  found = runs.read_tensors(tmp_path, 8)
  states = [x for x in found if x.startswith("layer_") and "/router_" in x]
  states = [x for x in states if not x.endswith("momentum")]
  assert states
  for name in states:
    if f"{name}/outer_momentum" in found:
      both = [found[f"pods/{x}/{name}"] for x in (0, 1)]
      np.testing.assert_array_equal(found[name], sum(both) / 2)


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    (
      {"FRAGMENTS": 3},
      "OUTER_STEPS = 4 and FRAGMENTS = 3: fragments take turns of equal "
      "length; give a multiple of FRAGMENTS, such as OUTER_STEPS = 6.",
    ),
    (
      {"FRAGMENTS": 4, "NUM_LAYERS": 6},
      "NUM_LAYERS = 6 and FRAGMENTS = 4: all fragments have equally many "
      "layers; give a divisor of NUM_LAYERS, such as 3.",
    ),
    (
      {"FRAGMENTS": 2, "OVERLAP_STEPS": 2},
      "OVERLAP_STEPS = 2: the next fragment is sent after 2 steps (OUTER_STEPS "
      "/ FRAGMENTS); give at most 1.",
    ),
    (
      {"GLOBAL_BATCH_SIZE": [[0, 4], [6, 8]]},
      'GLOBAL_BATCH_SIZE from step 6 and EXCHANGE = "diloco": pods differ '
      "inside a round of syncs; give a multiple of 4, such as 8.",
    ),
    (
      {"EXCHANGE": "gradients", "OUTER_DTYPE": "int8"},
      "OUTER_STEPS = 4, OUTER_DTYPE = 'int8' and EXCHANGE = \"gradients\": has "
      'no effect; leave it out, or set EXCHANGE = "diloco".',
    ),
    (
      {**VIRTUAL_TPU, "NUM_PODS": 1, "STEPS_PER_LOOP": 10},
      "and STEPS_PER_LOOP = 10: a call of several steps could run beyond a ",
    ),
    (
      {"CHECKPOINT_STEPS": 6},
      'CHECKPOINT_STEPS = 6 and EXCHANGE = "diloco": pods differ inside a '
      "round of syncs; give a multiple of 4, such as 8.",
    ),
    ({"TRAIN_STEPS": 10}, "TRAIN_STEPS = 10 and EXCHANGE"),
    (
      {"FRAGMENTS": 2, "MODEL_FUNCTION": "a.b"},
      "FRAGMENTS = 2 and MODEL_FUNCTION = 'a.b': which layer has a parameter "
      "is known only for PaLM's blocks; set FRAGMENTS = 1.",
    ),
    ({"OUTER_DTYPE": "int4"}, "OUTER_DTYPE = 'int4'"),
    ({"OUTER_STEPS": 0}, "OUTER_STEPS = 0"),
    ({"MERGE_ALPHA": 1.5}, "MERGE_ALPHA = 1.5"),
  ],
  ids=str,
)
def test_settings_that_do_not_fit_are_one_line(
  macros, message, corpus, tmp_path, capsys
):
  """Before a file is written."""
  path = tmp_path / "run"
  assert runs.run("train", corpus, path, **(SETTINGS | TWO | macros)) == 2
  said = [x for x in capsys.readouterr().err.splitlines() if "palm_mtf: " in x]
  assert len(said) == 1 and message in said[0]
  assert not (path / "config.gin").exists()
