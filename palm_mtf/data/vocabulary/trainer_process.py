# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs SentencePiece's trainer in a separate process.

A native abort or a lack of memory then ends only that process, the log can be
read during training, and an interrupt does not wait for native code.
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

# The program does not import palm_mtf, because the new process may not find it.
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
# Matches a log line of SentencePiece (up to 0.2.3) that counts the merges.
_MERGES = re.compile(rb"(?:Merged|Added): .*?\b(?:merges|size)=(\d+)")


class RefusedError(Exception):
  """SentencePiece refused the text or the settings; the message says why."""


def train_sentencepiece(
  sentences: Sequence[str],
  settings: Mapping[str, Any],
  *,
  on_progress: Callable[[int], None],
) -> bytes:
  """Returns the serialized model that SentencePiece learns from `sentences`.

  Args:
    settings: parameters of SentencePieceTrainer.Train.
    on_progress: function that takes the number of merges since its last call.

  Raises:
    RefusedError: the text does not fit the settings.
    UserError: the process was killed, most often for lack of memory.
  """
  with subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, str(os.getpid())],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    try:
      # No deadlock can occur, because only one pipe is in use at a time: the
      # process reads all input, then writes its log, then its result.
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
      process.kill()  # has an effect only after an interrupt
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
