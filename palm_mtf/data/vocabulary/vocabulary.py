# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The SentencePiece vocabulary: text to token ids and back.

The vocabularies that palm_mtf trains are lossless. As in PaLM 2, nothing is
normalized, all white space is kept, characters without a piece become one token
per UTF-8 byte, and every digit is a separate token (a rare digit of another
script: one token per byte). The ids:

  0           <pad>   shifted in at the start of every sequence
  1           [eod]   end of document; a text that says "[eod]" has other ids
  2           <unk>   never made: byte pieces replace it
  3 .. 258    <0x00> .. <0xFF>
  259 ..      learned pieces, among them the digits and runs of white space
  last ones   EXTRA_IDS sentinels in T5's order

Other models, such as T5's, may lack byte pieces. Then a character without a
piece becomes <unk> and is lost.
"""

import hashlib
import logging
import os
import string
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from palm_mtf.config import DataConfig
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.sources.document import TRAIN, Source, read_with_progress
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.data.worker_pool import num_cores
from palm_mtf.errors import UserError, suggest_name
from palm_mtf.model_dir.foreign_files import read_regular
from palm_mtf.model_dir.paths import ModelDir

_logger = logging.getLogger(__name__)

SPACE_MARK = "\u2581"  # a space, as SentencePiece writes it in pieces
_MAX_BYTES = 2**30  # of a model file; 256,000 pieces take 5 MB
_TRAIN_ONE = "or train one (palm_mtf vocab)"
# Kinds of text that decode(encode(text)) may change, each with an example to
# try. A model's settings are not read, so that models from any program work.
_PROBES = {
  "spaces at both ends": "  a  ",
  "runs of spaces": "a    b",
  "tabs": "\ta\t\tb",
  "line ends": "a\n\nb\r\nc\n",
  "control characters": "a\x00b\x1fc\x7f",
  "the order of combining marks": "e\u0301 \u00e9",
  "compatibility characters": "\ufb01 \uff21 \u212b \u00b2",
  "U+2581": "a\u2581b",
  "rare characters": "\U0001f469\u200d\U0001f467 \u0645\u202e\ue000\U0010fffd",
}
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation


class Vocabulary:
  """A SentencePiece model, trained by this package or by another program."""

  def __init__(
    self, path: str, *, setting: str = "VOCABULARY", extra_ids: int = 0
  ):
    """Reads a model.

    Args:
      setting: name of the setting that holds `path`, for messages.
      extra_ids: EXTRA_IDS, number of sentinels after the pieces of the file.

    Raises:
      UserError: there is no such file, or its model cannot be used.
    """
    what = f"{setting} = {path!r}"
    self.path = path
    self.extra_ids = extra_ids
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self.model = add_sentinels(_read_model(path, what), extra_ids)
      self._processor.LoadFromSerializedProto(self.model)
    # UnicodeDecodeError occurs if SentencePiece's error message is not UTF-8.
    except (RuntimeError, UnicodeDecodeError, DecodeError):
      raise UserError(
        f"{what}: not a SentencePiece model; give another, {_TRAIN_ONE}."
      ) from None
    # If a text is encoded in parts, this model encodes all parts but the first
    # (see `drop_prefix`). None if `self.model` can encode these parts too.
    self.inside_model = drop_prefix(self.model)
    self._inside = self.inside_model and sentencepiece.SentencePieceProcessor(
      model_proto=self.inside_model
    )
    self.sha256 = hashlib.sha256(self.model).hexdigest()
    self.size = self._processor.GetPieceSize()  # ids are 0 .. size - 1
    self.unknown_id = self._processor.unk_id()
    self.eod_id = self._processor.eos_id()
    if self.eod_id < 0:
      raise UserError(
        f"{what}: has no end-of-sentence piece, which marks the end of a "
        f"document; give a model with an eos id, {_TRAIN_ONE}."
      )
    self.is_byte = np.array(  # [size], bool
      [self._processor.IsByte(i) for i in range(self.size)]
    )
    try:
      for i in range(self.size):
        self.piece(i)
    except UnicodeDecodeError:
      raise UserError(
        f"{what}: is damaged: piece {i} is not UTF-8; give another, "
        f"{_TRAIN_ONE}."
      ) from None
    mark_bytes = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
    self._space_mark_ids = np.array(
      list(map(self._processor.PieceToId, mark_bytes)), np.int32
    )
    # A token with visible text. A token that is decoded after the anchor keeps
    # the space that it would lose at the beginning of a text.
    self.anchor = next(
      (i for i in range(self.size) if self._processor.Decode([i]).strip()), 0
    )
    self._texts_inside: dict[int, str] = {}

  @property
  def has_bytes(self) -> bool:
    """Whether a character without a piece becomes one token per byte."""
    return bool(self.is_byte.any())

  def losses(self) -> list[str]:
    """Returns the kinds of text that decode(encode(text)) changes, or []."""

    def round_trip(text: str) -> str:
      return self.decode(self.encode(text))

    found = [name for name, text in _PROBES.items() if round_trip(text) != text]
    # Test each character between two letters, so that no rule about the ends of
    # a text applies.
    lost = [c for c in _CHARACTERS if c not in round_trip(f"a{c}b")]
    return [*found, *([f"the characters {' '.join(lost)}"] if lost else [])]

  def piece(self, i: int) -> str:
    """Returns the piece of id `i`, with spaces written as U+2581."""
    return self._processor.IdToPiece(i)

  def joins_spaces(self) -> bool:
    """Whether any piece is a space and the text after it, such as " word"."""
    return any(
      piece.startswith(SPACE_MARK) and piece.strip(SPACE_MARK)
      for piece in map(self.piece, range(self.size))
    )

  def byte(self, i: int) -> int | None:
    """Returns the byte that id `i` stands for; None if `i` is no byte piece."""
    if i >= self.size or not self.is_byte[i]:
      return None
    return int(self.piece(i)[3:5], 16)

  def text_inside(self, i: int) -> str:
    """Returns the text that `i` adds to a text; `i` must not be a byte piece.

    In contrast, `decode([i])` may drop a space at the beginning.
    """
    if i not in self._texts_inside:
      before = self.decode([self.anchor])
      self._texts_inside[i] = self.decode([self.anchor, i])[len(before) :]
    return self._texts_inside[i]

  def is_control(self, i: int) -> bool:
    """Whether id `i` stands for no text: a control, unknown or unused id."""
    model = self._processor
    return model.IsControl(i) or model.IsUnknown(i) or model.IsUnused(i)

  def check_size(self, vocab_size: int) -> None:
    """Raises UserError unless the embedding has a row for every id."""
    if self.size > vocab_size:
      extra = f" with EXTRA_IDS = {self.extra_ids}" if self.extra_ids else ""
      raise UserError(
        f"{self.path} has {self.size} pieces{extra}, VOCAB_SIZE = {vocab_size} "
        f"rows: set VOCAB_SIZE to {self.size} or more, or use a smaller "
        "vocabulary."
      )

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without [eod]."""
    return self.encode_batch([text])[0]

  def encode_batch(
    self, texts: Sequence[str], are_inside: Sequence[bool] | None = None
  ) -> list[list[int]]:
    """Returns the ids of every text as lists; see `encode_arrays`."""
    arrays = self.encode_arrays(texts, num_cores(), are_inside)
    return [ids.tolist() for ids in arrays]

  def encode_arrays(
    self,
    texts: Sequence[str],
    num_threads: int,
    are_inside: Sequence[bool] | None = None,
  ) -> list[np.ndarray]:
    """Returns the ids of every text, each [num_tokens], int32.

    Args:
      are_inside: whether each text continues another text and so gets no space
        in front (see `drop_prefix`). None if no text continues another.

    Raises:
      UserError: a text holds half a surrogate pair, which is not Unicode.
    """
    # SentencePiece would decode U+2581 as a space. So split texts at U+2581,
    # and encode U+2581 as its three byte pieces.
    segments = [
      text.split(SPACE_MARK) if self.has_bytes else [text] for text in texts
    ]
    flat = [segment for split in segments for segment in split]
    are_inside = are_inside or [False] * len(texts)
    flags = [
      is_inside or place > 0
      for split, is_inside in zip(segments, are_inside, strict=True)
      for place in range(len(split))
    ]
    encoded = iter(self._encode_segments(flat, flags, num_threads))
    batch = []
    for split in segments:
      parts = [next(encoded)]
      for _ in split[1:]:
        parts += [self._space_mark_ids, next(encoded)]
      batch.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return batch

  def _encode_segments(
    self, texts: list[str], are_inside: list[bool], num_threads: int
  ) -> list[np.ndarray]:
    def encode(processor, texts):
      return processor.Encode(texts, num_threads=num_threads, out_type="numpy")

    try:
      if not self._inside or not any(are_inside):
        return encode(self._processor, texts)
      groups = {False: [], True: []}
      for text, is_inside in zip(texts, are_inside, strict=True):
        groups[is_inside].append(text)
      first = iter(encode(self._processor, groups[False]))
      inside = iter(encode(self._inside, groups[True]))
      return [next(inside if x else first) for x in are_inside]
    except TypeError:
      raise UserError(_explain_no_unicode(texts)) from None

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`; <pad> and [eod] have no text.

    Bytes that are not UTF-8 become U+FFFD.
    """
    # An id may exceed the vocabulary, because embeddings may have more rows.
    return self._processor.Decode(
      [int(i) if i < self.size else self.unknown_id for i in ids]
    )

  def byte_share(self, ids: Sequence[int]) -> float:
    """Returns the share of `ids` that are byte pieces."""
    return float(self.is_byte[np.asarray(ids, int)].sum()) / max(1, len(ids))


def load_vocabulary(
  model_dir: str, data: DataConfig, *, vocab_size: int
) -> Vocabulary:
  """Loads VOCABULARY or, if None, loads or trains MODEL_DIR/vocabulary.model.

  Raises:
    UserError: the file is not a usable model, has more than `vocab_size`
      pieces, or cannot be trained or written.
  """
  path = data.vocabulary
  if path is None:
    path = ModelDir(model_dir).vocabulary
    # The vocabulary is trained once, and kept even if text or VOCAB_SIZE
    # change, because checkpoints depend on it.
    if not os.path.exists(path):
      sources = open_filtered(model_dir, data)
      for source in sources:
        source.check_vocabulary(None)
      _logger.info(f"training a vocabulary of {vocab_size:,} pieces: {path}")
      train_vocabulary(
        training_texts(sources), vocab_size - data.extra_ids, path=path
      )
  vocabulary = Vocabulary(os.path.expanduser(path), extra_ids=data.extra_ids)
  vocabulary.check_size(vocab_size)
  losses = vocabulary.losses()
  if losses:
    why = "" if vocabulary.has_bytes else "has no byte pieces and "
    _logger.warning(
      f"{path} {why}does not keep every text as it is; it loses or changes: "
      f"{', '.join(losses)}"
    )
  return vocabulary


def training_texts(sources: Iterable[Source]) -> Iterator[str]:
  """Yields the inputs and text of training documents, except token ids."""
  for source in sources:
    for split, document in read_with_progress(source, "Reading"):
      if split == TRAIN:
        for text in (document.inputs, document.text):
          if isinstance(text, str):
            yield text


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


def drop_prefix(model: bytes) -> bytes | None:
  """Returns the model that encodes all parts of a text except the first.

  Some models put a space before each text (add_dummy_prefix), so that the first
  word of the text is encoded like any word after a space. If a text is encoded
  in parts, only the first part may get this space.

  Returns:
    A serialized model; None if `model` itself can encode these parts, because
    it puts no space before a text, or removes spaces at a text's ends.
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


def _read_model(path: str, what: str) -> bytes:
  try:
    return read_regular(path, _MAX_BYTES)
  except FileNotFoundError:
    raise UserError(
      f"{what}: no such file{suggest_name(path)}; give a SentencePiece model, "
      f"{_TRAIN_ONE}."
    ) from None
  except OSError as error:
    raise UserError(f"{what}: {error.strerror}.") from None


def _explain_no_unicode(texts: Iterable[str]) -> str:
  for text in texts:
    try:
      text.encode()
    except UnicodeEncodeError as error:
      code = ord(text[error.start])
      # Python maps invalid UTF-8 bytes of the command line and stdin to this
      # range (surrogateescape).
      is_byte = 0xDC80 <= code < 0xDD00
      what = (
        f"byte 0x{code - 0xDC00:02x}" if is_byte else "half a surrogate pair"
      )
      return (
        f"{text[max(0, error.start - 10) : error.end + 10]!r}: holds {what}, "
        "which is not Unicode text; leave it out."
      )
  raise AssertionError("SentencePiece refuses what is Unicode text")
