# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run is given, all of it checked, and how it ends."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from palm_mtf.checkpoints.locate import NamedWeights
from palm_mtf.checkpoints.manifest import Checkpoint, Manifest
from palm_mtf.config import Config
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.inference.continue_prompts import continue_prompts
from palm_mtf.model_dir.samples import keep_samples
from palm_mtf.training.loss_spikes import Rewind

if TYPE_CHECKING:  # imports TensorFlow, which the checks do not need
  from palm_mtf.evaluation.evaluator import TaskEvaluation

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
  """All that a run needs, checked.

  Attributes:
    model_dir: where checkpoints and metrics go.
    config: every setting, ACTIVATION_DTYPE resolved.
    vocabulary: vocabulary of the tokens.
    corpus: the tokens of training and of validation.
    manifest: manifest of the checkpoints to write, but for what changes with
    the step.
    checkpoint: where to resume from, or None.
    unigram_entropy: entropy of the validation tokens, nats a token, for the
    records.
    task_evaluation: the tasks of EVAL_TASKS, if training evaluates on them.
    initial_weights: weights of another run, to start from where there is none.
    rewinds: that are later than `checkpoint`.
  """

  model_dir: str
  config: Config
  vocabulary: Vocabulary
  corpus: Corpus
  manifest: Manifest
  checkpoint: Checkpoint | None
  unigram_entropy: float
  task_evaluation: "TaskEvaluation | None" = None
  initial_weights: NamedWeights | None = None
  rewinds: Sequence[Rewind] = ()

  @property
  def step(self) -> int:
    """Steps that are done."""
    return self.checkpoint.manifest.step if self.checkpoint else 0

  def keep_samples(self, checkpoint: Checkpoint) -> list[str]:
    """Continues PROMPTS by a checkpoint; returns and keeps the texts."""
    prompts = self.config.run.prompts
    texts = continue_prompts(checkpoint, self.config, self.vocabulary)
    keep_samples(self.model_dir, checkpoint.manifest.step, prompts, texts)
    return texts

  def evaluate_tasks(self, checkpoint: Checkpoint) -> dict[str, float]:
    """Returns the metrics of a checkpoint by name, and says them."""
    found = {}
    if self.task_evaluation:
      for outcome in self.task_evaluation.evaluate(checkpoint):
        found |= outcome.numbers
      texts = (f"{name} {value:.4f}" for name, value in found.items())
      _logger.info(f"step {checkpoint.manifest.step}  " + "  ".join(texts))
    return found


@dataclasses.dataclass(frozen=True)
class TrainOutcome:
  """How a run ended.

  Attributes:
    checkpoint: the newest; None if it was stopped before its first step.
    validation_loss: nats a token at the end; None before.
    stopped_by: the name of the signal that stopped it, or "".
    rewinds: all so far, if it ended for the last of them; else none.
  """

  checkpoint: Checkpoint | None
  validation_loss: float | None
  stopped_by: str
  rewinds: Sequence[Rewind] = ()
