# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sentinels of span corruption, as SeqIO adds them to T5's vocabulary.

<extra_id_0> has the last id, <extra_id_1> the one before it. A text that says
" <extra_id_0>" has that id, so that a prompt can have blanks to fill in.
"""

from sentencepiece import sentencepiece_model_pb2


def with_sentinels(model: bytes, extra_ids: int) -> bytes:
  """Returns a serialized SentencePiece model with sentinels at its end.

  Args:
    model: serialized model; returned as it is where there are no sentinels.
    extra_ids: EXTRA_IDS, number of sentinels.

  Raises:
    google.protobuf.message.DecodeError: it is no such model.
  """
  if not extra_ids:
    return model
  proto = sentencepiece_model_pb2.ModelProto.FromString(model)
  for i in reversed(range(extra_ids)):
    proto.pieces.add(
      piece=f"\u2581<extra_id_{i}>",
      score=0.0,
      type=sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED,
    )
  return proto.SerializeToString()
