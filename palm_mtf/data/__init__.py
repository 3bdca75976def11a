# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The way from documents to batches of token ids, without TensorFlow.

Folders, in the order of that way:

  sources/     documents of text files and SeqIO tasks, training and held out
  statistics/  sizes, near duplicates and contamination of a corpus
  filters/     short, poor and duplicate documents removed
  vocabulary/  SentencePiece: trained, loaded, text to ids and back
  tokens/      the ids of all documents on disk, in shards
  batches/     documents packed into rows; rows mixed, shuffled, in batches
  workers/     worker processes for batches of documents

  data = DataConfig(text_files="text/*.txt", ...)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=4096)
  corpus = load_corpus(model_dir, data, vocabulary, sequence_length, seed)
  batches = corpus.batches(BatchSizes(16))
  batches.batch(step)  # {"inputs", "targets", ...}: [batch, length]
"""
