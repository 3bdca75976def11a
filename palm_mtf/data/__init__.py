# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""From documents to batches of token ids, without TensorFlow.

The folders are in the order of the data's way:

  sources/     documents: found, read, held out; text files and SeqIO tasks
  vocabulary/  SentencePiece: text into ids
  tokens/      the ids of all documents on disk, in shards
  batches/     rows of ids, their order, and the rows of a step
  statistics/  figures of the documents, on the side

  data = DataConfig(text_files="text/*.txt", ...)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=4096)
  corpus = load_corpus(model_dir, data, vocabulary, sequence_length, seed)
  batches = corpus.batches(BatchSizes(16))
  batches.batch(step)  # {"inputs", "targets", ...}: [batch, length]
"""
