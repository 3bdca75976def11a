# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=saved_model: a SavedModel that continues and scores texts."""

import math

from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
  SentencePieceVocabulary,
)
from palm_mtf.errors import UserError
from palm_mtf.export.trained_model import Export, Reader, TrainedModel


def make_saved_model(trained: TrainedModel) -> Export:
  """Makes a SavedModel, which includes the tokenizer.

  Raises UserError if no TensorFlow operation can run the tokenizer.
  """
  config, vocabulary = trained.config, trained.vocabulary
  if not isinstance(vocabulary, SentencePieceVocabulary):
    raise UserError(
      f"{vocabulary.path}: a SavedModel encodes texts in TensorFlow, which has "
      "only SentencePiece; use another --format."
    )

  def write(path: str, read: Reader) -> None:
    from palm_mtf._tf import tf2
    from palm_mtf.export.saved_model.text_model import TextModel
    from palm_mtf.model_dir.atomic_files import as_os_errors

    length = trained.model.sequence_length
    # The CPU has memory for all weights; serving may use other devices.
    with tf2.device("CPU:0"):
      text_model = TextModel(
        trained.model,
        read,
        vocabulary,
        start_id=trained.start_id,
        row_start=trained.row_start,
        adds_start=config.data.add_start,
        stride=config.evaluation.stride or max(length // 2, 1),
      )
      signatures = text_model.make_signatures(
        config.decode,
        sample_tokens=config.run.sample_tokens,
        seed=config.run.seed,
      )
      with as_os_errors():
        tf2.saved_model.save(text_model, path, signatures)

  shapes = parameter_shapes(trained.model)
  num_bytes = 4 * sum(map(math.prod, shapes.values()))
  # TensorFlow Serving serves the subfolder with the largest number.
  subfolder = str(trained.checkpoint.manifest.step)
  kind = "a SavedModel that computes in float32"
  return Export(kind, num_bytes, write, subfolder)
