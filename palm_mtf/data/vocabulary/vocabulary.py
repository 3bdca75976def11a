# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of all vocabularies: from text to token ids and back.

A token stands for bytes, which need not be whole characters: a byte-level token
may end within a character, and a byte piece of SentencePiece is one byte.
"""

import abc
import codecs
import os
import string
import types
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from palm_mtf.data.worker_pool import num_cores
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text

# {kind of text that decode(encode(text)) may change: an example}. We try the
# examples, because files have many forms of settings that change a text.
_PROBES = {
  "spaces at both ends": "  a  ",
  "runs of spaces": "a    b",
  "tabs": "\ta\t\tb",
  "line ends": "a\n\nb\r\nc\n",
  "control characters": "".join(map(chr, [*range(32), 127])),
  "the order of combining marks": "e\u0301 \u00e9",
  "compatibility characters": "\ufb01 \uff21 \u212b \u00b2",
  "U+2581": "a\u2581b",
  "rare characters": "\U0001f469\u200d\U0001f467 \u0645\u202e\ue000\U0010fffd",
  "unassigned characters": "\U00040000\U00080000\U000c0000",
}
# Each of these characters stands for a space in the token names of some
# vocabularies: SentencePiece, byte level, others.
SPACE_MARKS = "\u2581\u0120 "
TRAIN_ONE = "or train one (palm_mtf vocab)"  # ends messages
# The file of transformers that lists the tokens that end a text.
GENERATION_CONFIG = "generation_config.json"
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation
# Error handler for bytes.decode that replaces each invalid byte by U+FFFD, like
# SentencePiece. Python's "replace" may write one U+FFFD for several bytes.
EACH_BYTE = "palm_mtf.each_byte"
codecs.register_error(
  EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end)
)


class Vocabulary(abc.ABC):
  """The tokens of a model.

  The name of a control token in a text, such as "[eod]", is encoded like other
  characters, so that a document cannot contain the end of a document. Ids to
  decode may be `size` or more, because embeddings may have more rows.
  """

  path: str  # the file that was read
  extra_ids: int  # EXTRA_IDS, number of sentinels, which have the last ids
  size: int  # ids are 0 .. size - 1
  eod_id: int  # id of [eod], the end of a document
  # Generation stops at these ids: [eod] first, then for example the token that
  # ends a turn in a conversation.
  end_ids: tuple[int, ...]
  # {"pad_token": name, ...} of tokenizer_config.json; chat templates read them.
  special_tokens: Mapping[str, str] = types.MappingProxyType({})
  sha256: str  # hash of what affects the ids; must equal a checkpoint's
  # [size], bool: whether a token is a byte piece or a part of a character.
  is_byte: np.ndarray

  @abc.abstractmethod
  def __init__(
    self,
    path: str,
    model: bytes,
    *,
    what: str,
    extra_ids: int = 0,
    ends: Sequence[str | int] = (),
  ):
    """Reads a vocabulary.

    Args:
      path: path of the file.
      model: content of that file.
      what: the setting and the path, for messages.
      extra_ids: EXTRA_IDS, number of sentinels after the tokens of the file.
      ends: names or ids of tokens that end a text. A SentencePiece model's own
        end-of-sentence piece is [eod]. Of a tokenizer.json, the first of `ends`
        is [eod] or, if there are none, a token with a well-known name, such as
        "<|endoftext|>".

    Raises:
      UserError: the file is damaged or of another kind, or no token is the end
        of a document.
    """

  @abc.abstractmethod
  def files(self) -> Mapping[str, bytes]:
    """Returns {file name: content} of a copy, first the vocabulary's file."""

  def write(self, folder: str) -> None:
    """Writes the files into a folder."""
    for name, content in self.files().items():
      with open(os.path.join(folder, name), "wb") as file:
        file.write(content)

  def end_files(self) -> dict[str, bytes]:
    """Returns the file that lists `end_ids`; {} if [eod] is the only one."""
    content = {"eos_token_id": list(self.end_ids)}
    has_more = len(self.end_ids) > 1
    return {GENERATION_CONFIG: json_text(content).encode()} if has_more else {}

  @abc.abstractmethod
  def piece(self, i: int) -> str:
    """Returns the name of id `i`, as the file writes it."""

  @abc.abstractmethod
  def is_control(self, i: int) -> bool:
    """Whether id `i` stands for no text, such as [eod] or an unused id."""

  @abc.abstractmethod
  def token_bytes(self, i: int, before: Sequence[int] | None = None) -> bytes:
    """Returns the bytes that id `i` adds to a text.

    `before` is None if earlier tokens added bytes, or all earlier tokens; then
    some vocabularies drop a space with which the token begins.
    """

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`; control tokens have no text.

    Each byte that is not part of a UTF-8 character becomes U+FFFD.
    """

  @abc.abstractmethod
  def _encode(
    self, texts: Sequence[str], num_threads: int, are_inside: Sequence[bool]
  ) -> list[np.ndarray]:
    """Returns the ids of every text.

    Raises TypeError or UnicodeEncodeError for half a surrogate pair.
    """

  def has_id(self, i: int | None) -> bool:
    """Whether `i` is the id of a token."""
    return i is not None and 0 <= i < self.size

  @property
  def has_bytes(self) -> bool:
    """Whether characters without a piece become bytes, so that none is lost."""
    return bool(self.is_byte.any())

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without [eod]."""
    return self.encode_batch([text])[0]

  def encode_batch(
    self, texts: Sequence[str], are_inside: Sequence[bool] | None = None
  ) -> list[list[int]]:
    """Returns the ids of every text as lists, encoded with all CPU cores."""
    arrays = self.encode_arrays(texts, num_cores(), are_inside)
    return [ids.tolist() for ids in arrays]

  def encode_arrays(
    self,
    texts: Sequence[str],
    num_threads: int,
    are_inside: Sequence[bool] | None = None,
  ) -> list[np.ndarray]:
    """Returns the ids of every text, each [num_tokens], int32.

    `are_inside` says whether each text continues another text; None if none
    does. Some vocabularies put a space before a text, so that its first word is
    encoded like any word after a space; a text that continues another gets no
    such space.

    Raises UserError if a text holds half a surrogate pair, no Unicode.
    """
    try:
      return self._encode(
        texts, num_threads, are_inside or [False] * len(texts)
      )
    except (TypeError, UnicodeEncodeError):
      raise UserError(_explain_no_unicode(texts)) from None

  def losses(self) -> list[str]:
    """Returns the kinds of text that decode(encode(text)) changes."""

    def round_trip(text: str) -> str:
      return self.decode(self.encode(text))

    found = [name for name, text in _PROBES.items() if round_trip(text) != text]
    # Test each character between two letters, so that no rule about the ends of
    # a text applies.
    lost = [c for c in _CHARACTERS if c not in round_trip(f"a{c}b")]
    return [*found, *([f"the characters {' '.join(lost)}"] if lost else [])]

  def joins_spaces(self) -> bool:
    """Whether tokens such as " word" exist, which a prompt must not split."""
    pieces = map(self.piece, range(self.size))
    return any(x[:1] in SPACE_MARKS and x.strip(SPACE_MARKS) for x in pieces)

  def check_size(self, vocab_size: int) -> None:
    """Raises UserError unless the embedding has a row for every id."""
    if self.size > vocab_size:
      extra = f" with EXTRA_IDS = {self.extra_ids}" if self.extra_ids else ""
      raise UserError(
        f"{self.path} has {self.size} pieces{extra}, VOCAB_SIZE = {vocab_size} "
        f"rows: set VOCAB_SIZE to {self.size} or more, or use a smaller "
        "vocabulary."
      )

  def byte_share(self, ids: Sequence[int]) -> float:
    """Returns the share of byte tokens; high if the vocabulary does not fit."""
    return float(self.is_byte[np.asarray(ids, int)].sum()) / max(1, len(ids))


def find_ends(
  ends: Iterable[str | int], ids: Mapping[str, int]
) -> tuple[int, ...]:
  """Returns the ids of end tokens (names or ids), without those `ids` lacks."""
  found = [ids.get(x) if isinstance(x, str) else x for x in ends]
  known = {*ids.values()}
  return tuple(dict.fromkeys(x for x in found if x in known))


def encode_parts(
  encode_first: Callable[[Sequence[str]], list[np.ndarray]],
  encode_inside: Callable[[Sequence[str]], list[np.ndarray]],
  texts: Sequence[str],
  are_inside: Sequence[bool],
) -> list[np.ndarray]:
  """Encodes texts; uses `encode_inside` if a text continues another text."""
  groups: dict[bool, list[str]] = {False: [], True: []}
  for text, is_inside in zip(texts, are_inside, strict=True):
    groups[is_inside].append(text)
  first = iter(encode_first(groups[False]))
  inside = iter(encode_inside(groups[True]))
  return [next(inside if x else first) for x in are_inside]


def _explain_no_unicode(texts: Iterable[str]) -> str:
  for text in texts:
    try:
      text.encode()
    except UnicodeEncodeError as error:
      code = ord(text[error.start])
      # Python decodes invalid UTF-8 bytes of the command line and of stdin to
      # these codes (surrogateescape).
      is_byte = 0xDC80 <= code < 0xDD00
      what = (
        f"byte 0x{code - 0xDC00:02x}" if is_byte else "half a surrogate pair"
      )
      return (
        f"{text[max(0, error.start - 10) : error.end + 10]!r}: holds {what}, "
        "which is not Unicode text; leave it out."
      )
  raise AssertionError("a tokenizer refuses what is Unicode text")
