# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A vocabulary as TensorFlow operations: texts to ids and back in a graph.

The operations are those of tensorflow_text, which holds the SentencePiece
model in the graph; the ids are those of data/vocabulary/vocabulary.py.
"""

from palm_mtf._tf import silent_unless_it_fails, tf2
from palm_mtf.data.vocabulary.vocabulary import SPACE_MARK, Vocabulary


class TextCoder(tf2.Module):
  """Encodes and decodes batches of texts."""

  def __init__(self, vocabulary: Vocabulary):
    super().__init__("text_coder")
    # Registers the operations; takes seconds.
    import tensorflow_text

    with silent_unless_it_fails():
      self._model = tensorflow_text.SentencepieceTokenizer(
        model=vocabulary.model, out_type=tf2.int32
      )
    self._has_bytes = vocabulary.has_bytes
    self._space_mark_ids = vocabulary.encode(SPACE_MARK)

  def encode(self, texts: tf2.Tensor) -> tf2.RaggedTensor:
    """Returns the ids of each text, [batch, (tokens)] int32, without [eod].

    Args:
      texts: [batch], string.
    """
    if not self._has_bytes:
      return self._model.tokenize(texts)
    # SentencePiece would decode U+2581 as a space: one of the text is encoded
    # apart, as its three bytes, in front of each segment but a text's first.
    segments = tf2.strings.split(texts, SPACE_MARK)
    ids = self._model.tokenize(segments.flat_values)
    first = segments.row_starts()
    num_marks = tf2.tensor_scatter_nd_update(
      tf2.ones_like(segments.flat_values, tf2.int64),
      first[:, tf2.newaxis],
      tf2.zeros_like(first),
    )
    marks = tf2.RaggedTensor.from_row_lengths(
      tf2.tile(
        self._space_mark_ids, [tf2.cast(tf2.reduce_sum(num_marks), tf2.int32)]
      ),
      num_marks * len(self._space_mark_ids),
    )
    ids = tf2.concat([marks, ids], 1)
    return segments.with_flat_values(ids).merge_dims(1, 2)

  def decode(self, ids: tf2.RaggedTensor) -> tf2.Tensor:
    """Returns the text of each row of ids [batch, (tokens)]; see Vocabulary."""
    return self._model.detokenize(ids)
