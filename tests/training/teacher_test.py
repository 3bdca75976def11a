# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs with a teacher read its predictions of their rows, and keep them."""

import json
import os
import shutil

import numpy as np
import pytest

from palm_mtf.cli import gin_files
from palm_mtf.config.run import BatchSizes
from palm_mtf.data.batches.corpus import corpus_of_run
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.training.progress import Watchdog
from palm_mtf.training.teacher import _KeptRows
from tests import oracle, runs
from tests.cases import slow
from tests.model.distillation_test import KINDS, divergence, log_softmax
from tests.prefixed_vocabulary import train_prefixed
from tests.training.reference_test import model_config

SHORT = {"PROMPTS": [], "LOG_STEPS": 1, "EVAL_STEPS": 8, "TRAIN_STEPS": 8}
SPLIT = {"MESH_SHAPE": "data:2,model:2", "LAYOUT": "batch:data,vocab:model"}
LOADING = "loading the teacher"


@pytest.fixture(scope="module")
def teacher(finished, corpus, tmp_path_factory):
  """A run of 8 steps; next to its folder are its texts."""
  folder = tmp_path_factory.mktemp("teacher")
  (folder / "texts").symlink_to(corpus)
  return runs.copy_until(finished, folder / "run", 8)


def train(teacher, model_dir, **macros):
  """Trains with a teacher; returns the exit code."""
  given = {
    "TEACHER": str(teacher),
    "TEACHER_TARGETS": "top",
    "TEACHER_TOKENS": 20,
    "SEED": 7,
    "VOCABULARY": str(teacher / "vocabulary.model"),
    **SHORT,
    **macros,
  }
  return runs.run("train", teacher.parent / "texts", model_dir, **given)


def kept_files(folder):
  return sorted(folder.glob("*/*.npy"))


@pytest.fixture(scope="module")
def trained(teacher, tmp_path_factory):
  model_dir = tmp_path_factory.mktemp("trained") / "run"
  assert train(teacher, model_dir) == 0
  return model_dir


def read_corpus(model_dir):
  files = [str(model_dir / "config.gin")]
  _, config = gin_files.load("train", files, []).build()
  vocabulary = load_vocabulary(str(model_dir), config.data, vocab_size=320)
  return corpus_of_run(str(model_dir), config, vocabulary)


def first_losses(model_dir):
  metrics = runs.read_metrics(model_dir)[0]
  return metrics["loss"], metrics["teacher_loss"]


@pytest.mark.parametrize(
  "macros",
  [
    {"TEACHER_TARGETS": "full", "TEACHER_TEMPERATURE": 2.0},
    {"TEACHER_TARGETS": "top", "PACKING": "packed"},
    slow({"TEACHER_TARGETS": "sampled", "TEACHER_TEMPERATURE": 0.5}),
  ],
)
def test_the_first_losses_are_those_of_a_float64_oracle(
  teacher, trained, tmp_path, macros
):
  """The model begins with the weights of another run than the teacher."""
  more = {"TRAIN_STEPS": 1, "EVAL_STEPS": 1, "INIT_CHECKPOINT": str(trained)}
  assert train(teacher, tmp_path / "run", **macros, **more) == 0
  sizes = BatchSizes(runs.SETTINGS["GLOBAL_BATCH_SIZE"])
  batch = read_corpus(tmp_path / "run").batches(sizes).batch(0)
  temperature = macros.get("TEACHER_TEMPERATURE", 1.0)
  given = batch["inputs"], batch.get("segments")
  logits, taught = (
    oracle.forward(model_config(), runs.read_tensors(x, 8), *given)
    for x in (trained, teacher)
  )
  features = {}
  if macros["TEACHER_TARGETS"] != "full":
    (file,) = kept_files(tmp_path / "run" / "teacher")
    features = np.load(file)  # in the order of the batch
  log_q, log_p = (log_softmax(x / temperature) for x in (logits, taught))
  each = divergence(macros["TEACHER_TARGETS"], log_q, log_p, features)
  weights = batch.get("loss_weights", np.ones_like(each))
  hard, _ = oracle.loss_of_logits(logits, batch["targets"], 0.0, weights)
  soft = (each * weights).sum() / weights.sum()
  assert first_losses(tmp_path / "run") == pytest.approx((hard, soft), rel=1e-4)


@pytest.mark.parametrize("kind", ["sampled", slow("full"), slow("top")])
def test_a_model_that_begins_as_its_teacher_does_not_differ(
  teacher, tmp_path, kind
):
  macros = {"TEACHER_TARGETS": kind, "INIT_CHECKPOINT": str(teacher)}
  more = {"TRAIN_STEPS": 1, "EVAL_STEPS": 1}
  assert train(teacher, tmp_path / "run", **macros, **more) == 0
  assert first_losses(tmp_path / "run")[1] == pytest.approx(0, abs=1e-6)


def test_manifests_name_the_teacher(teacher, trained):
  manifest = trained / "checkpoints" / "step_00000008" / "manifest.json"
  held = json.loads(manifest.read_text())
  step = teacher / "checkpoints" / "step_00000008"
  theirs = json.loads((step / "manifest.json").read_text())
  assert held["teacher"]["checkpoint"] == str(step)
  assert held["teacher"]["blake2b"] == theirs["blake2b"]
  assert held["settings"]["TEACHER_TOKENS"] == 20


def test_a_run_resumes_to_the_same_bits(teacher, trained, tmp_path):
  """A killed run may leave a part of a file of predictions."""
  run = runs.copy_until(trained, tmp_path / "run", 4)
  *_, last = kept_files(run / "teacher")
  last.write_bytes(last.read_bytes()[:-100])
  assert train(teacher, run) == 0
  runs.assert_same_tensors(run, trained, 8)


def test_runs_share_a_cache_while_others_write(tmp_path, monkeypatch):
  """Two runs write one file at once, and a third begins."""
  rows = np.zeros(2, [("key", "V16"), ("teacher_log_p", "<f4", (3, 4))])
  rows["key"] = np.frombuffer(bytes(range(32)), "V16")
  rows["teacher_log_p"] = np.arange(24).reshape(2, 3, 4)
  one, other = (_KeptRows(str(tmp_path)) for _ in range(2))
  rename = os.replace

  def replace(temporary, path):
    monkeypatch.setattr(os, "replace", rename)
    other.add(rows)
    rename(temporary, path)

  monkeypatch.setattr(os, "replace", replace)
  one.add(rows)
  (tmp_path / "0.npy.7").symlink_to("removed")  # after it was listed
  (tmp_path / "0.npy").symlink_to("removed")
  key = bytes(range(16, 32))
  for kept in (one, other, _KeptRows(str(tmp_path))):
    found = kept.read([key, bytes(16)])
    assert found.keys() == {key}
    np.testing.assert_array_equal(
      found[key]["teacher_log_p"], rows[1]["teacher_log_p"]
    )


def test_the_watchdog_waits_longer_for_a_step_that_loads_the_teacher(
  teacher, trained, tmp_path, monkeypatch
):
  """The rows of the steps before it are in the cache."""
  cache, calls = tmp_path / "cache", []
  shutil.copytree(trained / "teacher", cache)

  def note(owner, name):
    method = getattr(owner, name)

    def noted(*inputs, **named):
      calls.append(name)
      return method(*inputs, **named)

    monkeypatch.setattr(owner, name, noted)

  for name in ("expect_slow", "note_step"):
    note(Watchdog, name)
  note(LoadedDecoder, "__init__")
  more = {"TEACHER_CACHE": str(cache), "TRAIN_STEPS": 9, "EVAL_STEPS": 9}
  assert train(teacher, tmp_path / "run", CHECKPOINT_STEPS=9, **more) == 0
  load = calls.index("__init__")
  assert calls[load - 2 : load] == ["note_step", "expect_slow"]
  assert calls[:load].count("note_step") == 8


def test_runs_of_other_seeds_need_no_teacher(
  teacher, trained, tmp_path, capsys
):
  """With DATA_SEED they read the same rows."""
  shared = {"TEACHER_CACHE": str(trained / "teacher"), "DATA_SEED": 7}
  before = kept_files(trained / "teacher")
  capsys.readouterr()
  assert train(teacher, tmp_path / "run", SEED=3, **shared) == 0
  assert LOADING not in capsys.readouterr().err
  assert kept_files(trained / "teacher") == before
  ours, theirs = (runs.read_tensors(x, 8) for x in (tmp_path / "run", trained))
  assert any((ours[x] != theirs[x]).any() for x in ours)


@pytest.mark.parametrize(
  "macros",
  [
    {"SEED": 3},  # other rows
    slow({"TEACHER_TOKENS": 19}),
    slow({"TEACHER_TEMPERATURE": 1.5}),
    slow({"TEACHER_TARGETS": "sampled"}),
    slow({"TEACHER": "trained"}),
  ],
)
def test_predictions_of_other_rows_or_teachers_are_not_taken(
  teacher, trained, tmp_path, capsys, macros
):
  cache = tmp_path / "cache"
  shutil.copytree(trained / "teacher", cache)
  macros = {x: str(trained) if y == "trained" else y for x, y in macros.items()}
  more = {"TRAIN_STEPS": 1, "EVAL_STEPS": 1, "TEACHER_CACHE": str(cache)}
  assert train(teacher, tmp_path / "run", **more | macros) == 0
  assert LOADING in capsys.readouterr().err
  assert len(kept_files(cache)) == len(kept_files(trained / "teacher")) + 1


@pytest.mark.parametrize(
  "macros",
  [
    slow({"NUM_PODS": 2, "NUM_MICROBATCHES": 2}),
    slow({"PODS": "local_servers", "NUM_PODS": 2}),
    slow(SPLIT),
    slow(SPLIT | {"TPU": "v4-8"}),  # rehearsed
  ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_pods_and_layouts_learn_the_same(
  teacher, tmp_path, monkeypatch, macros, kind
):
  if "TPU" in macros:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  one, other = tmp_path / "one", tmp_path / "other"
  assert train(teacher, one, TEACHER_TARGETS=kind) == 0
  assert train(teacher, other, TEACHER_TARGETS=kind, **macros) == 0
  for ours, theirs in zip(*map(runs.read_metrics, (one, other)), strict=True):
    for name in ("loss", "teacher_loss"):
      assert theirs[name] == pytest.approx(ours[name], rel=0.02, abs=1e-4)


@pytest.mark.slow
def test_adapters_teach_and_learn(teacher, tmp_path):
  """An adapter begins as its base, and then as an adapted model."""
  adapter = {"ADAPTER": "lora", "ADAPTER_RANK": 4, "ADAPTER_ALPHA": 8.0}
  adapter["PARAMETER_SCALE_FLOOR"] = 0.5
  first, second = tmp_path / "first", tmp_path / "second"
  assert train(teacher, first, INIT_CHECKPOINT=str(teacher), **adapter) == 0
  more = adapter | {"INIT_CHECKPOINT": str(first), "TEACHER": str(first)}
  assert train(teacher, second, **more) == 0
  for model_dir in (first, second):
    assert first_losses(model_dir)[1] == pytest.approx(0, abs=1e-6)
  last = runs.read_metrics(first)[-1]
  assert last["teacher_loss"] > 1e-4


@pytest.mark.parametrize(
  ("macros", "words"),
  [
    ({"TEACHER": "nowhere"}, "TEACHER = 'nowhere': there is no checkpoint"),
    ({"TEACHER_TOKENS": 320}, "give less than VOCAB_SIZE = 320"),
    ({"SEQUENCE_LENGTH": 64}, "reads at most 32 tokens; lower it"),
    ({"PREFERENCE_BETA": 0.1}, "PREFERENCE_BETA = 0.1, but model and teacher"),
    (
      {"OBJECTIVE": "prefix_lm", "PACKING": "packed"},
      "OBJECTIVE = 'prefix_lm', but model and teacher need OBJECTIVE",
    ),
    (
      {"ADAPTER": "prefix", "ADAPTER_LENGTH": 3},
      "ADAPTER_LENGTH = 3, but model and teacher need ADAPTER_LENGTH = None",
    ),
    ({"VOCAB_SIZE": 300}, "VOCAB_SIZE = 320, but model and teacher need"),
    ({"VOCABULARY": None}, "was trained with another vocabulary; name that"),
    ({"VOCABULARY": "other"}, "was trained with another vocabulary than"),
  ],
)
def test_what_does_not_fit_is_refused_in_one_line(
  teacher, tmp_path, capsys, macros, words
):
  if macros.get("VOCABULARY") == "other":
    text = "".join(f"{i} red, green and blue birds\n" for i in range(99))
    other = train_prefixed(text, tmp_path, vocab_size=320)
    macros = {"VOCABULARY": other.path}
  capsys.readouterr()
  assert train(teacher, tmp_path / "run", **macros) == 2
  assert words in capsys.readouterr().err.splitlines()[-1]
  assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_keeps_its_teacher(teacher, trained, tmp_path, capsys):
  run = tmp_path / "run"
  shutil.copytree(trained, run)
  assert train(trained, run, TRAIN_STEPS=9, VOCABULARY=None) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert "is not the teacher of the run" in error
  assert str(teacher / "checkpoints" / "step_00000008") in error
