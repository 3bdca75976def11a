# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes tokens one by one, for example a continuation of a prompt.

SentencePiece decodes only whole texts. If the vocabulary adds a space to each
text or strips spaces, SentencePiece drops the space that begins a text, so a
continuation without its prompt would lose the space before its first word. The
bytes of one character may also be spread over several tokens.
"""

from collections.abc import Iterable, Sequence

from palm_mtf.data.vocabulary.vocabulary import Vocabulary

_NO_CHARACTER = "\ufffd"  # replaces each byte that is part of no character
_MOST_OPEN = 3  # maximum number of bytes in an incomplete character


class TextReader:
  """Decodes tokens one by one, in time that does not grow with the text."""

  def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()):
    """Starts a text that follows the tokens in `before`.

    A character that begins in `before` and ends in the text is part of `text`.
    """
    self._vocabulary = vocabulary
    self.text = ""  # complete characters of the tokens so far
    self._open = b""  # bytes of an incomplete character
    # The tokens before the first character: they decide whether the text begins
    # with a space. None as soon as there is a character.
    self._leading: list[int] | None = []
    before = list(before)
    if vocabulary.decode(before[:4]) or vocabulary.decode(before):
      self._leading = None
      before = before[-_MOST_OPEN:]
    for token in before:
      self.add(token)
    self.text = ""

  @property
  def whole_text(self) -> str:
    """The text so far, with U+FFFD for each byte of an incomplete character."""
    return self.text + _NO_CHARACTER * len(self._open)

  def token_text(self, token: int) -> str:
    """Returns the text that `add` would add.

    For a byte of a multi-byte character, returns a name such as "bytes:\\xc3".
    """
    byte = self._vocabulary.byte(token)
    if byte is not None:
      return chr(byte) if byte < 0x80 else f"bytes:\\x{byte:02x}"
    if self._leading is None:
      return self._vocabulary.text_inside(token)
    return self._vocabulary.decode([*self._leading, token])

  def add(self, token: int) -> int:
    """Adds a token; returns the index in `text` at which the token begins."""
    byte = self._vocabulary.byte(token)
    if byte is None or not (self._open and 0x80 <= byte < 0xC0):
      self.text, self._open = self.whole_text, b""
    place = len(self.text)
    if byte is None:
      text = self.token_text(token)
      self.text += text
      if self._leading is not None:
        self._leading = None if text else [*self._leading, token]
      return place
    self._leading = None
    self._open += bytes([byte])
    if len(self._open) == _count_bytes(self._open[0]):
      try:
        self.text += self._open.decode()
      except UnicodeDecodeError:
        self.text = self.whole_text
      self._open = b""
    return place


def decode_after(
  vocabulary: Vocabulary, before: Sequence[int], ids: Iterable[int]
) -> str:
  """Returns the text of the tokens `ids`, which follow the tokens `before`."""
  reader = TextReader(vocabulary, before)
  for token in ids:
    reader.add(token)
  return reader.whole_text


def _count_bytes(first: int) -> int:
  """Returns the length in bytes of a UTF-8 character with this first byte."""
  if 0xC2 <= first < 0xF5:
    return 2 + (first >= 0xE0) + (first >= 0xF0)
  return 1  # ASCII, or a byte that begins no character
