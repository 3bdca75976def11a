# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Spikes are detected, noise is not; a stopped run repeats its rewind.

quickstart_curve.json has the loss and the gradient norm of each of the
600 steps of recipes/quickstart.gin with LOG_STEPS = 1.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import find_checkpoints
from palm_mtf.checkpoints.variables import CheckpointReader
from palm_mtf.config import WatchConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.data.batches.corpus import Batches
from palm_mtf.errors import UserError
from palm_mtf.training.loss_spikes import Rewind, SpikeDetector, SpikePolicy
from tests import runs
from tests.checkpoint_files import steps_of, write

CURVE = pathlib.Path(__file__).parent / "quickstart_curve.json"
REWIND = WatchConfig(spike_policy="rewind", spike_rewinds=1)


def spikes_in(losses, norms):
  """Returns the number of steps done at each detected spike."""
  detector = SpikeDetector()
  pairs = zip(losses, norms, strict=True)
  return [
    step for step, pair in enumerate(pairs, 1) if detector.sees_spike(*pair)
  ]


def quickstart():
  curve = json.loads(CURVE.read_text())
  return np.array(curve["loss"]), np.array(curve["grad_norm"])


def noisy(losses, noise, seed):
  rng = np.random.default_rng(seed)
  return losses * np.exp(noise * rng.standard_normal(len(losses)))


def palm_curve(seed, num_steps=4000, noise=0.03, until=1000):
  """Returns a warm-up and a power law with noise that batches later reduce."""
  step = np.arange(num_steps)
  losses = 1.6 + 9.0 * (1 + step / 5) ** -0.45
  scale = np.where(step < num_steps // 2, noise, noise / np.sqrt(2))
  losses = noisy(losses, scale, seed)
  return losses[:until], noisy(np.full(num_steps, 0.5), 0.3, seed)[:until]


@pytest.mark.parametrize(
  "curve", [quickstart(), *(palm_curve(i, until=3000) for i in range(2))]
)
def test_the_quickstart_warm_up_decay_noise_and_a_batch_ramp_are_no_spikes(
  curve,
):
  assert not spikes_in(*curve)


@pytest.mark.parametrize("curve", [quickstart(), palm_curve(0)])
@pytest.mark.parametrize("start", [120, 300, 550])
def test_a_loss_that_jumps_is_detected_within_five_steps(curve, start):
  losses, norms = (np.copy(x) for x in curve)
  losses[start : start + 30] += 3.0
  assert start + 2 <= spikes_in(losses, norms)[0] <= start + 5


def test_a_smaller_jump_is_detected_if_the_gradients_jump_too():
  losses, norms = palm_curve(3)
  losses[500:520] *= np.exp(0.03 * 5)
  assert not spikes_in(losses, norms)
  norms[500:520] *= 50
  assert 502 <= spikes_in(losses, norms)[0] <= 508


def test_neither_gradients_nor_one_or_two_bad_batches_are_a_spike():
  losses, norms = palm_curve(4)
  norms[500:520] *= 1000
  assert not spikes_in(losses, norms)
  losses, norms = palm_curve(5)
  losses[[500, 502, 900]] = 50
  norms[[500, 502, 900]] = 1e6
  assert not spikes_in(losses, norms)


def test_the_detector_survives_json_bit_for_bit():
  losses, norms = palm_curve(6, num_steps=400)
  losses[300:310] += 2
  expected = spikes_in(losses, norms)
  detector, seen = SpikeDetector(), []
  for step, pair in enumerate(zip(losses, norms, strict=True), 1):
    detector = SpikeDetector(json.loads(json.dumps(detector.seen)))
    if detector.sees_spike(*pair):
      seen.append(step)
  assert expected and seen == expected


def test_rewinds_are_bounded_and_the_last_spike_is_logged(capsys):
  done = Rewind(step=5, loss=9.0, usual_loss=2.0, to_step=1, skipped=[1, 300])
  losses, norms = palm_curve(7, num_steps=300)
  losses[200:] = 20.0
  for rewinds, expected in (([], [203]), ([done], [])):
    watch = SpikePolicy(REWIND, None, rewinds)
    seen = [
      step
      for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
      if watch.sees_spike({"loss": loss, "grad_norm": norm})
    ]
    assert seen[:1] == expected
  error = capsys.readouterr().err
  assert error.count("because there were 1 rewinds already") == 1


@pytest.mark.parametrize(
  ("damaged", "expected"),
  [([], 20), ([20], 10), ([10, 20], 40), ([10, 20, 40], 120)],
)
def test_a_rewind_goes_to_a_checkpoint_that_can_be_read_and_removes_none(
  damaged, expected, tmp_path
):
  steps = [10, 20, 40, 120]
  for step in steps:
    path = write(tmp_path, step).path
    if step in damaged:
      pathlib.Path(path, "weights.data").write_text("weight5")
  policy = SpikePolicy(REWIND, None)
  for _ in range(110):
    policy.sees_spike({"loss": 2.0, "grad_norm": 1.0})
  sizes = BatchSizes([[0, 4]])
  back, (rewind,) = policy.rewind(str(tmp_path), 133, 9.0, sizes)
  assert back.manifest.step == rewind.to_step == expected
  assert steps_of(tmp_path) == steps


def test_a_rewind_without_any_whole_checkpoint_is_an_error(tmp_path):
  path = write(tmp_path, 20).path
  pathlib.Path(path, "weights.data").write_text("weight5")
  with pytest.raises(UserError, match="none of its 1 checkpoints is whole"):
    SpikePolicy(REWIND, None).rewind(str(tmp_path), 133, 9.0, None)
  assert steps_of(tmp_path) == [20]


BAD_ROWS = range(4 * 130, 4 * 140)
SETTINGS = {
  "SPIKE_POLICY": "rewind",
  "SPIKE_SKIP_STEPS": 120,
  "CHECKPOINT_STEPS": 20,
  "KEEP_CHECKPOINTS": 20,
  "LOG_STEPS": 1,
  "EVAL_STEPS": 1000,
  "PROMPTS": [],
}


@pytest.fixture
def bad_batches(monkeypatch):
  """Replaces the tokens of BAD_ROWS by noise, so that the loss spikes."""
  read = Batches.batch

  def batch(self, step, *part):
    result = read(self, step, *part)
    rows = self._skips.rows(4 * step + np.arange(4), self._sizes)
    if rows[0] in BAD_ROWS:
      rng = np.random.default_rng(rows[0])
      noise = rng.integers(256, 320, size=result["targets"].shape)
      result["targets"] = noise.astype(np.int32)
    return result

  monkeypatch.setattr(Batches, "batch", batch)


def check_same_run(one, other, step):
  runs.assert_same_tensors(one, other, step)
  a, b = (find_checkpoints(str(x))[-1].manifest for x in (one, other))
  # The hash of the earlier checkpoint depends on TRAIN_STEPS, which differs.
  assert dataclasses.replace(a, parent=b.parent) == b
  assert a.parent["checkpoint"] == b.parent["checkpoint"]


@pytest.mark.slow
def test_a_spike_is_gone_after_a_rewind_even_if_a_signal_comes_in_its_step(
  corpus, tmp_path, bad_batches, capsys, monkeypatch
):
  once = tmp_path / "once"
  real = SpikePolicy.sees_spike

  def interrupted(self, metrics):
    if spike := real(self, metrics):
      os.kill(os.getpid(), signal.SIGTERM)
    return spike

  with monkeypatch.context() as patched:
    patched.setattr(SpikePolicy, "sees_spike", interrupted)
    code = runs.run("train", corpus, once, **SETTINGS, TRAIN_STEPS=150)
  assert code == 128 + signal.SIGTERM
  error = capsys.readouterr().err
  assert "stopped by SIGTERM" in error and "loss spike" not in error
  opened, open_files = [], CheckpointReader.open
  monkeypatch.setattr(
    CheckpointReader,
    "open",
    lambda reader, prefix: opened.append(prefix) or open_files(reader, prefix),
  )
  assert runs.run("train", corpus, once, **SETTINGS, TRAIN_STEPS=150) == 0
  # The resumed run reads the newest checkpoint, and the rewind an older one.
  steps = [os.path.basename(os.path.dirname(x)) for x in opened]
  assert steps == ["step_00000120", "step_00000020"]
  error = capsys.readouterr().err
  assert "loss spike at step 133" in error
  assert (
    f"back by 113 steps to {once}/checkpoints/step_00000020; resuming without "
    "the batches 33 to 152 (as with SKIP_STEPS = [[33, 152]])" in error
  )
  metrics = runs.read_metrics(once)
  assert [line["step"] for line in metrics] == list(range(1, 151))
  assert max(line["loss"] for line in metrics[100:]) < 2
  newest = find_checkpoints(str(once))[-1].manifest
  assert newest.data["SKIP_STEPS"] == [[33, 152]]
  assert newest.next_row == (150 + 120) * runs.SETTINGS["GLOBAL_BATCH_SIZE"]
  (rewind,) = newest.data["spikes"]["rewinds"]
  assert rewind["step"] == 133 and rewind["to_step"] == 20
  (line,) = (once / "rewinds.jsonl").read_text().splitlines()
  assert json.loads(line) == rewind


@pytest.mark.slow
def test_a_stopped_run_repeats_a_rewind(corpus, tmp_path, bad_batches, capsys):
  once, stopped = tmp_path / "once", tmp_path / "stopped"
  assert runs.run("train", corpus, once, **SETTINGS, TRAIN_STEPS=150) == 0
  capsys.readouterr()
  # Stop before the spike; kill after the rewind, before a checkpoint.
  for steps in (125, 150):
    runs.run("train", corpus, stopped, **SETTINGS, TRAIN_STEPS=steps)
  assert capsys.readouterr().err.count("loss spike at step 133") == 1
  check_same_run(once, stopped, 150)
  for path in sorted((stopped / "checkpoints").iterdir())[1:]:
    shutil.rmtree(path)
  runs.run("train", corpus, stopped, **SETTINGS, TRAIN_STEPS=150)
  assert capsys.readouterr().err.count("loss spike at step 133") == 1
  check_same_run(once, stopped, 150)


@pytest.mark.slow
def test_a_rewind_in_stages_has_the_bits_of_one_mesh(
  corpus, tmp_path, bad_batches, capsys
):
  settings = {**SETTINGS, "NUM_LAYERS": 2, "NUM_MICROBATCHES": 2}
  whole, staged = tmp_path / "whole", tmp_path / "staged"
  for folder, stages in ((whole, 1), (staged, 2)):
    here = {"STAGES": stages, "TRAIN_STEPS": 150}
    assert runs.run("train", corpus, folder, **settings, **here) == 0
    assert capsys.readouterr().err.count("loss spike at step") == 1
  runs.assert_same_tensors(whole, staged, 150)
  found, expected = (
    [runs.without_times(x) for x in runs.read_metrics(y)]
    for y in (staged, whole)
  )
  assert found == expected
  rewinds = (whole / "rewinds.jsonl").read_text()
  assert (staged / "rewinds.jsonl").read_text() == rewinds


@pytest.mark.slow
def test_skip_steps_skips_batches_and_inspect_shows_it(
  corpus, tmp_path, capsys
):
  settings = {"TRAIN_STEPS": 6, "SKIP_STEPS": [[2, 4]], "LOG_STEPS": 1}
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  newest = find_checkpoints(str(tmp_path))[-1].manifest
  assert newest.data["SKIP_STEPS"] == [[2, 4]]
  hashes = []
  for skips, steps in (([], [0, 1, 5, 6]), ([[2, 4]], [0, 1, 2, 3])):
    capsys.readouterr()
    macros = {"SKIP_STEPS": skips, "INSPECT_STEPS": steps}
    arguments = runs.arguments("data inspect", corpus, tmp_path, **macros)
    assert runs.main([*arguments, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    hashes.append([json.loads(line)["hash"] for line in lines])
  assert hashes[0] == hashes[1]
