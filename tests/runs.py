# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts real runs of the command line on a small corpus, for the tests."""

import contextlib
import io
import json
import pathlib
import shutil
import subprocess

import numpy as np
import tensorflow as tf

from palm_mtf.cli.main import main
from tests import processes

WORDS = "one two three four five six seven eight nine ten".split()

SETTINGS = {
  "NUM_LAYERS": 1,
  "D_MODEL": 32,
  "NUM_HEADS": 2,
  "D_KV": 16,
  "D_FF": 64,
  "VOCAB_SIZE": 320,
  "SEQUENCE_LENGTH": 32,
  "ACTIVATION_DTYPE": "float32",
  "LEARNING_RATE": 0.01,
  "VALIDATION_SHARE": 0.2,
  "GLOBAL_BATCH_SIZE": 4,
  "NUM_PODS": 1,
  "TRAIN_STEPS": 12,
  "LOG_STEPS": 2,
  "EVAL_STEPS": 6,
  "EVAL_BATCHES": 2,
  "CHECKPOINT_STEPS": 4,
  "KEEP_CHECKPOINTS": 10,
  "CHIP": "a100",
  "PROMPTS": ["one two"],
  "SAMPLE_TOKENS": 8,
  "SAMPLE_STEPS": None,
}


# Fields that differ between any two runs.
TIMES = {
  "tokens_per_sec",
  "step_secs",
  "data_wait_secs",
  "checkpoint_wait_secs",
  "mfu",
  "hfu",
  "host_memory_bytes",
}


def write_corpus(folder: pathlib.Path) -> pathlib.Path:
  """Writes 40 texts of number words that count up; returns their folder."""
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for document in range(40):
    first = rng.integers(10)
    words = [WORDS[(first + i) % 10] for i in range(120)]
    path = folder / f"{document}.txt"
    path.write_text(f"{document}: " + " ".join(words) + "\n")
  return folder


def arguments(
  command: str, corpus: pathlib.Path, model_dir: pathlib.Path, **macros: object
) -> list[str]:
  """Returns the command line of a run with SETTINGS and `macros`."""
  values = {
    **SETTINGS,
    "TEXT_FILES": f"{corpus}/*.txt",
    "MODEL_DIR": str(model_dir),
    **macros,
  }
  return [
    *command.split(),
    "--gin_file=recipes/quickstart.gin",
    *(f"--gin.{name}={value!r}" for name, value in values.items()),
  ]


def run(command: str, corpus, model_dir, **macros: object) -> int:
  """Runs the command in this process; returns its exit code."""
  return main(arguments(command, corpus, model_dir, **macros))


def printed(*arguments: object) -> list[dict]:
  """Runs a command in this process; returns the JSON lines that it prints."""
  with contextlib.redirect_stdout(io.StringIO()) as stdout:
    assert main([str(x) for x in arguments]) == 0
  return [json.loads(x) for x in stdout.getvalue().splitlines()]


def start(command: str, corpus, model_dir, **macros: object):
  """Starts the command in a separate process."""
  flags = arguments(command, corpus, model_dir, **macros)
  return processes.start("-m", "palm_mtf", *flags)


def finish(process: subprocess.Popen) -> str:
  """Waits for a process to end with success; returns its stderr."""
  _, error = process.communicate(timeout=500)
  assert process.returncode == 0, error
  return error


def assert_same_tensors(one, other, step: int) -> None:
  """Raises AssertionError unless two runs have the same bits after a step."""
  assert_same(read_tensors(one, step), read_tensors(other, step))


def assert_same(tensors: dict, others: dict) -> None:
  """Raises AssertionError unless tensors have the same names and bits."""
  assert others.keys() == tensors.keys()
  for name, value in tensors.items():
    np.testing.assert_array_equal(others[name], value, err_msg=name)


def copy_until(
  model_dir: pathlib.Path, folder: pathlib.Path, step: int
) -> pathlib.Path:
  """Copies a run as if it had been killed after the checkpoint of a step."""
  shutil.copytree(model_dir, folder)
  for checkpoint in folder.glob("checkpoints/step_*"):
    if int(checkpoint.name.removeprefix("step_")) > step:
      shutil.rmtree(checkpoint)
  return folder


def read_metrics(model_dir: pathlib.Path) -> list[dict]:
  """Returns the whole lines of metrics.jsonl; a run may be writing another."""
  whole, _, _ = (model_dir / "metrics.jsonl").read_text().rpartition("\n")
  return [json.loads(line) for line in whole.splitlines()]


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns the content of every file below `folder`."""
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


def read_tensors(model_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  """Returns every tensor of a checkpoint, read as any TensorFlow user would."""
  return load(model_dir / "checkpoints" / f"step_{step:08d}" / "weights")


def load(prefix: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns every tensor of a TensorFlow checkpoint."""
  reader = tf.train.load_checkpoint(str(prefix))
  return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def without_times(line: dict) -> dict:
  """Returns a line of metrics.jsonl without the TIMES."""
  # Leaves out host_memory_bytes/pod_0 too.
  return {k: v for k, v in line.items() if k.partition("/")[0] not in TIMES}
