# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Encodes texts to ids, and decodes ids, in a TensorFlow graph.

The operations are from tensorflow_text, and the graph holds the SentencePiece
model. The ids equal the ids of data/vocabulary/vocabulary.py.
"""

from palm_mtf._tf import tf2
from palm_mtf.data.vocabulary.vocabulary import SPACE_MARK, Vocabulary
from palm_mtf.machine.process import silent_unless_it_fails


class TextCoder(tf2.Module):
  """Encodes and decodes batches of texts."""

  def __init__(self, vocabulary: Vocabulary):
    super().__init__("text_coder")
    # Import late, because the import takes seconds.
    import tensorflow_text

    def make_tokenizer(model: bytes) -> tensorflow_text.SentencepieceTokenizer:
      return tensorflow_text.SentencepieceTokenizer(model, tf2.int32)

    with silent_unless_it_fails():
      self._model = self._inside = make_tokenizer(vocabulary.model)
      if vocabulary.inside_model:
        self._inside = make_tokenizer(vocabulary.inside_model)
    self._has_bytes = vocabulary.has_bytes
    self._anchor = vocabulary.anchor
    self._anchor_bytes = len(vocabulary.decode([vocabulary.anchor]).encode())
    ids = range(vocabulary.size)
    self._has_text = [
      bool(vocabulary.is_byte[i] or vocabulary.text_inside(i)) for i in ids
    ]
    self._num_spaces = [vocabulary.piece(i).startswith(SPACE_MARK) for i in ids]
    self._space_mark_ids = vocabulary.encode(SPACE_MARK)

  def encode(self, texts: tf2.Tensor) -> tf2.RaggedTensor:
    """Encodes texts [batch] to int32 ids [batch, (tokens)] without [eod]."""
    if not self._has_bytes:
      return self._model.tokenize(texts)
    # SentencePiece would encode a U+2581 in a text as a space. So split the
    # text there, and put the three byte tokens of U+2581 before each segment
    # except the first.
    segments = tf2.strings.split(texts, SPACE_MARK)
    first = segments.row_starts()
    num_marks = tf2.tensor_scatter_nd_update(
      tf2.ones_like(segments.flat_values, tf2.int64),
      first[:, tf2.newaxis],
      tf2.zeros_like(first),
    )
    ids = self._encode_segments(segments.flat_values, num_marks == 0)
    marks = tf2.RaggedTensor.from_row_lengths(
      tf2.tile(
        self._space_mark_ids, [tf2.cast(tf2.reduce_sum(num_marks), tf2.int32)]
      ),
      num_marks * len(self._space_mark_ids),
    )
    ids = tf2.concat([marks, ids], 1)
    return segments.with_flat_values(ids).merge_dims(1, 2)

  def _encode_segments(
    self, segments: tf2.Tensor, is_first: tf2.Tensor
  ) -> tf2.RaggedTensor:
    if self._inside is self._model:
      return self._model.tokenize(segments)
    # "" has no ids, so each segment gets ids from only one of the tokenizers.
    return tf2.concat(
      [
        self._model.tokenize(tf2.where(is_first, segments, "")),
        self._inside.tokenize(tf2.where(is_first, "", segments)),
      ],
      1,
    )

  def decode(self, ids: tf2.RaggedTensor) -> tf2.Tensor:
    """Decodes ids [batch, (tokens)] to texts [batch]."""
    if self._inside is self._model:
      return self._model.detokenize(ids)
    # The vocabulary puts one space before each text. In decoding, SentencePiece
    # drops only this space, but tensorflow_text's version drops all leading
    # spaces. So keep all spaces in decoding, and then drop this one space.
    shown = tf2.ragged.boolean_mask(ids, tf2.gather(self._has_text, ids))
    spaces = tf2.gather(tf2.cast(self._num_spaces, tf2.int32), shown[:, :1])
    return _cut_start(self._decode_inside(ids), tf2.reduce_sum(spaces, 1))

  def decode_after(
    self, before: tf2.RaggedTensor, ids: tf2.RaggedTensor
  ) -> tf2.Tensor:
    """Returns the texts [batch] that `ids` add to the texts of `before`.

    Both arguments are [batch, (tokens)]. After a text that is not empty, the
    added text keeps its first space, as in data/vocabulary/text_reader.py.
    """
    return tf2.where(
      tf2.strings.length(self.decode(before)) > 0,
      self._decode_inside(ids),
      self.decode(tf2.concat([before, ids], 1)),
    )

  def _decode_inside(self, ids: tf2.RaggedTensor) -> tf2.Tensor:
    anchors = tf2.fill([ids.nrows(), 1], self._anchor)
    texts = self._model.detokenize(tf2.concat([anchors, ids], 1))
    return _cut_start(texts, tf2.fill(tf2.shape(texts), self._anchor_bytes))


def _cut_start(texts: tf2.Tensor, num_bytes: tf2.Tensor) -> tf2.Tensor:
  """Returns texts [batch] without their first `num_bytes` [batch] bytes."""
  return tf2.strings.substr(texts, num_bytes, -tf2.ones_like(num_bytes))
