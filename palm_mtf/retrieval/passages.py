# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Passages of texts that are put before prompts (RETRIEVE).

The passages of a prompt are the RETRIEVE best of PASSAGES by BM25. A line of a
.jsonl file is a passage; any other file is cut into passages.
"""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence

from palm_mtf.config import DecodeConfig
from palm_mtf.errors import UserError, check_library
from palm_mtf.user_text import check_text, format_of, read_json_lines, read_text

_logger = logging.getLogger(__name__)

_WORDS = 100  # in a passage of a text, as in DPR (Karpukhin et al. 2020)
_FORM = 'write {"text": "..."}'


class Passages:
  """Passages of files, which are read again when a file changes."""

  def __init__(self, decode: DecodeConfig):
    """Reads PASSAGES; UserError if there are fewer than RETRIEVE."""
    check_library("bm25s", "retrieval", "RETRIEVE")
    self._decode, self._lock = decode, threading.Lock()
    self._paths = [os.path.expanduser(x) for x in decode.passages]
    self._state = self._find_state()
    self._load()

  def _find_state(self) -> list[tuple[int, ...]]:
    found = []
    for path in self._paths:
      with contextlib.suppress(OSError):
        x = os.stat(path)
        found.append((x.st_ino, x.st_size, x.st_mtime_ns))
    return found

  def _load(self) -> None:
    import bm25s

    texts = [x for path in self._paths for x in _read(path) if _split(x)]
    if len(texts) < (count := self._decode.retrieve):
      raise UserError(
        f"RETRIEVE = {count}: PASSAGES have only {len(texts):,} with words; "
        "give at most as many."
      )
    ranking = bm25s.BM25()
    ranking.index([*map(_split, texts)], show_progress=False)
    self._texts, self._ranking = texts, ranking

  def _find(self, prompt: str) -> list[str]:
    # Returns passages that have words of the prompt, the best first.
    with self._lock:
      if (state := self._find_state()) != self._state:
        self._state = state
        try:
          self._load()
        except UserError as error:
          _logger.warning(f"the earlier passages stay: {error}")
      if not (words := _split(prompt)):
        return []
      found, scores = self._ranking.retrieve(
        [words], k=self._decode.retrieve, show_progress=False
      )
      return [self._texts[i] for i in found[0][scores[0] > 0]]

  def put_before(self, prompt: str, fits: Callable[[str], bool]) -> str:
    """Returns PASSAGE_TEMPLATE with the prompt and its passages.

    Leaves out what does not fit: the worst passages, then the end of the best.
    """
    found = self._find(prompt)
    while found:
      parts = {"{passages}": "\n\n".join(found), "{prompt}": prompt}
      template = re.split(
        "({passages}|{prompt})", self._decode.passage_template
      )
      text = "".join(parts.get(x, x) for x in template)
      if fits(text):
        return text
      last = found.pop()
      if not found and (half := last[: len(last) // 2].strip()):
        found = [half]
    return prompt


def _split(text: str) -> Sequence[str]:
  return re.findall(r"\w+", text.lower())


def _read(path: str) -> Iterator[str]:
  what, needed = f"PASSAGES: {path!r}", "there have to be passages"
  if format_of(path) == ".jsonl":
    for _, where, fields in read_json_lines(path, what, _FORM, needed=needed):
      yield check_text(fields.get("text"), f"{where}: 'text'", _FORM)
    return
  words = re.findall(r"\s*\S+", read_text(path, what, needed))
  for start in range(0, len(words), _WORDS):
    yield "".join(words[start : start + _WORDS]).strip()
