# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The job of a training run, and the events that end a training loop."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from palm_mtf.checkpoints.initial_weights import NamedWeights
from palm_mtf.checkpoints.manifest import Checkpoint, Manifest
from palm_mtf.config import Config
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.generation.inference.prompts import continue_prompts
from palm_mtf.machine.kernels import difference
from palm_mtf.model_dir.samples import write_samples
from palm_mtf.training.loss_spikes import Rewind

if TYPE_CHECKING:  # imports TensorFlow, which the checks do not need
  from palm_mtf.evaluation.evaluator import TaskEvaluation

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
  """Input of a training loop; prepare.py has checked it."""

  model_dir: str
  config: Config  # ACTIVATION_DTYPE is resolved
  vocabulary: Vocabulary
  corpus: Corpus
  manifest: Manifest  # the fields that all checkpoints share
  checkpoint: Checkpoint | None  # checkpoint of this run to resume from
  unigram_entropy: float  # of validation tokens, nats per token
  task_evaluation: "TaskEvaluation | None" = None  # on EVAL_TASKS
  initial_weights: NamedWeights | None = None  # used without a checkpoint
  # Checkpoint of another run, whose step, weights and optimizer state this run
  # starts from; None to start at step 0.
  initial_state: Checkpoint | None = None
  rewinds: Sequence[Rewind] = ()  # all rewinds, if `checkpoint` lacks some

  @property
  def start(self) -> Checkpoint | None:
    """The checkpoint that the next loop continues; None to begin at step 0."""
    return self.checkpoint or self.initial_state

  @property
  def step(self) -> int:
    """Number of training steps done."""
    return self.start.manifest.step if self.start else 0

  def record_kernels(self, kernels: Mapping[str, str]) -> "TrainJob":
    """Returns the job with `kernels` in the manifest of further checkpoints.

    Logs a warning if other kernels computed the checkpoint to resume from.
    `kernels` are the versions and settings from `kernels_here`.
    """
    before = self.start.manifest.kernels if self.start else {}
    if changes := difference(kernels, before):
      _logger.warning(
        f"from step {self.step:,} on, other kernels compute the numbers: "
        f"{changes}"
      )
    manifest = dataclasses.replace(self.manifest, kernels=kernels)
    return dataclasses.replace(self, manifest=manifest)

  def write_samples(self, checkpoint: Checkpoint) -> list[str]:
    """Samples continuations of PROMPTS; writes them to files; returns them."""
    prompts = self.config.run.prompts
    texts = continue_prompts(checkpoint, self.config, self.vocabulary)
    write_samples(self.model_dir, checkpoint.manifest.step, prompts, texts)
    return texts

  def evaluate_tasks(
    self, checkpoint: Checkpoint, answered: Callable[[], None]
  ) -> dict[str, float]:
    """Evaluates a checkpoint on EVAL_TASKS; returns and logs metrics by name.

    Calls `answered` after each answer of the model.
    """
    found = {}
    if self.task_evaluation:
      for outcome in self.task_evaluation.evaluate(checkpoint, answered):
        found |= outcome.numbers
      texts = (f"{name} {value:.4f}" for name, value in found.items())
      _logger.info(f"step {checkpoint.manifest.step}  " + "  ".join(texts))
    return found


@dataclasses.dataclass(frozen=True)
class Finished:
  """The run has done all TRAIN_STEPS steps."""

  checkpoint: Checkpoint
  validation_loss: float  # nats per token


@dataclasses.dataclass(frozen=True)
class Stopped:
  """The run received a stop signal, and has saved its last step."""

  checkpoint: Checkpoint | None  # None before the first step
  signal_name: str


@dataclasses.dataclass(frozen=True)
class Moved:
  """The manager has other servers for the run, such as after a drain."""

  checkpoint: Checkpoint | None  # of the step that has just ended
  rewinds: Sequence[Rewind] = ()  # the checkpoint has all


@dataclasses.dataclass(frozen=True)
class Spike:
  """The loss has spiked, and training rewinds."""

  checkpoint: Checkpoint | None  # to rewind to; None for the initial weights
  rewinds: Sequence[Rewind]  # all rewinds of the run
