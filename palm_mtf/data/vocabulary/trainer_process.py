# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SentencePiece's trainer in a process of its own.

There a native abort or a lack of memory ends the trainer alone, its log can be
followed, and an interrupt does not wait for native code.
"""

import collections
import contextlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palm_mtf.errors import UserError

# Imports nothing of palm_mtf, which need not be on this process's path.
_PROGRAM = """
import ctypes, io, os, pickle, signal, sys
# The kernel ends this process when the caller dies, even killed; 1 is
# PR_SET_PDEATHSIG.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
  os._exit(1)
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
os.close(2)  # the caller reads the log to its end, then the result
pickle.dump(result, sys.stdout.buffer)
"""
_LAST_LINES = 5
# A line of the log for every hundred merges, by SentencePiece 0.2.3 or older.
_MERGES = re.compile(rb"(?:Merged|Added): .*?\b(?:merges|size)=(\d+)")


class RefusedError(Exception):
  """A refusal of the text or the settings, in SentencePiece's own words."""


def train_sentencepiece(
  sentences: Sequence[str],
  settings: Mapping[str, Any],
  *,
  on_progress: Callable[[int], None],
) -> bytes:
  """Returns the model that SentencePiece learns from `sentences`.

  Args:
    sentences: training text.
    settings: settings of SentencePieceTrainer.
    on_progress: called now and then with the number of merges since.

  Raises:
    RefusedError: the text does not fit the settings.
    UserError: the process was killed, which memory is most often the cause of.
  """
  with subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, str(os.getpid())],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    try:
      # One pipe at a time is in use, so that none fills up and blocks: the
      # process reads all of its input, writes its log, and then its result.
      with contextlib.suppress(BrokenPipeError), process.stdin:
        pickle.dump((sentences, dict(settings)), process.stdin)
      last_lines, merges = collections.deque(maxlen=_LAST_LINES), 0
      for line in process.stderr:
        last_lines.append(line)
        if count := _MERGES.search(line):
          on_progress(int(count[1]) - merges)
          merges = int(count[1])
      output = process.stdout.read()
      process.wait()
    finally:
      process.kill()  # after an interrupt; otherwise it has ended
      process.wait()
  if process.returncode < 0:
    raise UserError(
      "the training of the vocabulary was killed (signal "
      f"{-process.returncode}), as it is where memory is short; free some, or "
      "give less text (palm_mtf vocab: --sample_characters)."
    )
  if process.returncode:
    lines = b"".join(last_lines).decode(errors="replace")
    raise RuntimeError(f"SentencePiece's process failed: {lines}")
  result = pickle.loads(output)
  if isinstance(result, str):
    raise RefusedError(result.strip())
  return result
