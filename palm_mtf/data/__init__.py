# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The path from documents to batches of token ids, without TensorFlow.

In the order of that path:

  sources/        documents of text files and SeqIO tasks, some held out
  statistics/     sizes, near duplicates and contamination of a corpus
  filters/        removal of short, poor, duplicate or contaminated documents
  vocabulary/     SentencePiece models: trained, loaded, measured
  tokens/         the ids of all documents on disk, in shards
  batches/        documents packed into rows; rows mixed, shuffled, batched
  worker_pool.py  worker processes for batches of documents

  data = DataConfig(text_files="text/*.txt", ...)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=4096)
  corpus = load_corpus(model_dir, data, vocabulary, sequence_length, seed)
  batches = corpus.batches(BatchSizes(16))
  batches.batch(step)  # {"inputs", "targets", ...}: [batch, length]
"""
