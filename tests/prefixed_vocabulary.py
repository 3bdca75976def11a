# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that puts a space before each text, as Llama's does."""

import io
import pathlib

import sentencepiece

from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary


def train_prefixed(text: str, folder: pathlib.Path, **settings) -> Vocabulary:
  """Returns a lossless vocabulary of a few merges, written into a folder.

  Args:
    text: text to learn the merges from.
    folder: folder for the file of the model.
    settings: changes to the arguments of SentencePiece's trainer.
  """
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter([text] * 20),
    model_writer=model,
    minloglevel=2,
    **{
      "vocab_size": 320,
      "model_type": "bpe",
      "byte_fallback": True,
      "normalization_rule_name": "identity",
      "remove_extra_whitespaces": False,
      "hard_vocab_limit": False,
      **settings,
    },
  )
  path = folder / "prefixed.model"
  path.write_bytes(model.getvalue())
  return open_vocabulary(str(path))
