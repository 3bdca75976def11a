# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns documents into batches of token ids; only SeqIO needs TensorFlow.

Its parts, in the order in which documents pass through them:

  sources/        reads text files and SeqIO tasks; holds out some documents
  ngrams.py       finds near duplicates and contamination of documents
  filters/        drops short, low-quality, duplicate or contaminated documents
  vocabulary/     trains SentencePiece models, and opens vocabularies
  tokens/         stores the token ids of all documents on disk, in shards
  batches/        packs documents into rows; mixes, shuffles and batches rows
  worker_pool.py  runs worker processes for batches of documents

  config = Config(data=DataConfig(text_files="text/*.txt", ...), ...)
  vocabulary = load_vocabulary(model_dir, config.data, vocab_size=4096)
  corpus = corpus_of_run(model_dir, config, vocabulary)
  batches = corpus.batches(BatchSizes(16))
  batches.batch(step)["inputs"]  # [batch, length]
"""
