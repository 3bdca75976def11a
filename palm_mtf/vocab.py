# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf vocab`: trains the vocabulary of a run and measures it.

A run trains its vocabulary by itself; this does only that and says how well it
fits text it was not trained on. The work is in data/vocabulary.py.
"""

import itertools

from palm_mtf.config import DataConfig, PalmConfig
from palm_mtf.data.documents import Corpus
from palm_mtf.data.vocabulary import load_vocabulary
from palm_mtf.data.vocabulary_training import sample_text
from palm_mtf.disk import check_model_dir

_SAMPLE_CHARACTERS = 1 << 20


def vocab(*, model_dir: str, model: PalmConfig, data: DataConfig) -> None:
  """Prints where the vocabulary is, its size and how well it fits.

  Args:
    model_dir: where vocabulary.model is trained, if VOCABULARY is None and it
      is not there yet.
    model: gives VOCAB_SIZE.
    data: gives TEXT_FILES, VOCABULARY and VALIDATION_SHARE.

  Raises:
    UserError: as `load_vocabulary`.
  """
  check_model_dir(model_dir)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  corpus = Corpus(data)
  texts = sample_text(
    (d.text for d in corpus if corpus.is_validation(d)), _SAMPLE_CHARACTERS
  )
  corpus.report_skipped()
  print(f"vocabulary          {vocabulary.path}")
  print(f"pieces              {vocabulary.size:,}")
  print(f"VOCAB_SIZE          {model.vocab_size:,}")
  if not texts:
    print("no document is held out to measure it on (VALIDATION_SHARE)")
    return
  ids = list(itertools.chain(*vocabulary.encode_batch(texts)))
  num_bytes = sum(len(text.encode()) for text in texts)
  print(f"measured on         {num_bytes:,} bytes of held-out text")
  print(f"tokens per byte     {len(ids) / num_bytes:.4f}")
  print(f"bytes per token     {num_bytes / len(ids):.3f}")
  print(
    f"byte pieces         {100 * vocabulary.byte_share(ids):.3f}% of tokens"
  )
