# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""From text files to batches of token ids, without TensorFlow.

In the order of the way: files.py and documents.py read text and hold some out,
vocabulary.py and vocabulary_training.py turn text into ids, tokens.py and
token_store.py keep the ids on disk, batches.py and permutation.py cut and
shuffle them, statistics.py measures them.

  vocabulary = load_vocabulary(model_dir, data, vocab_size=4096)
  store = load_tokens(model_dir, data, vocabulary=vocabulary,
                      sequence_length=256, batch_size=16)
  batches = Batches(store.train.tokens, 256, batch_size=16, seed=0)
  batches.batch(step)  # {"inputs", "targets"}: [batch, length], int32
"""

from palm_mtf.data.batches import Batches, validation_batches
from palm_mtf.data.statistics import unigram_entropy
from palm_mtf.data.token_store import Split, TokenStore
from palm_mtf.data.tokens import load_tokens
from palm_mtf.data.vocabulary import Vocabulary, load_vocabulary

__all__ = [
  "Batches",
  "Split",
  "TokenStore",
  "Vocabulary",
  "load_tokens",
  "load_vocabulary",
  "unigram_entropy",
  "validation_batches",
]
