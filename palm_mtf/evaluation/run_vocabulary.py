# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks whose text is encoded with the vocabulary of a run."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

# After TensorFlow, which _tf.py keeps silent.
import seqio  # isort: skip


def with_vocabulary(task: seqio.Task, vocabulary: Vocabulary) -> seqio.Task:
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
