# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The job of a training run, all of it checked, and its outcome."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from palm_mtf.checkpoints.initial_weights import NamedWeights
from palm_mtf.checkpoints.manifest import Checkpoint, Manifest
from palm_mtf.config import Config
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.generation.inference.continue_prompts import continue_prompts
from palm_mtf.machine.kernels import difference
from palm_mtf.model_dir.samples import write_samples
from palm_mtf.training.loss_spikes import Rewind

if TYPE_CHECKING:  # imports TensorFlow, which the checks do not need
  from palm_mtf.evaluation.evaluator import TaskEvaluation

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
  """Input of the training loop."""

  model_dir: str
  config: Config  # with ACTIVATION_DTYPE resolved
  vocabulary: Vocabulary
  corpus: Corpus
  manifest: Manifest  # of checkpoints, but for what changes with the step
  checkpoint: Checkpoint | None  # to resume from
  unigram_entropy: float  # of the validation tokens, nats a token
  task_evaluation: "TaskEvaluation | None" = None  # on EVAL_TASKS
  initial_weights: NamedWeights | None = None  # where there is no checkpoint
  # Of another run, whose step and optimizer go on, before there is an own one.
  initial_state: Checkpoint | None = None
  rewinds: Sequence[Rewind] = ()  # later than `checkpoint`

  @property
  def start(self) -> Checkpoint | None:
    """The checkpoint that the next training loop goes on from."""
    return self.checkpoint or self.initial_state

  @property
  def step(self) -> int:
    """Training steps done."""
    return self.start.manifest.step if self.start else 0

  def computed_by(self, kernels: Mapping[str, str]) -> "TrainJob":
    """Returns the job with a manifest that records what computes.

    Logs a warning if that is not what computed the checkpoint to resume from.

    Args:
      kernels: what computes the next steps (machine/kernels.py).
    """
    before = self.start.manifest.kernels if self.start else {}
    if changes := difference(kernels, before):
      _logger.warning(
        f"from step {self.step:,} on the numbers will be those of other "
        f"kernels: {changes}"
      )
    manifest = dataclasses.replace(self.manifest, kernels=kernels)
    return dataclasses.replace(self, manifest=manifest)

  def write_samples(self, checkpoint: Checkpoint) -> list[str]:
    """Samples continuations of PROMPTS; returns them, and writes them."""
    prompts = self.config.run.prompts
    texts = continue_prompts(checkpoint, self.config, self.vocabulary)
    write_samples(self.model_dir, checkpoint.manifest.step, prompts, texts)
    return texts

  def evaluate_tasks(
    self, checkpoint: Checkpoint, answered: Callable[[], None]
  ) -> dict[str, float]:
    """Evaluates a checkpoint on EVAL_TASKS; returns metrics by name.

    Args:
      checkpoint: checkpoint of this run.
      answered: function that is called after each answer of the model.
    """
    found = {}
    if self.task_evaluation:
      for outcome in self.task_evaluation.evaluate(checkpoint, answered):
        found |= outcome.numbers
      texts = (f"{name} {value:.4f}" for name, value in found.items())
      _logger.info(f"step {checkpoint.manifest.step}  " + "  ".join(texts))
    return found


@dataclasses.dataclass(frozen=True)
class TrainOutcome:
  """The end of a run, or of one of its training loops."""

  checkpoint: Checkpoint | None  # the newest; None before the first step
  validation_loss: float | None  # nats a token; None before TRAIN_STEPS
  stopped_by: str  # name of the signal, or ""
  rewinds: Sequence[Rewind] = ()  # all so far, if it ended with a spike
