# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text of a continuation, up to an end token or a stop string."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from palm_mtf.data.vocabulary.text_reader import TextReader
from palm_mtf.data.vocabulary.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Continuation:
  """Text that continues a prompt."""

  text: str  # without the end token or the stop string
  num_tokens: int  # that begin in `text`; a stop string may cut the last
  # What ended the text: "eod" (an end token), "stop" (a stop string), "length"
  # (SAMPLE_TOKENS), or "" if the text is unfinished.
  ended: str
  score: float | None = None  # log p / length penalty; only in beam search


class ContinuationReader:
  """Reads the tokens of one continuation one after the other.

  The continuation's text is what its tokens add to the prompt's text. The text
  keeps the space before its first word, although some vocabularies drop a space
  at the beginning of a decoded text.
  """

  def __init__(
    self,
    vocabulary: Vocabulary,
    stop_strings: Sequence[str],
    prompt: Sequence[int] = (),
  ):
    """Begins a continuation without tokens.

    It ends before the first place in its text at which one of `stop_strings`
    begins. `prompt` has the tokens before it, without the start token, or () if
    the model learned targets as separate texts, whose first space is dropped.
    """
    self._eod_id, self._end_ids = vocabulary.eod_id, vocabulary.end_ids
    self._stop_strings = stop_strings
    self._reader = TextReader(vocabulary, prompt)
    # Index in the text at which a stop string begins; None while none does.
    self._end: int | None = None
    # Tokens up to and including the token that ended the text: an end token,
    # or the token that completed a stop string.
    self.ids: list[int] = []
    # Index in the text where each token begins, to count those before `_end`.
    self.places: list[int] = []
    self.ended = ""  # "eod", "stop", or "" while the text may continue

  def add(self, ids: Iterable[int]) -> None:
    """Reads more tokens, but none after the end of the text."""
    for token in ids:
      if self.ended:
        return
      num_read = len(self._reader.text)
      self.ids.append(token)
      if token in self._end_ids:
        # Read other end tokens as [eod], because [eod] has no text.
        self.ended, token = "eod", self._eod_id
      self.places.append(self._reader.add(token))
      # Look for stop strings after each token, so that the end of a text does
      # not depend on how many tokens one call adds.
      found = [
        self._reader.text.find(stop, max(0, num_read - len(stop) + 1))
        for stop in self._stop_strings
      ]
      found = [place for place in found if place >= 0]
      if found:
        self._end, self.ended = min(found), "stop"

  def token_text(self, token: int) -> str:
    """Returns the text that a token would add to the continuation."""
    ends = token in self._end_ids
    return self._reader.token_text(self._eod_id if ends else token)

  def sure_text(self) -> str:
    """Returns the text that can be shown now: no later token can change it."""
    text = self._reader.text
    if self.ended:
      return self.continuation(is_over=True).text
    unsure = max(
      (measure_begun_stop(text, x) for x in self._stop_strings), default=0
    )
    return text[: len(text) - unsure]

  def continuation(
    self, is_over: bool, score: float | None = None
  ) -> Continuation:
    """Returns the continuation so far; if `is_over`, no more tokens come."""
    text = self._reader.whole_text[: self._end]
    num_tokens = len(self.ids)
    if self.ended == "eod":
      num_tokens -= 1
    elif self.ended == "stop":
      num_tokens = sum(place < len(text) for place in self.places)
    ended = self.ended or ("length" if is_over else "")
    return Continuation(text, num_tokens, ended, score)


def measure_begun_stop(text: str, stop: str) -> int:
  """Returns the length of the longest suffix of `text` that `stop` begins with.

  `text` must not contain `stop`, and `stop` must not be empty.
  """
  begin = max(0, len(text) - len(stop) + 1)
  while (begin := text.find(stop[0], begin)) >= 0:
    if stop.startswith(text[begin:]):
      return len(text) - begin
    begin += 1
  return 0


def make_sampling_key(seed: int, sample: int, prompt: str) -> np.ndarray:
  """Returns the random key of one sample of a prompt, [2] int32.

  The key does not depend on the batch that the prompt is in.
  """
  text = f"{seed}/{sample}/{prompt}".encode()
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return np.frombuffer(digest, "<i4")
