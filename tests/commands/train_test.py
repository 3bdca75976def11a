# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs: learning, resuming, stopping, and refusing what cannot work."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shlex
import shutil
import signal
import threading
import types
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.commands import train as train_module
from palm_mtf.config import ModelConfig
from palm_mtf.data.vocabulary.training import train_vocabulary
from tests import processes, runs
from tests.processes import wait_until


def copy_of(model_dir, tmp_path):
  """Copies a run; training locks a run, which other workers read."""
  return shutil.copytree(model_dir, tmp_path / "copy")


def test_metrics_hold_every_documented_field_of_every_logged_step(finished):
  lines = runs.read_metrics(finished)
  assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
  for line in lines:
    fields = (
      "loss z_loss learning_rate grad_norm tokens global_batch_tokens "
      "tokens_per_sec step_secs data_wait_secs checkpoint_wait_secs mfu hfu "
      "num_pods dcn_bytes host_memory_bytes"
    )
    rms = {
      f"{of}_rms/{kind}"
      for of in ("update", "parameter")
      for kind in ("embedding", "norm", "attention", "mlp")
    }
    assert {*fields.split(), *rms} <= set(line)
    assert line["tokens"] == line["step"] * 4 * 32
    assert 10**8 < line["host_memory_bytes"] < 10**11
    assert line["global_batch_tokens"] == 4 * 32
    assert line["learning_rate"] == pytest.approx(0.01)
    rate = line["global_batch_tokens"] / line["step_secs"]
    assert line["tokens_per_sec"] == pytest.approx(rate)
  evaluated = [line["step"] for line in lines if "validation_loss" in line]
  assert evaluated == [6, 12]
  entropies = {x["unigram_entropy"] for x in lines if x["step"] in (6, 12)}
  assert len(entropies) == 1 and 2 < entropies.pop() < 6


def test_a_run_keeps_its_plan_as_the_command_prints_it(finished, palm_mtf):
  kept = json.loads((finished / "plan.json").read_text())
  _, out, _ = palm_mtf("plan", f"--gin_file={finished}/config.gin", "--json")
  assert kept == json.loads(out)
  assert kept["run"]["tokens"] == 12 * 4 * 32


@pytest.fixture(scope="module")
def sampled(corpus, tmp_path_factory):
  """A run that has saved and sampled every third step."""
  model_dir = tmp_path_factory.mktemp("sampled")
  assert runs.run("train", corpus, model_dir, SAMPLE_STEPS=3) == 0
  return model_dir


@pytest.mark.slow
def test_samples_on_the_way_are_kept_and_change_no_bit(finished, sampled):
  lines = (sampled / "samples.jsonl").read_text().splitlines()
  assert [json.loads(line)["step"] for line in lines] == [3, 6, 9, 12]
  # Without SAMPLE_STEPS only the last samples are written.
  assert lines[-1:] == (finished / "samples.jsonl").read_text().splitlines()
  last = json.loads(lines[-1])
  assert last["prompt"] == "one two" and last["continuation"]
  runs.assert_same_tensors(finished, sampled, 12)


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_sampled_samples_that_step(
  corpus, sampled, tmp_path
):
  """The run saved the checkpoint of the step, but not its samples."""
  killed = runs.copy_until(sampled, tmp_path / "killed", 9)
  lines = (sampled / "samples.jsonl").read_bytes().splitlines(keepends=True)
  (killed / "samples.jsonl").write_bytes(b"".join(lines[:2]))  # of 3 and 6
  assert runs.run("train", corpus, killed, SAMPLE_STEPS=3) == 0
  assert (killed / "samples.jsonl").read_bytes() == b"".join(lines)


def test_tensorboard_shows_what_metrics_jsonl_holds(finished):
  (path,) = finished.glob("events.out.tfevents.*")
  seen = {}
  for event in tf.compat.v1.train.summary_iterator(str(path)):
    for value in event.summary.value:
      seen[event.step, value.tag] = value.simple_value
  for line in runs.read_metrics(finished):
    for name in set(line) - {"step"}:
      assert seen[line["step"], name] == pytest.approx(line[name])


def test_tensorflow_reads_every_variable_of_a_checkpoint_whole(finished):
  settings = {
    name.lower(): value
    for name, value in runs.SETTINGS.items()
    if name.lower() in ModelConfig.__dataclass_fields__
  }
  shapes = parameter_shapes(ModelConfig(**settings))
  tensors = runs.read_tensors(finished, 12)
  expected = {
    f"{name}{slot}": shape
    for name, shape in shapes.items()
    for slot in ("", "/second_moment", "/momentum")
  }
  assert {n: t.shape for n, t in tensors.items()} == expected


def test_resumed_run_ends_with_the_bits_of_one_in_one_go(
  corpus, finished, tmp_path, capsys
):
  """The run is killed after checkpoint 4, and then stopped after step 7."""
  model_dir = runs.copy_until(finished, tmp_path / "killed", 4)
  with open(model_dir / "metrics.jsonl", "a") as file:
    file.write('{"step": 14, "lo')  # killed in the middle of a line
  for steps in (7, 12):
    settings = {"TRAIN_STEPS": steps, "PROMPTS": []}
    assert runs.run("train", corpus, model_dir, **settings) == 0
  runs.assert_same_tensors(finished, model_dir, 12)
  # Metrics after the checkpoint of the killed run are written again.
  once, again = (
    [runs.without_times(x) for x in runs.read_metrics(d) if x["step"] != 7]
    for d in (finished, model_dir)
  )
  assert again == once
  assert "kernels" not in capsys.readouterr().err  # the kernels are the same


def test_a_resume_with_other_kernels_says_so_before_the_first_step(
  corpus, finished, tmp_path, monkeypatch, capsys
):
  model_dir = copy_of(finished, tmp_path)
  monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
  settings = {"TRAIN_STEPS": 13, "PROMPTS": [], "LOG_STEPS": 1}
  assert runs.run("train", corpus, model_dir, **settings) == 0
  before, _, _ = capsys.readouterr().err.partition("step 13/")
  (line,) = (x for x in before.splitlines() if "kernels" in x)
  assert line.endswith(
    "warning: from step 12 on, other kernels compute the numbers: "
    "TF_ENABLE_ONEDNN_OPTS: 0, before not set"
  )
  # So that the next resume is silent, the checkpoint has the other kernels.
  manifest = newest_whole(str(model_dir)).manifest
  assert manifest.step == 13
  assert manifest.kernels["TF_ENABLE_ONEDNN_OPTS"] == "0"


@pytest.mark.slow
def test_a_resume_without_the_compiler_says_that_the_numbers_are_others(
  corpus, finished, tmp_path
):
  model_dir = copy_of(finished, tmp_path)
  flags = runs.arguments("train", corpus, model_dir, TRAIN_STEPS=13, PROMPTS=[])
  run = processes.python(
    *("-m", "palm_mtf", *flags),
    variables={"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)},
  )
  assert run.returncode == 0, run.stderr
  before, _, _ = run.stderr.partition("step 13/")
  assert (
    "kernels compute the numbers: operations in C++: none, before" in before
  )


@pytest.mark.slow
def test_a_flipped_bit_is_named_and_the_steps_since_are_trained_again(
  corpus, finished, tmp_path, capsys
):
  model_dir = copy_of(finished, tmp_path)
  damaged = model_dir / "checkpoints" / "step_00000012"
  (path,) = damaged.glob("weights.data*")
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  assert runs.run("train", corpus, model_dir) == 0
  said = capsys.readouterr().err
  assert f"DAMAGED checkpoint {damaged}: {path.name} does not hold" in said
  assert "resuming from" in said and "step_00000008" in said
  once, again = (
    runs.read_files(d / "checkpoints") for d in (finished, model_dir)
  )
  aside = f"step_00000012.damaged/{path.name}"
  assert again[aside] == bytes(content), "what was damaged is kept as it is"
  assert again.items() >= once.items(), "bit for bit, manifests too"


@pytest.mark.slow
def test_a_finished_run_trains_no_more_and_reports_what_evaluate_finds(
  corpus, finished, tmp_path, palm_mtf
):
  finished = copy_of(finished, tmp_path)
  before = runs.read_files(finished / "checkpoints")
  train = runs.arguments("train", corpus, finished)
  code, first, said = palm_mtf(*train)
  assert (code, palm_mtf(*train)[1]) == (0, first)
  assert runs.read_files(finished / "checkpoints") == before
  evaluate = runs.arguments("evaluate", corpus, finished)
  results = json.loads(palm_mtf(*evaluate, "--json")[1])
  loss = results["validation_loss"]
  assert f"validation loss  {loss:.4f}" in first
  assert results["step"] == 12
  assert results["perplexity"] == pytest.approx(np.exp(loss))
  # The first command that training proposes continues its prompt.
  _, _, told = said.partition("next, for example:\n")
  program, *arguments = shlex.split(told.splitlines()[0])
  assert (program, arguments[0]) == ("palm_mtf", "generate")
  _, out, _ = palm_mtf(*arguments, "--json")
  prompts = [json.loads(line)["prompt"] for line in out.splitlines()]
  assert prompts == ["one two"] * 3


def test_the_commands_that_a_run_proposes_can_be_pasted_for_any_path(capsys):
  model_dir = "runs/a b/it's"
  run = types.SimpleNamespace(prompts=["one 'two"], train_steps=4)
  train_module._suggest_commands(model_dir, run)
  _, _, told = capsys.readouterr().err.partition("next, for example:\n")
  generate, evaluate, report, train, _ = map(shlex.split, told.splitlines())
  assert generate[1:6] == [
    "generate",
    "--model_dir",
    model_dir,
    "--prompt",
    "one 'two",
  ]
  assert evaluate[1:] == ["evaluate", f"--gin_file={model_dir}/config.gin"]
  assert report[1:] == ["report", model_dir]
  assert train[2] == f"--gin_file={model_dir}/config.gin"


@dataclasses.dataclass(frozen=True)
class OneStep:
  """A run of one step, in a thread."""

  model_dir: pathlib.Path
  code: int
  out: str
  synced: list[str]  # names of files in the order in which they were synced


@pytest.fixture(scope="module")
def one_step(corpus, tmp_path_factory):
  model_dir, synced, real = tmp_path_factory.mktemp("one_step"), [], os.fsync

  def note(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    names = [x for x in path.split("/") if x.startswith(("step_", ".partial_"))]
    path = path.removesuffix(".partial")
    name = names[-1].removeprefix(".partial_") if names else path
    synced.append(name.rpartition("_")[0] if names else os.path.basename(path))
    real(descriptor)

  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stdout(io.StringIO()) as out,
    futures.ThreadPoolExecutor() as pool,
  ):
    patch.setattr(os, "fsync", note)
    settings = {"TRAIN_STEPS": 1, "PROMPTS": []}
    run = pool.submit(runs.run, "train", corpus, model_dir, **settings)
    return OneStep(model_dir, run.result(), out.getvalue(), synced)


def test_a_run_trains_in_any_thread(one_step):
  assert one_step.code == 0
  (line,) = runs.read_metrics(one_step.model_dir)
  assert line["step"] == 1


def test_loss_above_the_unigram_entropy_is_not_called_learning(one_step):
  said = "learned          nothing from context yet; train longer"
  assert said in one_step.out


def test_whatever_a_resume_needs_is_on_the_disk_before_the_checkpoint(one_step):
  """After a power failure, a file that was not synced may be empty."""
  before = one_step.synced[: one_step.synced.index("step_00000001")]
  assert {
    "vocabulary.model",
    "config.gin",
    "metrics.jsonl",
    "train-00000.npy",
    "train-00000.documents.npy",
    "shard-00000.json",
    "manifest.json",
    one_step.model_dir.name,
    "tokens",
  } <= {*before}


@pytest.mark.slow
def test_learns_from_context_what_no_unigram_model_can(
  corpus, tmp_path, capsys
):
  """The corpus counts from one to ten, so each word determines the next."""
  assert runs.run("train", corpus, tmp_path, TRAIN_STEPS=150, LOG_STEPS=50) == 0
  out = capsys.readouterr().out
  learned = float(out.split("learned")[1].split()[0])
  assert learned > 1.0
  assert "one two three four five six" in out


ENDLESS = {"TRAIN_STEPS": 100_000, "CHECKPOINT_STEPS": 100_000, "PROMPTS": []}


def has_evaluated(model_dir):
  metrics = model_dir / "metrics.jsonl"
  return metrics.exists() and "validation_loss" in metrics.read_text()


def test_a_second_trainer_is_refused_and_a_signal_stops_the_first_cleanly(
  corpus, tmp_path, capsys
):
  ended, codes = threading.Event(), []

  def meet():
    while not has_evaluated(tmp_path):
      if ended.wait(0.01):
        return
    try:
      codes.append(runs.run("train", corpus, tmp_path))
    finally:
      os.kill(os.getpid(), signal.SIGTERM)

  thread = threading.Thread(target=meet)
  thread.start()
  codes.append(runs.run("train", corpus, tmp_path, **ENDLESS))
  ended.set()
  thread.join()
  # The exit code makes `train && evaluate` stop.
  assert codes == [2, 128 + signal.SIGTERM]
  said = capsys.readouterr().err
  assert f"process {os.getpid()} on" in said
  assert "stopped by SIGTERM" in said
  assert "run the same command to resume" in said
  newest = newest_whole(str(tmp_path)).manifest.step
  assert newest >= runs.read_metrics(tmp_path)[-1]["step"] >= 6


@pytest.mark.slow
def test_a_closed_terminal_stops_a_run_that_nobody_reads_and_all_is_saved(
  corpus, tmp_path
):
  """For example `train 2>&1 | tee log` in a terminal that is closed."""
  settings = {"CHECKPOINT_STEPS": 100_000, "PROMPTS": [], "EVAL_STEPS": 2}
  settings |= {"NUM_PODS": 2, "PODS": "local_servers"}
  settings |= {"TRAIN_STEPS": 100_000, "LOG_STEPS": 1}
  arguments = runs.arguments("train", corpus, tmp_path, **settings)
  process = processes.start(
    "-m", "palm_mtf", *arguments, start_new_session=True
  )
  try:
    for line in process.stderr:
      if "  validation loss " in line:  # of step 2
        process.stderr.close()
        break
    logged = len(runs.read_metrics(tmp_path))
    wait_until(lambda: len(runs.read_metrics(tmp_path)) > logged + 5, process)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(60) == 128 + signal.SIGHUP
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
  newest = newest_whole(str(tmp_path)).manifest.step
  assert newest == runs.read_metrics(tmp_path)[-1]["step"] > logged


WIDER = (
  {"D_FF": 128},
  "has layer_000/mlp/wi_gate [32, 64], the model wants [32, 128]; "
  "layer_000/mlp/wi [32, 64], the model wants [32, 128]; layer_000/mlp/wo "
  "[64, 32], the model wants [128, 32]: it is of another model",
)


@pytest.mark.parametrize(
  ("command", "macros", "message"),
  [
    *((x, *WIDER) for x in ("train", "evaluate", "generate", "score --text=a")),
    (
      "train",
      {"NUM_LAYERS": 2},
      "has layer_001/norm/scale nothing, the model wants [32]",
    ),
  ],
)
def test_model_dir_of_another_model_is_refused_and_left_as_it_was(
  command, macros, message, corpus, finished, tmp_path, capsys
):
  finished = copy_of(finished, tmp_path)
  before = runs.read_files(finished)
  assert runs.run(command, corpus, finished, **macros) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert runs.read_files(finished) == before


def test_model_dir_of_another_vocabulary_is_refused_and_left_as_it_was(
  corpus, finished, tmp_path, capsys
):
  other = runs.write_corpus(tmp_path / "other")
  (other / "0.txt").write_text("quite another text " * 100)
  finished = copy_of(finished, tmp_path)
  vocabulary = str(tmp_path / "other.model")
  texts = (path.read_text() for path in other.iterdir())
  train_vocabulary(texts, 320, path=vocabulary)
  before = runs.read_files(finished)
  assert runs.run("train", corpus, finished, VOCABULARY=vocabulary) == 2
  assert "was trained with another vocabulary" in capsys.readouterr().err
  assert runs.read_files(finished) == before


@pytest.mark.parametrize("command", ["evaluate", "generate", "score --text=a"])
def test_no_checkpoint_is_an_error_and_trains_no_vocabulary(
  command, corpus, tmp_path, capsys
):
  assert runs.run(command, corpus, tmp_path) == 2
  assert "holds no checkpoint" in capsys.readouterr().err
  assert not list(tmp_path.iterdir())
