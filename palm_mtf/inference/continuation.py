# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text of a continuation: token ids up to [eod] or one of STOP_STRINGS."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from palm_mtf.data.vocabulary.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Continuation:
  """Continuation of a prompt."""

  text: str  # without [eod] or the stop string
  num_tokens: int  # of the text
  ended: str  # "eod", "stop" (a stop string), "length"; "" in one that goes on
  score: float | None = None  # of beam search (decode/beam_search.py)


def read_continuation(
  vocabulary: Vocabulary,
  stop_strings: Sequence[str],
  ids: list[int],
  is_over: bool,
  score: float | None = None,
) -> Continuation:
  """Returns the continuation that token ids say.

  Args:
    vocabulary: vocabulary of the model.
    stop_strings: texts before the first of which a continuation ends.
    ids: tokens so far, perhaps [eod] and more.
    is_over: whether no further token will come.
    score: score of a beam search.
  """
  ended = "length" if is_over else ""
  if vocabulary.eod_id in ids:
    ids = ids[: ids.index(vocabulary.eod_id)]
    ended = "eod"
  text = vocabulary.decode(ids)
  found = [text.find(stop) for stop in stop_strings]
  found = [place for place in found if place >= 0]
  if found:
    text, ended = text[: min(found)], "stop"
    ids = vocabulary.encode(text)
  return Continuation(text, len(ids), ended, score)


def sure_text(continuation: Continuation, stop_strings: Sequence[str]) -> str:
  """Returns the beginning of a text that no further token changes."""
  text = continuation.text
  if continuation.ended:
    return text
  # What may change: a character whose bytes have not all come, and those that
  # may become a stop string.
  unsure = len(text) - len(text.rstrip("\ufffd"))
  for stop in stop_strings:
    unsure = max(unsure, begun_stop(text, stop))
  return text[: len(text) - unsure]


def begun_stop(text: str, stop: str) -> int:
  """Returns the length of the longest end of `text` that begins `stop`.

  The time is linear in the length of the shorter text.

  Args:
    text: text that does not hold `stop`.
    stop: text that is not empty.
  """
  end = text[max(0, len(text) - len(stop) + 1) :]
  # Knuth, Morris and Pratt (1977): borders[i] is the length of the longest
  # text that both begins and ends stop[: i + 1] and is shorter than it.
  borders = [0]
  for character in stop[1 : len(end)]:
    length = borders[-1]
    while length and stop[length] != character:
      length = borders[length - 1]
    borders.append(length + (stop[length] == character))
  matched = 0
  for character in end:
    while matched and stop[matched] != character:
      matched = borders[matched - 1]
    matched += stop[matched] == character
  return matched


def sampling_key(seed: int, sample: int, prompt: str) -> np.ndarray:
  """Returns the key of a text's draws, [2] int32: its batch is not in it."""
  text = f"{seed}/{sample}/{prompt}".encode()
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return np.frombuffer(digest, "<i4")
