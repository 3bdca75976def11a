# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports, scores and exports pretrained models as a user does, by commands.

Each command runs in another process, which frees its memory.
"""

import importlib.util
import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from tests import processes

FLOAT32 = '--gin.ACTIVATION_DTYPE="float32"'
PROMPTS = [
  "The capital of France is",
  "Once upon a time, there was a little girl who",
  "Water boils at a temperature of",
  "def fibonacci(n):\n",
  "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
]


def marks_of(package: str, secs: int) -> list[pytest.MarkDecorator]:
  """Returns the marks of tests of a package's model, with their time limit."""
  return [
    pytest.mark.peers,
    pytest.mark.timeout(secs),
    pytest.mark.skipif(
      not importlib.util.find_spec(package),
      reason=f"{package}, which holds a GGUF file, is not installed",
    ),
  ]


def command(*words: object) -> str:
  """Runs a command of palm_mtf; returns its output."""
  result = processes.python("-m", "palm_mtf", *words)
  assert result.returncode == 0, result.stderr
  return result.stdout


def records(*words: object) -> list[dict]:
  """Returns the JSON lines that a command prints."""
  lines = command(*words, "--json").splitlines()
  return [json.loads(line) for line in lines]


def export(model_dir: Path, name: str, path: Path, *more: str) -> Path:
  """Exports a model in the format `name`, with more flags; returns the path."""
  flags = ["--model_dir", model_dir, f"--format={name}", *more]
  command("export", *flags, "--output", path)
  return path


def make_text(vocabulary: Vocabulary, num_tokens: int) -> str:
  """Returns the beginning of Python's help that has so many tokens."""
  topics = pydoc_data.topics.topics
  text = "\n\n".join(topics[name] for name in sorted(topics))
  found = vocabulary.decode(vocabulary.encode(text[:40_000])[:num_tokens])
  assert len(vocabulary.encode(found)) == num_tokens
  return found


def score(model_dir: Path, text: str, folder: Path) -> dict:
  """Returns log p of a text as `palm_mtf score` prints it."""
  path = folder / "text.txt"
  path.write_text(text)
  flags = ["--model_dir", model_dir, "--input", path, FLOAT32]
  (found,) = records("score", *flags)
  return found


def generate(model_dir: Path, folder: Path) -> list[str]:
  """Returns the greedy text of 64 tokens after each of PROMPTS, in float32."""
  path = folder / "prompts.jsonl"
  path.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in PROMPTS))
  greedy = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=64", FLOAT32]
  flags = ["--model_dir", model_dir, "--input", path, *greedy]
  return [x["continuation"] for x in records("generate", *flags)]


def open_weights(model_dir: Path) -> Any:
  """Returns a reader of an imported model's checkpoint."""
  return tf.train.load_checkpoint(
    str(model_dir / "checkpoints" / "step_00000000" / "weights")
  )


def assert_same_model(found: Path, expected: Path, *names: str) -> None:
  """Compares parameters bit for bit, config.gin and other files."""
  for name in ("config.gin", *names):
    assert (found / name).read_bytes() == (expected / name).read_bytes(), name
  # Read one tensor at a time, to save memory.
  ours, theirs = map(open_weights, (found, expected))
  shapes = theirs.get_variable_to_shape_map()
  assert ours.get_variable_to_shape_map() == shapes
  for name in shapes:
    assert np.array_equal(ours.get_tensor(name), theirs.get_tensor(name)), name
