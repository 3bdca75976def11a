# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs with batch ramps, other pods, all packings, and the cache."""

import gc
import os
import signal
import threading

import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import find_checkpoints, newest_whole
from palm_mtf.checkpoints.variables import CheckpointReader
from palm_mtf.generation.inference import sessions
from palm_mtf.machine.host_memory import free_garbage
from palm_mtf.runtime.client.client import Client
from palm_mtf.training import supervisor
from palm_mtf.training.job import TrainJob
from palm_mtf.training.loop import TrainLoop
from tests import runs
from tests.seqio_testing import registries_restored
from tools.bench.cases.memory import (
  add_task,
  make_macros,
  spikes_in_every_second_step,
)


@pytest.mark.slow
def test_a_batch_ramp_changes_the_size_at_its_step_and_survives_a_stop(
  corpus, tmp_path
):
  ramp = [[0, 2], [3, 4]]
  once, stopped = tmp_path / "once", tmp_path / "stopped"
  settings = {"GLOBAL_BATCH_SIZE": ramp, "LOG_STEPS": 1, "TRAIN_STEPS": 5}
  settings["PROMPTS"] = []
  assert runs.run("train", corpus, once, **settings) == 0
  tokens = [m["global_batch_tokens"] // 32 for m in runs.read_metrics(once)]
  assert tokens == [2, 2, 2, 4, 4]
  # Stop at the last step of a size, and one step later, within the next size.
  for steps in (3, 4, 5):
    runs.run("train", corpus, stopped, **{**settings, "TRAIN_STEPS": steps})
  runs.assert_same_tensors(once, stopped, 5)


@pytest.mark.slow
def test_a_batch_ramp_in_stages_has_the_bits_of_one_mesh(corpus, tmp_path):
  """With dropout and validation; one run in stages is stopped and resumed."""
  settings = {"GLOBAL_BATCH_SIZE": [[0, 2], [3, 8], [5, 4]], "LOG_STEPS": 1}
  settings |= {"NUM_LAYERS": 2, "NUM_MICROBATCHES": 2, "DROPOUT": 0.1}
  settings |= {"EVAL_STEPS": 2, "PROMPTS": []}
  whole, staged, stopped = (
    tmp_path / x for x in ("whole", "staged", "stopped")
  )
  for folder, stages, steps in (
    (whole, 1, 7),
    (staged, 2, 7),
    (stopped, 2, 5),
    (stopped, 2, 7),
  ):
    here = {"STAGES": stages, "TRAIN_STEPS": steps}
    assert runs.run("train", corpus, folder, **settings, **here) == 0
    if steps == 7:
      runs.assert_same_tensors(whole, folder, steps)
  found, expected = (
    [runs.without_times(x) for x in runs.read_metrics(y)]
    for y in (staged, whole)
  )
  assert found == expected


def test_a_new_batch_size_reads_and_writes_no_checkpoint(
  corpus, tmp_path, monkeypatch
):
  """The variables stay on their devices, in one session."""
  sessions, opened = [], []
  make, open_files = Client.__init__, CheckpointReader.open
  monkeypatch.setattr(
    Client, "__init__", lambda *args: sessions.append(make(*args))
  )
  monkeypatch.setattr(
    CheckpointReader,
    "open",
    lambda reader, prefix: opened.append(prefix) or open_files(reader, prefix),
  )
  settings = {"GLOBAL_BATCH_SIZE": [[0, 2], [2, 4], [4, 2]], "TRAIN_STEPS": 6}
  settings |= {"CHECKPOINT_STEPS": 6, "PROMPTS": []}
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  assert len(sessions) == 1
  assert opened == []
  (checkpoint,) = find_checkpoints(str(tmp_path))
  assert checkpoint.manifest.step == 6


@pytest.mark.slow
def test_a_run_continues_with_other_pods_and_microbatches(
  corpus, finished, tmp_path, capsys
):
  for steps, num_pods, num_microbatches in ((3, 1, 2), (6, 2, 1), (12, 2, 2)):
    macros = {
      "TRAIN_STEPS": steps,
      "NUM_PODS": num_pods,
      "NUM_MICROBATCHES": num_microbatches,
      "PROMPTS": [],
    }
    assert runs.run("train", corpus, tmp_path, **macros) == 0
  expected = runs.read_metrics(finished)
  seen = {line["step"]: line for line in runs.read_metrics(tmp_path)}
  for line in expected:
    other = runs.without_times(seen[line["step"]])
    line = runs.without_times(line)
    sent = other.pop("dcn_bytes")
    assert line.pop("dcn_bytes") == 0
    assert line.pop("num_pods") == 1
    assert (sent > 0) == (other.pop("num_pods") == 2) == (line["step"] > 3)
    assert other == pytest.approx(line, rel=1e-3)
  # The same variables, and the same numbers except for rounding.
  tensors, other = (runs.read_tensors(d, 12) for d in (finished, tmp_path))
  assert {n: t.shape for n, t in other.items()} == {
    n: t.shape for n, t in tensors.items()
  }
  capsys.readouterr()
  losses = []
  for num_pods, num_microbatches in ((1, 1), (2, 2)):
    macros = {"NUM_PODS": num_pods, "NUM_MICROBATCHES": num_microbatches}
    assert runs.run("evaluate", corpus, tmp_path, **macros) == 0
    losses.append(
      capsys.readouterr().out.split("validation_loss")[1].split()[0]
    )
  assert losses[0] == losses[1]


@pytest.mark.slow
def test_no_object_is_left_of_samples_evaluations_and_rewinds(
  corpus, tmp_path, monkeypatch
):
  """Counts before each program is built; the bench measures memory."""
  counts = []

  def count():
    free_garbage()
    kinds = [type(x) for x in gc.get_objects()]
    counts.append(
      {
        "graphs": sum(issubclass(x, tf.Graph) for x in kinds),
        "sessions": sum(issubclass(x, tf.Session) for x in kinds),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
      }
    )

  monkeypatch.setattr(supervisor, "free_garbage", count)
  monkeypatch.setattr(sessions, "free_garbage", count)
  macros: dict[str, object] = {}
  for kind in ("rewinds", "task evaluations", "samples"):
    macros = make_macros(kind, 4) | macros | {"PROMPTS": ["one two"]}
  with registries_restored(), spikes_in_every_second_step():
    add_task()
    assert runs.run("train", corpus, tmp_path, **macros) == 0
  # Per step, a loop, tasks and samples count, before and after weights are
  # loaded. The last step's samples have no loop.
  assert len(counts) == 5 * 4
  # A count may be lower than before, because a file was open at that time.
  for earlier, later in zip(counts[5:10], counts[10:15], strict=True):
    assert all(later[kind] <= earlier[kind] for kind in earlier), counts


@pytest.mark.parametrize(
  "packing",
  [
    pytest.param("joined_masked", marks=pytest.mark.slow),
    "packed",
    pytest.param("single", marks=pytest.mark.slow),
  ],
)
def test_trains_resumes_and_evaluates_with_every_packing(
  corpus, tmp_path, packing, capsys
):
  settings = {"PACKING": packing, "TRAIN_STEPS": 4, "PROMPTS": []}
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  settings["TRAIN_STEPS"] = 8
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  first, *_, last = runs.read_metrics(tmp_path)
  assert last["loss"] < first["loss"]
  assert runs.run("evaluate", corpus, tmp_path, **settings) == 0
  evaluated = capsys.readouterr().out.splitlines()[-4:]
  loss = dict(line.split() for line in evaluated)["validation_loss"]
  assert float(loss) == pytest.approx(last["validation_loss"], abs=1e-4)


def test_training_reads_the_cache_when_it_is_there_and_says_so(
  corpus, finished, tmp_path, capsys
):
  cache = tmp_path / "cache"
  vocabulary = str(finished / "vocabulary.model")
  settings = {"CACHE_DIR": str(cache), "VOCABULARY": vocabulary}
  assert runs.run("data cache", corpus, tmp_path / "a", **settings) == 0
  settings["PROMPTS"] = []
  assert runs.run("train", corpus, tmp_path / "b", **settings) == 0
  assert (
    f"tokens of text_files are read from {cache}" in capsys.readouterr().err
  )
  assert not list((tmp_path / "b" / "tokens").glob("text_files-*"))
  runs.assert_same_tensors(finished, tmp_path / "b", 12)


@pytest.mark.parametrize(
  ("owner", "name", "step"),
  [
    pytest.param(TrainLoop, "_validate", 2, marks=pytest.mark.slow),
    pytest.param(TrainLoop, "_validate", 4, marks=pytest.mark.slow),  # the last
    (TrainLoop, "_save", 3),
    pytest.param(TrainJob, "write_samples", 2, marks=pytest.mark.slow),
  ],
)
def test_a_signal_while_a_run_evaluates_saves_or_samples_stops_it_after_that(
  owner, name, step, corpus, tmp_path, monkeypatch, capsys
):
  settings = {"TRAIN_STEPS": 4, "CHECKPOINT_STEPS": 3, "EVAL_STEPS": 2}
  if name == "write_samples":
    settings["SAMPLE_STEPS"] = 2
  else:
    settings["PROMPTS"] = []
  model_dir = tmp_path / "lr[0.01]"  # TensorFlow takes this for a pattern
  real, sent = getattr(owner, name), []

  def interrupted(self, *given):
    now = self._step if owner is TrainLoop else given[0].manifest.step
    if now == step and not sent:
      sent.append(step)
      os.kill(os.getpid(), signal.SIGTERM)
    return real(self, *given)

  with monkeypatch.context() as patched:
    patched.setattr(owner, name, interrupted)
    assert runs.run("train", corpus, model_dir, **settings) == 128 + 15
  out, err = capsys.readouterr()
  assert out == ""
  assert "stopped by SIGTERM" in err
  assert newest_whole(str(model_dir)).manifest.step == step
  assert runs.run("train", corpus, model_dir, **settings) == 0
  assert [x["step"] for x in runs.read_metrics(model_dir)][-1] == 4
