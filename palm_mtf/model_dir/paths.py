# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The paths in the MODEL_DIR of a run or of a sweep."""

import os
import re

_STEP = re.compile(r"step_(\d{8,})")


class ModelDir:
  """The paths in one MODEL_DIR; the folder need not exist."""

  def __init__(self, path: str):
    self.path = path
    # All settings of the run as a gin file, which other commands can read.
    self.config = os.path.join(path, "config.gin")
    # The default of CACHE_DIR, a folder with the tokens of the documents.
    self.tokens = os.path.join(path, "tokens")
    # Folders step_00000200/ with manifest.json and TensorFlow's files.
    self.checkpoints = os.path.join(path, "checkpoints")
    # JSON lines with metrics. TensorBoard's events.* are in the same folder.
    self.metrics = os.path.join(path, "metrics.jsonl")
    # JSON: log ratios of the reference model for pairs of answers.
    self.reference = os.path.join(path, "reference.json")
    # The default of TEACHER_CACHE, a folder with what teachers have found.
    self.teacher = os.path.join(path, "teacher")
    # JSON lines with the continuations of PROMPTS.
    self.samples = os.path.join(path, "samples.jsonl")
    # JSON lines with texts of the model that ASSERTIONS flagged.
    self.flagged = os.path.join(path, "flagged.jsonl")
    # JSON lines with each loss spike, and the step that training rewound to.
    self.rewinds = os.path.join(path, "rewinds.jsonl")
    # JSON lines: the record of a run of learners (learners/record.py).
    self.merges = os.path.join(path, "merges.jsonl")
    # Folder of the audits of volunteers (learners/audit.py).
    self.audits = os.path.join(path, "audits")
    # Folders step_00000200/ with answers and metrics of SeqIO tasks.
    self.evaluations = os.path.join(path, "eval")
    # Folder of files: which SeqIO examples the training documents contain.
    self.contamination = os.path.join(self.evaluations, "contamination")
    # Files step_00000200.*: where the time of a step in TRACE_STEPS goes.
    self.traces = os.path.join(path, "traces")
    # If CHIP names a known chip, the output of `palm_mtf plan --json`.
    self.plan = os.path.join(path, "plan.json")
    self.report = os.path.join(path, "report.html")
    # The lock that a training process holds (lock.py).
    self.lock = os.path.join(path, "trainer.lock")

  @property
  def vocabulary(self) -> str:
    """Path of the vocabulary that the run trained, or `import` copied."""
    trained, copied = (
      os.path.join(self.path, x) for x in ("vocabulary.model", "tokenizer.json")
    )
    is_copied = os.path.exists(copied) and not os.path.exists(trained)
    return copied if is_copied else trained

  def checkpoint(self, step: int) -> str:
    """Returns the folder of a step's checkpoint."""
    return os.path.join(self.checkpoints, step_name(step))

  def trace(self, step: int) -> str:
    """Returns the path of a traced step's files, without file extensions."""
    return os.path.join(self.traces, step_name(step))


class SweepDir:
  """The paths in a sweep's MODEL_DIR; the folder need not exist."""

  def __init__(self, path: str):
    self.path = path
    # The defaults of VOCABULARY and CACHE_DIR, which all runs share.
    self.vocabulary = ModelDir(path).vocabulary
    self.tokens = ModelDir(path).tokens
    # Folder with a MODEL_DIR per run, named after the run.
    self.runs = os.path.join(path, "runs")
    # The table of all runs as JSON and CSV; the JSON also has the scaling law.
    self.results = os.path.join(path, "sweep.json")
    self.table = os.path.join(path, "sweep.csv")

  def run(self, name: str) -> str:
    """Returns the MODEL_DIR of a run."""
    return os.path.join(self.runs, name)

  def settings(self, name: str) -> str:
    """Returns the path of the gin file that a run started with."""
    return os.path.join(self.run(name), "sweep.gin")

  def outcome(self, name: str) -> str:
    """Returns the path of the file that says how a run ended."""
    return os.path.join(self.run(name), "outcome.txt")

  def log(self, name: str) -> str:
    """Returns the path of the file with everything that a run printed."""
    return os.path.join(self.run(name), "train.log")


def step_name(step: int) -> str:
  """Returns the name of a step's file or folder."""
  return f"step_{step:08d}"


def step_of(path: str) -> int | None:
  """Returns the step in the name of a file or folder, such as "step_00000200".

  Returns None for all other names, such as "step_00000200.damaged".
  """
  match = _STEP.fullmatch(os.path.basename(path))
  return int(match[1]) if match else None
