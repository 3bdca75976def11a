# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes tokens one by one, for example a continuation of a prompt.

`Vocabulary.decode` is for whole texts. It may drop a text's first space, so a
continuation that is decoded without its prompt would lose the space before its
first word. The bytes of one character may also be spread over several tokens.
"""

import codecs
from collections.abc import Iterable, Sequence

from palm_mtf.data.vocabulary.vocabulary import EACH_BYTE, Vocabulary

_MOST_OPEN = 3  # maximum number of bytes in an incomplete character


class TextReader:
  """Decodes tokens one by one, in time that does not grow with their number."""

  def __init__(self, vocabulary: Vocabulary, before: Sequence[int] | None = ()):
    """Starts to decode tokens that follow the tokens in `before`.

    A character that begins in `before` and ends later is part of `self.text`.
    `before` is None if earlier tokens are unknown but have text, so that the
    space at the start of the next token is kept.
    """
    self._vocabulary = vocabulary
    self.text = ""  # complete characters of the tokens so far
    self._decoder = codecs.getincrementaldecoder("utf-8")(EACH_BYTE)
    # All tokens so far if none of them has added bytes: the next token then
    # begins the text, and may lose its space. None after a token with bytes.
    self._leading: list[int] | None = None
    if before is None:
      return
    before = list(before)
    if vocabulary.decode(before[:4]) or vocabulary.decode(before):
      before = before[-_MOST_OPEN:]
    else:
      self._leading = []
    for token in before:
      self.add(token)
    self.text = ""

  @property
  def whole_text(self) -> str:
    """The text so far, with U+FFFD for each byte of an incomplete character."""
    incomplete, _ = self._decoder.getstate()
    return self.text + incomplete.decode(errors=EACH_BYTE)

  def token_text(self, token: int) -> str:
    """Returns the text that `token` would add, without adding it.

    The bytes of an incomplete character are written as in "bytes:\\xc3".
    """
    found = self._vocabulary.token_bytes(token, self._leading)
    try:
      return found.decode()
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

  def add(self, token: int) -> int:
    """Adds a token; returns the index in `text` at which the token begins.

    If the token begins within a character, returns the index of the character.
    """
    new = self._vocabulary.token_bytes(token, self._leading)
    # In UTF-8, only bytes from 0x80 to 0xBF continue a character.
    if not new or not 0x80 <= new[0] < 0xC0:
      self.text = self.whole_text
      self._decoder.reset()
    place = len(self.text)
    self.text += self._decoder.decode(new)
    if self._leading is not None:
      self._leading = None if new else [*self._leading, token]
    return place


def decode_after(
  vocabulary: Vocabulary, before: Sequence[int] | None, ids: Iterable[int]
) -> str:
  """Returns the text of the tokens `ids`, which follow the tokens `before`.

  The text's first space is kept if `before` has text, or is None (unknown).
  """
  reader = TextReader(vocabulary, before)
  for token in ids:
    reader.add(token)
  return reader.whole_text
