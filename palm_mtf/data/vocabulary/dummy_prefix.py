# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The space that some vocabularies put before each text, add_dummy_prefix.

Encoded so, the first word of a text has the piece that it has after a space.
Where a text is encoded in parts, only its first part may get the space.
"""

from sentencepiece import sentencepiece_model_pb2


def without_prefix(model: bytes) -> bytes | None:
  """Returns the model that encodes a part of a text after another part.

  Args:
    model: serialized SentencePiece model.

  Returns:
    A serialized model. None if `model` encodes such a part as well as any:
    if it puts no space before a text, or removes spaces at the ends of a text.
  """
  proto = sentencepiece_model_pb2.ModelProto.FromString(model)
  spec = proto.normalizer_spec
  if (
    not spec.add_dummy_prefix
    or spec.remove_extra_whitespaces
    or proto.trainer_spec.treat_whitespace_as_suffix
  ):
    return None
  spec.add_dummy_prefix = False
  return proto.SerializeToString()
