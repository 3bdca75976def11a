# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""From documents to batches of token ids, without TensorFlow.

In the order of the way: files.py, reading.py, documents.py and seqio_sources.py
find documents and hold some out (sources.py says what a document and a source
are, open_sources.py opens those of a run); vocabulary.py and
vocabulary_training.py turn text into ids, encoding.py by many processes;
token_store.py keeps the ids on disk, in shards (token_shards.py,
token_array.py) that token_cache.py finds again; rows.py fills rows, mixing.py,
permutation.py and batches.py choose those of a step; corpus.py is all of it for
one run.

  vocabulary = load_vocabulary(model_dir, data, vocab_size=4096)
  corpus = load_corpus(model_dir, data, vocabulary, sequence_length, seed)
  batches = corpus.batches(BatchSizes(16))
  batches.batch(step)  # {"inputs", "targets", ...}: [batch, length]
"""
