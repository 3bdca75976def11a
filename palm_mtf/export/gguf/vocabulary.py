# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A vocabulary as metadata of GGUF: llama.cpp's tokenizer "llama".

It merges the neighbours whose piece has the best score, as SentencePiece does
in byte-pair encoding, and falls back to bytes. A U+2581 of a text is a space to
it, as in SentencePiece, and not its three bytes, as in vocabulary.py.
"""

import numpy as np

from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.file import Value
from palm_mtf.export.huggingface.tokenizer import read_pieces, why_not_exact

_UNUSED = 5
# The numbers of the other types are SentencePiece's.


def check_vocabulary(vocabulary: Vocabulary) -> None:
  """Raises UserError unless llama.cpp encodes as a vocabulary does."""
  if reason := why_not_exact(vocabulary):
    raise UserError(
      f"{vocabulary.path}: llama.cpp would encode otherwise: {reason}; train a "
      "model with a vocabulary of palm_mtf vocab, or use another --format."
    )


def vocabulary_metadata(
  vocabulary: Vocabulary, *, start_id: int, vocab_size: int
) -> dict[str, Value]:
  """Returns the keys of the tokenizer.

  Args:
    vocabulary: vocabulary that passed `check_vocabulary`.
    start_id: input before the first token of a text.
    vocab_size: rows of the embedding.
  """
  pieces = read_pieces(vocabulary)
  missing = range(len(pieces), vocab_size)  # rows without a piece
  texts = [x.piece for x in pieces] + [f"[UNUSED {i}]" for i in missing]
  scores = [x.score for x in pieces] + [0.0] * len(missing)
  types = [x.type for x in pieces] + [_UNUSED] * len(missing)
  return {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": texts,
    "tokenizer.ggml.scores": np.array(scores, "<f4"),
    "tokenizer.ggml.token_type": np.array(types, "<i4"),
    "tokenizer.ggml.bos_token_id": start_id,
    "tokenizer.ggml.eos_token_id": vocabulary.eod_id,
    "tokenizer.ggml.unknown_token_id": vocabulary.unknown_id,
    "tokenizer.ggml.padding_token_id": vocabulary.eod_id,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.remove_extra_whitespaces": False,
  }
