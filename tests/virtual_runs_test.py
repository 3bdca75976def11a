# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs with prefix or prompt tuning, and the commands that read them."""

import numpy as np
import pytest

from tests import adapter_runs, runs, virtual_oracle
from tests.adapter_runs import KINDS
from tests.cases import slow

BOTH = ["prefix", slow("prompt")]


def adapt(base, model_dir, kind, **macros):
  """Trains an adapter; returns the exit code."""
  return adapter_runs.train(base, model_dir, **{**KINDS[kind], **macros})


@pytest.mark.parametrize("kind", BOTH)
def test_a_resumed_run_has_the_same_bits(base, adapted, kind, tmp_path):
  """Checkpoints have only the adapter, and its optimizer slots."""
  run = runs.copy_until(adapted(kind), tmp_path / "run", 4)
  assert adapt(base, run, kind) == 0
  runs.assert_same_tensors(adapted(kind), run, 8)
  held = runs.read_tensors(run, 8)
  parameters = {x: y.shape for x, y in held.items() if "moment" not in x}
  assert (
    parameters
    == {
      "prefix": {
        "layer_000/attention/k_virtual": (5, 16),
        "layer_000/attention/v_virtual": (5, 16),
      },
      "prompt": {"virtual_embedding": (5, 32)},
    }[kind]
  )
  assert {x.rpartition("/")[0] for x in held.keys() - parameters} == {
    *parameters
  }


def test_a_prompt_begins_with_rows_of_the_embedding(base, tmp_path):
  """Lester et al. 2021, section 3.2: tokens of the vocabulary."""
  given = {"TRAIN_STEPS": 1, "LEARNING_RATE": 1e-9, "EVAL_STEPS": 1}
  assert adapt(base, tmp_path / "run", "prompt", **given) == 0
  rows = runs.read_tensors(tmp_path / "run", 1)["virtual_embedding"]
  table = runs.read_tensors(base, 12)["embedding"]
  distance = np.abs(rows[:, np.newaxis] - table).max(-1)
  assert (distance.min(1) < 1e-6).all()
  assert len({*distance.argmin(1)}) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["packed", "joined", "single"])
@pytest.mark.parametrize("kind", virtual_oracle.KINDS)
def test_an_adapter_learns_what_its_base_does_not(
  base, kind, packing, tmp_path
):
  """`evaluate` computes the loss that training computes."""
  given = {"TRAIN_STEPS": 60, "EVAL_STEPS": 30, "PACKING": packing}
  given |= {"LEARNING_RATE": 0.1}
  assert adapt(base, tmp_path / "run", kind, **given) == 0
  first, last = (
    x["validation_loss"]
    for x in runs.read_metrics(tmp_path / "run")
    if "validation_loss" in x
  )
  (of_base,) = runs.read_metrics(base)[-1:]
  assert last < first < of_base["validation_loss"] - 0.1
  flags = ["--gin_file", tmp_path / "run" / "config.gin", "--json"]
  (loss,) = runs.printed("evaluate", *flags)
  assert loss["validation_loss"] == pytest.approx(last, 1e-6)


@pytest.mark.parametrize("kind", BOTH)
def test_a_base_with_an_adapter_is_the_adapted_run(base, adapted, kind):
  flags = "--text", "one two three four five six seven", "--json"
  found = [
    runs.printed("score", "--model_dir", *map(str, x), *flags)[0]
    for x in ([adapted(kind)], [base, "--adapter", adapted(kind)], [base])
  ]
  assert found[0] == found[1]
  assert abs(found[0]["log_likelihood"] - found[2]["log_likelihood"]) > 1e-3


def test_a_stride_counts_no_virtual_positions(adapted, capsys):
  """With a longer one, windows would leave out tokens."""
  flags = "--model_dir", str(adapted("prefix")), "--text=one"
  assert runs.main(["score", *flags, "--gin.STRIDE=28"]) == 2
  *_, line = capsys.readouterr().err.splitlines()
  assert "give at most SEQUENCE_LENGTH - ADAPTER_LENGTH = 27." in line


@pytest.mark.parametrize("kind", BOTH)
def test_an_adapter_is_exported_only_to_peft(
  base, adapted, kind, tmp_path, capsys
):
  """With the adapter that was exported, the base is the adapted run."""
  given = "export", "--model_dir", str(adapted(kind)), "--output"
  for flag in ("--merge", "--format=gguf", "--format=npz"):
    assert runs.main([*given, str(tmp_path / "other"), flag]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert f"{flag}: the model's kernels cannot hold the adapter" in line
  assert runs.main([*given, str(tmp_path / "peft")]) == 0
  capsys.readouterr()
  flags = "--prompt", "one two three", "--json"
  found = [
    runs.printed("generate", "--model_dir", *map(str, x), *flags)
    for x in ([adapted(kind)], [base, "--adapter", tmp_path / "peft"])
  ]
  assert found[0] == found[1]


REFUSED = {
  "no length": ({"ADAPTER_LENGTH": None}, "ADAPTER_LENGTH is missing; give"),
  "length 0": ({"ADAPTER_LENGTH": 0}, "ADAPTER_LENGTH = 0"),
  "too long": ({"ADAPTER_LENGTH": 32}, "no room for a text in SEQUENCE_LENGTH"),
  "a rank": ({"ADAPTER_RANK": 4}, "only lora and dora have this setting"),
  "masked": (
    {"PACKING": "joined_masked"},
    "would not fill equal rows; set PACK",
  ),
}


@pytest.mark.parametrize(("macros", "said"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_is_one_line(base, macros, said, tmp_path, capsys):
  for kind in virtual_oracle.KINDS:
    assert adapt(base, tmp_path / "run", kind, **macros) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_virtual_positions_take_no_places_of_experts(base, tmp_path, capsys):
  """Those of prefix tuning hold no tokens."""
  experts = {"MLP": "experts", "NUM_EXPERTS": 4, "EXPERTS_PER_TOKEN": 2}
  given = {**experts, "CAPACITY_FACTOR": 1.0}
  assert adapt(base, tmp_path / "run", "prefix", **given) == 2
  error = capsys.readouterr().err.strip().splitlines()[-1]
  assert "would take places of experts; set CAPACITY_FACTOR = None" in error
