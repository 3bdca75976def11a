# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every path of a MODEL_DIR.

config.gin, operative_config.gin   the settings, as asked and as gin gave them
vocabulary.model                   SentencePiece's, if the run trained it
tokens/                            token ids, without CACHE_DIR
checkpoints/step_00000200/         manifest.json and TensorFlow's files
metrics.jsonl                      numbers by step; events.* for TensorBoard
samples.jsonl                      continuations of PROMPTS
rewinds.jsonl                      loss spikes, and how far training went back
eval/step_00000200/                answers and metrics of SeqIO tasks
traces/step_00000200.*             steps that were traced
report.html                        the page of `palm_mtf report`
trainer.lock                       held by the process that trains
"""

import dataclasses
import os
import re

_STEP = re.compile(r"step_(\d{8,})")


@dataclasses.dataclass(frozen=True)
class ModelDir:
  """The paths of one MODEL_DIR.

  Attributes:
    path: the folder, which need not exist.
  """

  path: str

  @property
  def config(self) -> str:
    """The gin file that gives the run's settings again."""
    return os.path.join(self.path, "config.gin")

  @property
  def vocabulary(self) -> str:
    """The SentencePiece model that the run trained."""
    return os.path.join(self.path, "vocabulary.model")

  @property
  def tokens(self) -> str:
    """The folder of token stores."""
    return os.path.join(self.path, "tokens")

  @property
  def checkpoints(self) -> str:
    """The folder of checkpoints."""
    return os.path.join(self.path, "checkpoints")

  @property
  def metrics(self) -> str:
    """JSON lines: numbers by step."""
    return os.path.join(self.path, "metrics.jsonl")

  @property
  def samples(self) -> str:
    """JSON lines: continuations of PROMPTS."""
    return os.path.join(self.path, "samples.jsonl")

  @property
  def rewinds(self) -> str:
    """JSON lines: loss spikes."""
    return os.path.join(self.path, "rewinds.jsonl")

  @property
  def evaluations(self) -> str:
    """The folder of what SeqIO tasks gave, a folder a step."""
    return os.path.join(self.path, "eval")

  @property
  def traces(self) -> str:
    """The folder of traced steps."""
    return os.path.join(self.path, "traces")

  @property
  def report(self) -> str:
    """The page of `palm_mtf report`."""
    return os.path.join(self.path, "report.html")

  @property
  def lock(self) -> str:
    """The file that the process that trains holds."""
    return os.path.join(self.path, "trainer.lock")

  def checkpoint(self, step: int) -> str:
    """Returns the folder of the checkpoint of a step."""
    return os.path.join(self.checkpoints, step_name(step))

  def evaluation(self, step: int) -> str:
    """Returns the folder of what tasks gave after a step."""
    return os.path.join(self.evaluations, step_name(step))

  def trace(self, step: int) -> str:
    """Returns the path of a traced step's files, without their endings."""
    return os.path.join(self.traces, step_name(step))


def step_name(step: int) -> str:
  """Returns what the file or folder of a step is called."""
  return f"step_{step:08d}"


def step_of(path: str) -> int | None:
  """Returns the step that a file or folder is named by; None for no such name.

  Endings, as of "step_00000200.damaged", make it another name.
  """
  match = _STEP.fullmatch(os.path.basename(path))
  return int(match[1]) if match else None
