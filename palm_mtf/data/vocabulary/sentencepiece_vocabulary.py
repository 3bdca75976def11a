# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of SentencePiece, which palm_mtf trains and reads.

The vocabularies that palm_mtf trains are lossless. As in PaLM (section 2),
nothing is normalized, all white space is kept, characters without a piece
become one token per UTF-8 byte, and every digit is a separate token (a rare
digit of another script is one token per byte). The ids:

  0           <pad>   shifted in at the start of every sequence
  1           [eod]   end of document; a text that says "[eod]" has other ids
  2           <unk>   never used, because byte pieces take its place
  3 .. 258    <0x00> .. <0xFF>
  259 ..      learned pieces, among them the digits and runs of white space
  last ones   EXTRA_IDS sentinels in T5's order

Other models, such as T5's, may lack byte pieces. Then a character without a
piece becomes <unk> and is lost.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from palm_mtf.data.vocabulary.vocabulary import (
  TRAIN_ONE,
  Vocabulary,
  encode_parts,
  find_ends,
)
from palm_mtf.errors import UserError

FILE_NAME = "vocabulary.model"
SPACE_MARK = "\u2581"  # stands for a space in pieces


class SentencePieceVocabulary(Vocabulary):
  """A SentencePiece model, trained by this package or by another program."""

  def __init__(
    self,
    path: str,
    model: bytes,
    *,
    what: str,
    extra_ids: int = 0,
    ends: Sequence[str | int] = (),
  ):
    """Reads a SentencePiece model; see `Vocabulary`."""
    self.path = path
    self.extra_ids = extra_ids
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self._content = add_sentinels(model, extra_ids)
      self.model, other_ends = _hide_ends(self._content, ends)
      self._processor.LoadFromSerializedProto(self.model)
    # UnicodeDecodeError occurs if SentencePiece's error message is not UTF-8.
    except (RuntimeError, UnicodeDecodeError, DecodeError):
      raise UserError(
        f"{what}: neither a SentencePiece model nor a tokenizer.json; give "
        f"another, {TRAIN_ONE}."
      ) from None
    # Encodes texts that continue another text, without a space before them.
    # None if `self.model` encodes these texts, too.
    self.inside_model = drop_prefix(self.model)
    self._inside = self.inside_model and sentencepiece.SentencePieceProcessor(
      model_proto=self.inside_model
    )
    self.sha256 = hashlib.sha256(self._content).hexdigest()
    self.size = self._processor.GetPieceSize()
    self.unknown_id = self._processor.unk_id()
    self.eod_id = self._processor.eos_id()
    if self.eod_id < 0:
      raise UserError(
        f"{what}: has no end-of-sentence piece, which marks the end of a "
        f"document; give a model with an eos id, {TRAIN_ONE}."
      )
    self.end_ids = tuple(dict.fromkeys([self.eod_id, *other_ends]))
    self.is_byte = np.array(
      [self._processor.IsByte(i) for i in range(self.size)]
    )
    try:
      for i in range(self.size):
        self.piece(i)
    except UnicodeDecodeError:
      raise UserError(
        f"{what}: is damaged: piece {i} is not UTF-8; give another, "
        f"{TRAIN_ONE}."
      ) from None
    mark_bytes = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
    self._space_mark_ids = np.array(
      list(map(self._processor.PieceToId, mark_bytes)), np.int32
    )
    # The id of a token with visible text. A token that is decoded after this
    # anchor keeps the space that it would lose at the beginning of a text.
    self.anchor = next(
      (i for i in range(self.size) if self._processor.Decode([i]).strip()), 0
    )
    self._bytes_inside: dict[int, bytes] = {}

  def files(self) -> Mapping[str, bytes]:
    """Returns files for `write`: the model, and a list of end tokens."""
    return {FILE_NAME: self._content, **self.end_files()}

  def piece(self, i: int) -> str:
    """Returns the piece of id `i`, with spaces written as U+2581."""
    return self._processor.IdToPiece(i)

  def token_bytes(self, i: int, before: Sequence[int] | None = None) -> bytes:
    """Returns the bytes that id `i` adds to a text; see `Vocabulary`."""
    if i < self.size and self.is_byte[i]:
      return bytes([int(self.piece(i)[3:5], 16)])
    if before is not None:
      return self.decode([*before, i]).encode()
    if i not in self._bytes_inside:
      shown = self.decode([self.anchor])
      text = self.decode([self.anchor, i])[len(shown) :]
      self._bytes_inside[i] = text.encode()
    return self._bytes_inside[i]

  def is_control(self, i: int) -> bool:
    """Whether id `i` stands for no text: a control, unknown or unused id."""
    model = self._processor
    return model.IsControl(i) or model.IsUnknown(i) or model.IsUnused(i)

  def _encode(
    self, texts: Sequence[str], num_threads: int, are_inside: Sequence[bool]
  ) -> list[np.ndarray]:
    # SentencePiece would decode U+2581 as a space. So split texts at U+2581,
    # and encode U+2581 as its three byte pieces.
    segments = [
      text.split(SPACE_MARK) if self.has_bytes else [text] for text in texts
    ]
    flat = [segment for split in segments for segment in split]
    flags = [
      is_inside or place > 0
      for split, is_inside in zip(segments, are_inside, strict=True)
      for place in range(len(split))
    ]

    def encode(processor, texts):
      # A call with a list starts threads, which takes a hundred times as long
      # as to encode a short text.
      if len(texts) < 2:
        return [processor.Encode(x.encode(), out_type="numpy") for x in texts]
      return processor.Encode(texts, num_threads=num_threads, out_type="numpy")

    first = functools.partial(encode, self._processor)
    inside = functools.partial(encode, self._inside or self._processor)
    encoded = iter(encode_parts(first, inside, flat, flags))
    batch = []
    for split in segments:
      parts = [next(encoded)]
      for _ in split[1:]:
        parts += [self._space_mark_ids, next(encoded)]
      batch.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return batch

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`; control tokens have no text."""
    # An id may exceed the vocabulary, because embeddings may have more rows.
    return self._processor.Decode(
      [int(i) if i < self.size else self.unknown_id for i in ids]
    )


def add_sentinels(model: bytes, extra_ids: int) -> bytes:
  """Adds T5's sentinels to the end of a SentencePiece model, as SeqIO does.

  <extra_id_0> has the last id, <extra_id_1> the id before it. The text
  " <extra_id_0>" is encoded as the last id, so that a prompt can have blanks to
  fill.

  Args:
    model: serialized model, which is returned unchanged if `extra_ids` is 0.
    extra_ids: EXTRA_IDS, number of sentinels.

  Raises:
    google.protobuf.message.DecodeError: `model` is not a SentencePiece model.
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


def _hide_ends(
  model: bytes, ends: Sequence[str | int]
) -> tuple[bytes, tuple[int, ...]]:
  """Changes the type of user-defined pieces that end a text to CONTROL.

  Otherwise a text that spells such a piece would contain the end of a text.
  Returns the serialized model, and the ids of the end tokens that it has.
  """
  if not ends:
    return model, ()
  proto = sentencepiece_model_pb2.ModelProto.FromString(model)
  found = find_ends(ends, {x.piece: i for i, x in enumerate(proto.pieces)})
  kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
  for piece in (proto.pieces[i] for i in found):
    if piece.type == kinds.USER_DEFINED:
      piece.type = kinds.CONTROL
  return proto.SerializeToString(), found


def drop_prefix(model: bytes) -> bytes | None:
  """Returns a serialized model for texts that continue another text.

  Some models put a space before each text (add_dummy_prefix), so that the first
  word of the text is encoded like any word after a space. If a text is encoded
  in parts, only the first part may get this space. None if `model` itself can
  encode the other parts: it adds no space, or removes spaces at a text's ends.
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
