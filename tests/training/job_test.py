# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.cli.main import main
from palm_mtf.training.job import write_samples
from tests import runs


def kept(folder) -> list[tuple]:
  lines = (folder / "samples.jsonl").read_text().splitlines()
  return [tuple(json.loads(line).values()) for line in lines]


def test_samples_are_kept_in_the_order_of_steps_each_step_once(tmp_path):
  write_samples(str(tmp_path), 50, [], [])
  assert not list(tmp_path.iterdir())
  write_samples(str(tmp_path), 100, ["a", "b"], ["1", "2"])
  write_samples(str(tmp_path), 300, ["a"], ["later"])
  write_samples(str(tmp_path), 200, ["a"], ["taken back"])
  write_samples(str(tmp_path), 200, ["a"], ["again\n\u00e9"])
  assert kept(tmp_path) == [
    (100, "a", "1"),
    (100, "b", "2"),
    (200, "a", "again\n\u00e9"),
  ]


def test_a_ramp_that_the_run_does_not_reach_is_warned_about(tmp_path, capsys):
  """And nothing else is done, because the corpus is missing."""
  settings = {"GLOBAL_BATCH_SIZE": [[0, 4], [1, 8], [9, 16]], "TRAIN_STEPS": 1}
  assert runs.run("train", tmp_path / "none", tmp_path, **settings) == 2
  assert (
    "warning: TRAIN_STEPS = 1: ends before step 1, from where "
    "GLOBAL_BATCH_SIZE is 8\n"
  ) in capsys.readouterr().err


def test_xla_flags_that_fail_later_are_refused_before_data_is_made(
  corpus, tmp_path, capsys, monkeypatch
):
  flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"
  monkeypatch.setenv("TF_XLA_FLAGS", flags)
  settings = {"NUM_PODS": 2, "PODS": "in_process"}
  assert runs.run("train", corpus, tmp_path, **settings) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"palm_mtf: TF_XLA_FLAGS = '{flags}': ")
  assert not (tmp_path / "tokens").exists()


BANDED = {"dense": {}, "banded": {"ATTENTION_WINDOW": 4}}
WIDER = {"dense": {}, "banded": {"ATTENTION_WINDOW": 5}}


def test_a_run_resumes_with_the_function_of_its_model_or_in_one_line(
  corpus, tmp_path, capsys
):
  """And another command reads the layers from the run's config.gin."""

  def train(steps, **changes):
    settings = {
      "NUM_LAYERS": 2,
      "LAYERS": "dense, banded",
      "VARIANTS": BANDED,
      "TRAIN_STEPS": steps,
      "PROMPTS": [],
    }
    return runs.run("train", corpus, tmp_path, **(settings | changes))

  assert train(4) == 0
  # The same function in other words, and settings that are not the model's.
  equal = {"LAYERS": "a, b", "VARIANTS": {"a": {}, "b": BANDED["banded"]}}
  d_kv, d_model = 16, 32  # of the settings of tests
  equal |= {"SCORE_SCALE": d_kv**-0.5, "LOGITS_SCALE": d_model**-0.5}
  assert train(6, **equal, REMAT="layer", DROPOUT=0.1) == 0
  capsys.readouterr()
  path = tmp_path / "checkpoints" / "step_00000006"
  for changes, given, trained in (
    ({"MLP": "geglu"}, "MLP = 'geglu'", "MLP = 'swiglu'"),
    ({"NORM": "rms_norm"}, "NORM = 'rms_norm'", "NORM = 'layer_norm'"),
    ({"NORM_EPSILON": 1e-5}, "NORM_EPSILON = 1e-05", "NORM_EPSILON = 1e-06"),
    ({"ROTARY_BASE": 5e5}, "ROTARY_BASE = 500000.0", "ROTARY_BASE = 10000.0"),
    ({"POSITIONS": "none"}, "POSITIONS = 'none'", "POSITIONS = 'rotary'"),
    ({"POSITIONS": "alibi"}, "POSITIONS = 'alibi'", "POSITIONS = 'rotary'"),
    ({"EMBEDDING_SCALE": 2.0}, "EMBEDDING_SCALE = 2.0", "EMBEDDING_SCALE = 1"),
    ({"LAYERS": "b, a"}, "LAYERS = 'b, a'", "LAYERS = 'a, b'"),
    (
      {"ATTENTION_WINDOW": 9},
      "ATTENTION_WINDOW = 9",
      "ATTENTION_WINDOW = None",
    ),
    ({"SCORE_SCALE": 1.0}, "SCORE_SCALE = 1.0", f"SCORE_SCALE = {d_kv**-0.5}"),
    (
      {"LAYERS": "dense, banded", "VARIANTS": WIDER, "REMAT": "none"},
      f"LAYERS = 'dense, banded', VARIANTS = {WIDER}",
      f"LAYERS = 'a, b', VARIANTS = {equal['VARIANTS']}",
    ),
  ):
    assert train(8, **{**equal, **changes}) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    said = f"palm_mtf: {given}: {path} was trained with {trained}"
    assert line.startswith(said), line
    assert "begin a run with INIT_CHECKPOINT in another MODEL_DIR." in line
  assert main(["evaluate", f"--gin_file={tmp_path}/config.gin"]) == 0


@pytest.mark.parametrize(
  ("frozen", "message"),
  [
    (["embeding"], 'no parameter matches "embeding" (did you mean "embedding"'),
    (["*"], "freezes all parameters, so nothing is left to train; take"),
    ("embedding", "give a list of patterns of names of parameters, or [] for"),
  ],
)
@pytest.mark.parametrize("command", ["train", "plan", "sweep"])
def test_a_wrong_frozen_is_one_line_before_anything_is_done(
  command, frozen, message, tmp_path, capsys
):
  """The corpus is missing, which would be the next error."""
  more = {"SWEEP_RUNS": [{"a": {}, "b": {}}]} if command == "sweep" else {}
  folder = tmp_path / "run"
  code = runs.run(command, tmp_path / "none", folder, FROZEN=frozen, **more)
  assert code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert f"FROZEN = {frozen!r}: {message}" in line
  assert not (folder / "tokens").exists()


def slots_of(tensors):
  return {x for x in tensors if x.endswith(("/momentum", "/second_moment"))}


@pytest.mark.slow
def test_a_frozen_run_resumes_and_its_weights_train_further_with_all(
  corpus, finished, tmp_path, capsys
):
  """A checkpoint has frozen parameters, but no slots for them."""
  frozen = ["embedding", "layers/*/mlp/*"]
  settings = {
    "INIT_CHECKPOINT": str(finished),
    "VOCABULARY": str(finished / "vocabulary.model"),
    "PROMPTS": [],
  }
  tuned, further = tmp_path / "tuned", tmp_path / "further"
  whole = tmp_path / "whole"

  def train(folder, steps, **changes):
    given = {**settings, "TRAIN_STEPS": steps, **changes}
    code = runs.run("train", corpus, folder, **given)
    return code, capsys.readouterr().err

  assert train(tuned, 4, FROZEN=frozen)[0] == 0
  path = tuned / "checkpoints" / "step_00000004"
  for changed, count, first in (
    ([], 4, "embedding"),
    (["embedding"], 3, "layers/0/mlp/wi_gate"),
    ([*frozen, "final_norm/*"], 1, "final_norm/scale"),
  ):
    code, said = train(tuned, 8, FROZEN=changed)
    assert code == 2
    assert said.splitlines()[-1] == (
      f"palm_mtf: FROZEN = {changed!r}: {path} was written with {frozen!r}, so "
      f"the roles of {count} parameters differ, such as {first}; keep that "
      "value, or start a new optimizer from its weights in another MODEL_DIR, "
      'as INIT_CHECKPOINT with INIT_STATE = "weights". (FROZEN is set on the '
      "command line)"
    )
  # Other patterns of the same parameters are the same roles.
  assert train(tuned, 8, FROZEN=[*frozen, "layers/0/mlp/wo"])[0] == 0
  assert train(whole, 8, FROZEN=frozen)[0] == 0
  runs.assert_same_tensors(tuned, whole, 8)
  start, end = runs.read_tensors(finished, 12), runs.read_tensors(tuned, 8)
  kept = [x for x in start if x == "embedding" or "/mlp/w" in x]
  kept = [x for x in kept if x not in slots_of(start)]
  for name in start.keys() - slots_of(start):
    same = start[name].tobytes() == end[name].tobytes()
    assert same == (name in kept), name
  assert slots_of(end) == {
    x for x in slots_of(start) if x.rpartition("/")[0] not in kept
  }

  code, said = train(further, 12, INIT_CHECKPOINT=str(tuned), INIT_STATE="all")
  assert (code, "the roles of 4 parameters differ" in said) == (2, True)
  assert train(further, 4, INIT_CHECKPOINT=str(tuned))[0] == 0
  last = runs.read_tensors(further, 4)
  assert slots_of(last) == slots_of(start)
  for name in kept:
    assert last[name].tobytes() != end[name].tobytes(), name

  # Commands that read checkpoints need no FROZEN.
  assert runs.run("evaluate", corpus, tuned) == 0
  output = ["--format=npz", f"--output={tmp_path / 'npz'}"]
  assert main(["export", "--model_dir", str(tuned), *output]) == 0
  with np.load(tmp_path / "npz" / "weights.npz") as exported:
    np.testing.assert_array_equal(exported["embedding"], start["embedding"])


@pytest.mark.slow
def test_finetuning_starts_from_the_weights_with_a_fresh_optimizer(
  corpus, finished, tmp_path, capsys
):
  settings = {
    "INIT_CHECKPOINT": str(finished),
    "VOCABULARY": str(finished / "vocabulary.model"),
    "LEARNING_RATE": 1e-9,  # so that one step changes almost nothing
    "PROMPTS": [],
  }
  assert runs.run("train", corpus, tmp_path, **settings, TRAIN_STEPS=1) == 0
  newest = newest_whole(str(finished))
  said = capsys.readouterr().err
  assert f"starting from the weights of {newest.path}, with step 0" in said
  start, tuned = runs.read_tensors(finished, 12), runs.read_tensors(tmp_path, 1)
  for name, value in start.items():
    if name.endswith("/momentum"):
      assert np.abs(tuned[name]).max() < 1e-8 < np.abs(value).max(), name
    elif not name.endswith("/second_moment"):
      np.testing.assert_allclose(tuned[name], value, 1e-6, 1e-8, err_msg=name)
  found = newest_whole(str(tmp_path)).manifest
  assert (found.step, found.next_row) == (1, 4)
  assert found.parent == newest.as_parent
  assert runs.run("train", corpus, tmp_path, **settings, TRAIN_STEPS=2) == 0
  assert "INIT_CHECKPOINT is not read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_continues_with_the_optimizer_has_the_bits_of_one_run(
  corpus, finished, tmp_path, capsys
):
  """On the same data, because a batch is a function of (SEED, step)."""
  begun = finished / "checkpoints" / "step_00000008"
  settings = {
    "INIT_CHECKPOINT": str(begun),
    "INIT_STATE": "all",
    "VOCABULARY": str(finished / "vocabulary.model"),
    "PROMPTS": [],
  }
  code = runs.run("train", corpus, tmp_path, **settings, TRAIN_STEPS=8)
  assert code == 2
  said = capsys.readouterr().err
  assert (
    f"TRAIN_STEPS = 8: INIT_CHECKPOINT = {str(begun)!r} already has 8" in said
  )
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  said = capsys.readouterr().err
  assert f"weights and optimizer of {begun}, with step 8" in said
  runs.assert_same_tensors(finished, tmp_path, 12)
  assert [x["step"] for x in runs.read_metrics(tmp_path)] == [10, 12]
  parent = newest_whole(str(tmp_path)).manifest.parent
  assert parent["checkpoint"] == "step_00000008"
