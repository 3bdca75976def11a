# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs on pairs of answers begin as their reference, and learn preferences."""

import json
import math
import shutil

import numpy as np
import pytest

from palm_mtf.cli import gin_files
from palm_mtf.data.batches.corpus import corpus_of_run
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.generation.inference.scorer import Scorer
from palm_mtf.training import reference
from tests import adapter_oracle, adapter_runs, runs
from tests.adapter_runs import KINDS, model_config
from tests.cases import slow
from tests.model.preference_test import log_ratios, sigmoid

BETA = 0.5
MACROS = {
  "PACKING": "single",
  "PREFERENCE_BETA": BETA,
  "LOG_STEPS": 1,
}
ADAPTER = KINDS["lora"]


def write_pairs(path):
  """Writes pairs, JSON lines."""
  pairs = []
  for i in range(80):
    words = [runs.WORDS[(i + j) % 10] for j in range(5)]
    pair = {"prompt": " ".join(words[:2]), "chosen": " ".join(words[2:])}
    pairs.append(pair | {"rejected": f"{words[0]} {i}"})
  path.write_text("\n".join(map(json.dumps, pairs)))


def train_on(pairs, base, model_dir, **macros):
  """Trains on a file of pairs; returns the exit code."""
  macros = {"TEXT_FILES": str(pairs), **MACROS, **macros}
  return adapter_runs.train(base, model_dir, **macros)


@pytest.fixture(scope="module")
def train(base, tmp_path_factory):
  """Returns a function that trains on pairs; it returns the exit code."""
  pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
  write_pairs(pairs)

  def train(model_dir, base=base, **macros):
    return train_on(pairs, base, model_dir, **macros)

  return train


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
  model_dir = tmp_path_factory.mktemp("trained") / "run"
  assert train(model_dir) == 0
  return model_dir


def read_rows(model_dir):
  """Returns the training rows and the validation rows, as batches."""
  files = [str(model_dir / "config.gin")]
  _, config = gin_files.load("train", files, []).build()
  vocabulary = load_vocabulary(str(model_dir), config.data, vocab_size=320)
  corpus = corpus_of_run(str(model_dir), config, vocabulary)
  return [
    {
      name: np.stack([rows.read(i)[name] for i in range(rows.num_rows)])
      for name in ("inputs", "targets", "segments", "loss_weights")
    }
    for rows in corpus.list_rows()
  ]


def check_reference(model_dir, config, params):
  """Compares the log ratios with an oracle; returns those for validation."""
  kept = json.loads((model_dir / "reference.json").read_text())["log_ratios"]
  for found, rows in zip(kept, read_rows(model_dir), strict=True):
    expected = log_ratios(config, params, rows)
    np.testing.assert_allclose(found, expected, atol=1e-4)
  return np.array(kept[1])


def test_a_run_begins_as_its_reference(base, trained):
  metrics = runs.read_metrics(trained)
  assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
  assert metrics[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
  check_reference(trained, model_config(), runs.read_tensors(base, 12))


def test_validation_loss_is_that_of_the_paper(base, trained):
  """A float64 oracle has the weights of both models."""
  config = model_config()
  reference = check_reference(trained, config, runs.read_tensors(base, 12))
  _, rows = read_rows(trained)
  after = log_ratios(config, runs.read_tensors(trained, 8), rows)
  losses = -np.log(sigmoid(BETA * (after - reference)))
  (last,) = [x for x in runs.read_metrics(trained) if "validation_loss" in x]
  # Training validates on EVAL_BATCHES of four rows.
  wanted = losses[:8].mean()
  assert last["validation_loss"] == pytest.approx(wanted, rel=1e-4)
  assert last["validation_loss"] < 0.6
  assert last["rewards/accuracies"] == 1
  margins = BETA * (after - reference)[:8]
  found = last["validation_rewards/margins"]
  assert found == pytest.approx(margins.mean(), rel=1e-4)
  assert last["validation_rewards/accuracies"] == (margins > 0).mean()


def test_a_run_keeps_one_reference(train, trained, tmp_path, capsys):
  """If pairs have changed, INIT_CHECKPOINT has to be the same."""
  run, pairs = tmp_path / "run", tmp_path / "pairs.jsonl"
  shutil.copytree(trained, run)
  write_pairs(pairs)
  pairs.write_text(pairs.read_text().partition("\n")[2])
  macros = {"INIT_CHECKPOINT": str(trained), "TEXT_FILES": str(pairs)}
  assert train(run, TRAIN_STEPS=9, EVAL_STEPS=9, **macros) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert f"{trained}/checkpoints/step_00000008 is not the reference" in error
  for name in ("reference.json", "metrics.jsonl"):
    assert (run / name).read_bytes() == (trained / name).read_bytes()


def test_a_killed_run_keeps_its_scores_and_resumes_without_its_reference(
  base, train, trained, tmp_path, monkeypatch
):
  """It is killed while it scores, and once more after four steps."""
  copy = tmp_path / "base"
  shutil.copytree(base, copy)
  scored, score = [], Scorer.log_likelihoods

  def log_likelihoods(self, examples):
    if len(scored) == 2:
      raise RuntimeError("killed")
    scored.append(len(examples) // 2)
    return score(self, examples)

  monkeypatch.setattr(Scorer, "log_likelihoods", log_likelihoods)
  monkeypatch.setattr(reference, "_AT_ONCE", 16)
  monkeypatch.setattr(reference, "_SAVE_SECS", 0.0)
  with pytest.raises(RuntimeError, match="killed"):
    train(tmp_path / "run", copy)
  scored.insert(0, 0)
  assert train(tmp_path / "run", copy, TRAIN_STEPS=4) == 0
  kept, expected = (
    json.loads((x / "reference.json").read_text())["log_ratios"]
    for x in (tmp_path / "run", trained)
  )
  assert sum(scored) == sum(map(len, expected)) and kept == expected
  shutil.rmtree(copy / "checkpoints")
  assert train(tmp_path / "run", copy) == 0
  runs.assert_same_tensors(tmp_path / "run", trained, 8)


@pytest.mark.slow
def test_another_model_scores_the_pairs_again(train, trained, tmp_path):
  """A run that ended before its first checkpoint begins with new settings."""
  run = tmp_path / "run"
  run.mkdir()
  shutil.copy(trained / "reference.json", run)
  macros = {"TRAIN_STEPS": 1, "EVAL_STEPS": 1, "ROTARY_BASE": 50.0}
  assert train(run, **macros) == 0
  (metrics,) = runs.read_metrics(run)
  assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
  "macros",
  [
    slow({"NUM_PODS": 2, "NUM_MICROBATCHES": 2}),
    slow({"PODS": "local_servers", "NUM_PODS": 2}),
    slow({"STAGES": 1, "STEPS_PER_LOOP": 1, "GLOBAL_BATCH_SIZE": 4}),
  ],
)
def test_pods_and_microbatches_learn_the_same(train, trained, tmp_path, macros):
  assert train(tmp_path / "run", **macros) == 0
  for one, other in zip(
    *map(runs.read_metrics, (trained, tmp_path / "run")), strict=True
  ):
    margins = "rewards/margins", "validation_rewards/margins"
    for name in {"loss", *margins} & one.keys():
      assert other[name] == pytest.approx(one[name], rel=0.02, abs=1e-4)


@pytest.fixture(scope="module")
def preferring(train, tmp_path_factory):
  """Trains an adapter on pairs; returns its folder."""
  model_dir = tmp_path_factory.mktemp("adapted") / "run"
  assert train(model_dir, **ADAPTER) == 0
  return model_dir


def test_an_adapter_begins_as_its_base(base, preferring):
  metrics = runs.read_metrics(preferring)
  assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
  assert metrics[-1]["loss"] < 0.68
  check_reference(preferring, model_config(), runs.read_tensors(base, 12))


def test_an_adapter_begins_as_another_adapter(
  base, train, preferring, tmp_path
):
  """The reference is the model with that adapter."""
  run = tmp_path / "run"
  macros = ADAPTER | {"INIT_CHECKPOINT": str(preferring), "TRAIN_STEPS": 1}
  assert train(run, **macros, CHECKPOINT_STEPS=1, EVAL_STEPS=1) == 0
  (metrics,) = runs.read_metrics(run)
  assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
  config = model_config(**ADAPTER)
  own = runs.read_tensors(preferring, 8)
  merged = adapter_oracle.merge(config, runs.read_tensors(base, 12) | own)
  check_reference(run, config.base, merged)
  after = runs.read_tensors(run, 1)
  name = "layer_000/attention/q_lora_b"
  change = np.abs(after[name] - own[name]).max()
  assert 0 < change < 0.5 * np.abs(own[name]).max()
  manifest = "checkpoints/step_00000001/manifest.json"
  held = json.loads((run / manifest).read_text())
  assert held["base"]["checkpoint"] == f"{base}/checkpoints/step_00000012"
  assert held["parent"]["checkpoint"] == "step_00000008"


VIRTUAL = {"ADAPTER": "prefix", "ADAPTER_LENGTH": 3, "TRAIN_STEPS": 2}


@pytest.fixture(scope="module")
def prefixed(train, tmp_path_factory):
  model_dir = tmp_path_factory.mktemp("prefixed") / "run"
  more = {"EVAL_STEPS": 2, "CHECKPOINT_STEPS": 2}
  assert train(model_dir, **VIRTUAL, **more) == 0
  return model_dir


def test_virtual_positions_are_no_tokens_of_the_base(base, prefixed):
  """The reference of prefix tuning is the base, which reads only the pairs."""
  kept = json.loads((prefixed / "reference.json").read_text())["log_ratios"]
  config, params = model_config(), runs.read_tensors(base, 12)
  for found, rows in zip(kept, read_rows(prefixed), strict=True):
    for row in range(len(found)):
      own = {x: y[row : row + 1] for x, y in rows.items()}
      # Targets of virtual positions are 0, which no text has.
      tokens = {x: y[own["targets"] != 0][np.newaxis] for x, y in own.items()}
      expected = log_ratios(config, params, tokens)
      np.testing.assert_allclose(found[row], expected[0], atol=1e-4)


@pytest.mark.slow
def test_prefix_tuning_begins_as_another_prefix(
  base, train, prefixed, tmp_path
):
  macros = VIRTUAL | {"INIT_CHECKPOINT": str(prefixed), "EVAL_STEPS": 2}
  assert train(tmp_path / "run", **macros) == 0
  metrics, *_ = runs.read_metrics(tmp_path / "run")
  assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
  params = runs.read_tensors(base, 12) | runs.read_tensors(prefixed, 2)
  own = {x: y for x, y in VIRTUAL.items() if x.startswith("ADAPTER")}
  check_reference(tmp_path / "run", model_config(**own), params)


# {why: (macros, message)}
REFUSED = {
  "no reference": (
    {"INIT_CHECKPOINT": None},
    "PREFERENCE_BETA = 0.5: pairs are compared with the log p of a trained "
    "model; name its checkpoint in INIT_CHECKPOINT.",
  ),
  "another objective": (
    {"OBJECTIVE": "prefix_lm"},
    "PREFERENCE_BETA = 0.5 and OBJECTIVE = 'prefix_lm': pairs are learned only",
  ),
  "answers that take places of experts": (
    {
      "MLP": "experts",
      "NUM_EXPERTS": 4,
      "EXPERTS_PER_TOKEN": 2,
      "CAPACITY_FACTOR": 1.0,
    },
    "PREFERENCE_BETA = 0.5 and CAPACITY_FACTOR = 1.0: pairs are learned only",
  ),
  "other packing": ({"PACKING": "packed"}, "PACKING = 'packed': a row holds"),
  "no beta": ({"PREFERENCE_BETA": None}, "PREFERENCE_BETA = None: text_files"),
  "no pairs": (
    {"TEXT_FILES": "*.txt"},
    "PREFERENCE_BETA = 0.5: text_files has texts, not pairs",
  ),
  "an adapter's whole model": (
    {"INIT_CHECKPOINT": "adapted"},
    "has only an adapter; name its base, ",
  ),
  "another adapter": (
    ADAPTER | {"ADAPTER_ALPHA": 4.0, "INIT_CHECKPOINT": "adapted"},
    "ADAPTER_ALPHA = 4.0: ",
  ),
}


@pytest.mark.parametrize(("macros", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(
  corpus, train, preferring, tmp_path, capsys, monkeypatch, macros, message
):
  monkeypatch.chdir(corpus)
  if macros.get("INIT_CHECKPOINT") == "adapted":
    macros = macros | {"INIT_CHECKPOINT": str(preferring)}
  assert train(tmp_path / "run", **macros) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert message in error
  assert not (tmp_path / "run" / "checkpoints").exists()
