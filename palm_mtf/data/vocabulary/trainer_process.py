# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs SentencePiece's trainer in a process of its own.

Only its log on stderr says how far it is, and while it works no Ctrl-C would
end the process that it works in.
"""

import collections
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from palm_mtf.errors import UserError

# Imports nothing of palm_mtf, which need not be on this process's path.
_PROGRAM = """
import io, pickle, signal, sys
import sentencepiece
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
sentences, settings = pickle.load(sys.stdin.buffer)
model = io.BytesIO()
try:
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(sentences), model_writer=model, **settings
  )
  result = model.getvalue()
except RuntimeError as error:
  result = str(error)
pickle.dump(result, sys.stdout.buffer)
"""
_LAST_LINES = 5
# SentencePiece 0.2.3 and those before it.
_MERGES = re.compile(rb"(?:Merged|Added): .*?\b(?:merges|size)=(\d+)")


class RefusedError(Exception):
  """SentencePiece refuses the text or the settings; with its own message."""


def train_sentencepiece(
  sentences: Sequence[str],
  settings: Mapping[str, Any],
  *,
  on_progress: Callable[[int], None],
) -> bytes:
  """Returns the model that SentencePiece learns from `sentences`.

  Args:
    sentences: the training text.
    settings: settings of SentencePieceTrainer.
    on_progress: told now and then how many merges were added.

  Raises:
    RefusedError: the text does not fit the settings.
    UserError: the process was killed, which memory is most often the cause of.
  """
  process = subprocess.Popen(
    [sys.executable, "-c", _PROGRAM],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  last_lines = collections.deque(maxlen=_LAST_LINES)
  log = threading.Thread(
    target=_follow, args=(process.stderr, on_progress, last_lines)
  )
  log.start()
  try:
    try:
      with process.stdin:
        pickle.dump((sentences, dict(settings)), process.stdin)
    except BrokenPipeError:
      pass  # its end says why
    with process.stdout:
      output = process.stdout.read()
    process.wait()
  finally:
    process.kill()
    process.wait()
    log.join()
    process.stderr.close()
  if process.returncode < 0:
    raise UserError(
      "the training of the vocabulary was killed (signal "
      f"{-process.returncode}), as it is where memory is short; free some, or "
      "give less text."
    )
  if process.returncode:
    lines = b"".join(last_lines).decode(errors="replace")
    raise RuntimeError(f"SentencePiece's process failed: {lines}")
  result = pickle.loads(output)
  if isinstance(result, str):
    raise RefusedError(result.strip())
  return result


def _follow(
  log: BinaryIO,
  on_progress: Callable[[int], None],
  last_lines: collections.deque,
) -> None:
  """Reads the log to its end."""
  done = 0
  for line in log:
    last_lines.append(line)
    if count := _MERGES.search(line):
      on_progress(int(count[1]) - done)
      done = int(count[1])
