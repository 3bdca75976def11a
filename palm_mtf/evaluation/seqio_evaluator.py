# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks whose text is encoded with the vocabulary of a run."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.config.evaluation import TaskEvalConfig
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

# After TensorFlow, which _tf.py keeps silent.
import seqio  # isort: skip


def evaluator_of(
  task: seqio.Task,
  vocabulary: Vocabulary,
  config: TaskEvalConfig,
  sequence_length: int,
) -> seqio.Evaluator:
  """Returns an evaluator that has read the examples; its logger is KeptOutputs.

  Args:
    task: task to evaluate.
    vocabulary: vocabulary of the run.
    config: split and number of the examples.
    sequence_length: tokens in a row, for preprocessors that cut token ids.
  """
  # Lengths are given where a step cannot do without: SeqIO cuts features to
  # them, while this model cuts the beginning of inputs (answers.py).
  lengths = None
  for step in task.preprocessors:
    parameter = inspect.signature(step).parameters.get("sequence_length")
    if parameter and parameter.default is inspect.Parameter.empty:
      lengths = dict.fromkeys(task.output_features, sequence_length)
  with _registered(_with_vocabulary(task, vocabulary)) as name:
    return seqio.Evaluator(
      name,
      _Unconverted(),
      eval_split=config.eval_split,
      sequence_length=lengths,
      num_examples=config.eval_examples,
      logger_cls=[KeptOutputs],
      log_dir=".",
      async_compute_metrics=False,
    )


@contextlib.contextmanager
def _registered(task: seqio.Task) -> Iterator[str]:
  """Registers a task for a moment, for seqio.Evaluator to look it up."""
  name = f"palm_mtf_evaluates:{task.name}"
  seqio.TaskRegistry.add_provider(name, task)
  try:
    yield name
  finally:
    seqio.TaskRegistry.remove(name)


def _with_vocabulary(task: seqio.Task, vocabulary: Vocabulary) -> seqio.Task:
  """Returns the task with a vocabulary in place of its own."""
  # All preprocessors run, and find the run's vocabulary in place of the task's,
  # which is never loaded.
  own = _RunVocabulary(vocabulary)
  return task.replace(
    output_features={
      name: feature
      if isinstance(feature.vocabulary, seqio.PassThroughVocabulary)
      else dataclasses.replace(feature, vocabulary=own)
      for name, feature in task.output_features.items()
    }
  )


class _RunVocabulary(seqio.Vocabulary):
  """The run's vocabulary with SeqIO's methods."""

  def __init__(self, vocabulary: Vocabulary):
    super().__init__()
    self._own = vocabulary

  @property
  def eos_id(self) -> int:
    return self._own.eod_id

  @property
  def unk_id(self) -> None:
    return None

  @property
  def _base_vocab_size(self) -> int:
    return self._own.size

  def _encode(self, s: str) -> list[int]:
    return self._own.encode(s)

  def _decode(self, ids: Sequence[int]) -> str:
    return self._own.decode(ids)

  # In tf.data's graphs text and ids cross over to SentencePiece in Python.
  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text: bytes) -> np.ndarray:
      (ids,) = self._own.encode_arrays([text.decode("utf-8")], 1)
      return ids.astype(np.int32)

    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    ids.set_shape([None])
    return ids

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(ids: np.ndarray) -> bytes:
      return self._own.decode(ids).encode()

    text = tf.numpy_function(decode, [ids], tf.string, stateful=False)
    text.set_shape([])
    return text


# Evaluator asks for one; TaskAnswers makes rows of the examples.
class _Unconverted(seqio.PassThroughFeatureConverter):
  """A feature converter that leaves examples as they are."""

  TASK_FEATURES = MODEL_FEATURES = PACKING_FEATURE_DTYPES = {}  # noqa: RUF012
  pack = False


class KeptOutputs(seqio.loggers.Logger):
  """A logger of SeqIO that keeps targets and inferences."""

  def __init__(self, output_dir: str):
    super().__init__(output_dir)
    self.targets: Sequence[Any] | None = None
    self.inferences: dict[str, Any] = {}

  def __call__(self, *, targets=None, inferences=None, **unused: object):
    """Keeps both, as postprocessed by the task."""
    self.targets, self.inferences = targets, inferences or {}
