# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The paths of a MODEL_DIR, of a run or of a sweep."""

import os
import re

_STEP = re.compile(r"step_(\d{8,})")


class ModelDir:
  """The paths of one MODEL_DIR, which need not exist."""

  def __init__(self, path: str):
    self.path = path
    # Every setting as a gin file, from which another command starts.
    self.config = os.path.join(path, "config.gin")
    # SentencePiece's model, if the run trained one.
    self.vocabulary = os.path.join(path, "vocabulary.model")
    # Folder of token stores, if there is no CACHE_DIR.
    self.tokens = os.path.join(path, "tokens")
    # Folders step_00000200/ with manifest.json and TensorFlow's files.
    self.checkpoints = os.path.join(path, "checkpoints")
    # JSON lines by step. TensorBoard's events.* are in the same folder.
    self.metrics = os.path.join(path, "metrics.jsonl")
    # JSON lines: continuations of PROMPTS.
    self.samples = os.path.join(path, "samples.jsonl")
    # JSON lines: loss spikes, and how far training went back.
    self.rewinds = os.path.join(path, "rewinds.jsonl")
    # Folders step_00000200/ with answers and metrics of SeqIO tasks.
    self.evaluations = os.path.join(path, "eval")
    # Which examples of SeqIO tasks the training text contains.
    self.contamination = os.path.join(self.evaluations, "contamination")
    # Files step_00000200.* of traced steps.
    self.traces = os.path.join(path, "traces")
    # The output of `palm_mtf plan --json` for the run, if it has a CHIP.
    self.plan = os.path.join(path, "plan.json")
    # The page of `palm_mtf report`.
    self.report = os.path.join(path, "report.html")
    # Held by the process that trains (lock.py).
    self.lock = os.path.join(path, "trainer.lock")

  def checkpoint(self, step: int) -> str:
    """Returns the folder of the checkpoint of a step."""
    return os.path.join(self.checkpoints, step_name(step))

  def evaluation(self, step: int) -> str:
    """Returns the folder of the task evaluations of a step."""
    return os.path.join(self.evaluations, step_name(step))

  def trace(self, step: int) -> str:
    """Returns the path of a traced step's files, without their endings."""
    return os.path.join(self.traces, step_name(step))


class SweepDir:
  """The paths of the MODEL_DIR of a sweep, which need not exist."""

  def __init__(self, path: str):
    self.path = path
    # Vocabulary and tokens for all runs, unless their settings name others.
    self.vocabulary = ModelDir(path).vocabulary
    self.tokens = ModelDir(path).tokens
    # MODEL_DIRs of the runs, by their names.
    self.runs = os.path.join(path, "runs")
    # The table of all runs; sweep.json has the scaling law, too.
    self.results = os.path.join(path, "sweep.json")
    self.table = os.path.join(path, "sweep.csv")

  def run(self, name: str) -> str:
    """Returns the MODEL_DIR of a run."""
    return os.path.join(self.runs, name)

  def settings(self, name: str) -> str:
    """Returns the path of the gin file that a run began with."""
    return os.path.join(self.run(name), "sweep.gin")

  def outcome(self, name: str) -> str:
    """Returns the path of the file that says how a run ended."""
    return os.path.join(self.run(name), "outcome.txt")

  def log(self, name: str) -> str:
    """Returns the path of what a run printed."""
    return os.path.join(self.run(name), "train.log")


def step_name(step: int) -> str:
  """Returns the name of a step's file or folder."""
  return f"step_{step:08d}"


def step_of(path: str) -> int | None:
  """Returns the step in the name of a file or folder, None for other names.

  "step_00000200.damaged" is another name.
  """
  match = _STEP.fullmatch(os.path.basename(path))
  return int(match[1]) if match else None
