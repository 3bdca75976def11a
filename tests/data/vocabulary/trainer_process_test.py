# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import sentencepiece

from palm_mtf.data.vocabulary.trainer_process import (
  RefusedError,
  train_sentencepiece,
)
from palm_mtf.errors import UserError

SETTINGS = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True}


def ignore(unused_merges):
  pass


def children() -> set[str]:
  """The processes that this one started."""
  found = set()
  for task in os.listdir("/proc/self/task"):
    # A thread may end meanwhile; another is the parent of its children then.
    with (
      contextlib.suppress(FileNotFoundError),
      open(f"/proc/self/task/{task}/children") as file,
    ):
      found.update(file.read().split())
  return found


def test_the_model_is_the_one_of_this_process(code):
  lines = [line for text in code for line in text.splitlines()]
  here = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(lines), model_writer=here, minloglevel=2, **SETTINGS
  )
  there = train_sentencepiece(lines, SETTINGS, on_progress=ignore)
  assert there == here.getvalue()


def test_progress_adds_up_to_nearly_all_merges(code):
  told = []
  model = train_sentencepiece(
    [line for text in code for line in text.splitlines()],
    SETTINGS | {"vocab_size": 1000},
    on_progress=told.append,
  )
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  pieces = map(processor.IdToPiece, range(processor.GetPieceSize()))
  merged = [piece for piece in pieces if len(piece) > 1 and piece[0] != "<"]
  assert min(told) > 0
  assert 0 <= len(merged) - sum(told) <= 100  # told every hundred


def test_a_refusal_has_sentencepieces_own_message():
  before = children()
  with pytest.raises(RefusedError, match=r"set it to a value <= \d+"):
    train_sentencepiece(["a few words"], SETTINGS, on_progress=ignore)
  assert children() <= before


def test_a_crash_is_ours_and_shows_the_last_words():
  with pytest.raises(RuntimeError, match="'int' object is not iterable"):
    train_sentencepiece(3, SETTINGS, on_progress=ignore)


def test_a_killed_process_is_explained(code):
  before = children()

  def kill_it():
    while not (new := children() - before):
      time.sleep(0.01)
    os.kill(int(new.pop()), signal.SIGKILL)

  killer = threading.Thread(target=kill_it)
  killer.start()
  with pytest.raises(
    UserError, match=r"killed \(signal 9\), as it is where me"
  ):
    train_sentencepiece(code * 200, SETTINGS, on_progress=ignore)
  killer.join()


PROGRAM = """
import sys
from palm_mtf.data.vocabulary.trainer_process import train_sentencepiece
words = [str(i) + " some words " + str(i * i) for i in range(2_000_000)]
print("begins", flush=True)
train_sentencepiece(words, {"vocab_size": 90000}, on_progress=lambda n: None)
"""


def test_an_interrupt_ends_both_processes_at_once():
  with subprocess.Popen(
    [sys.executable, "-c", PROGRAM],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    start_new_session=True,
  ) as process:
    try:
      assert process.stdout.readline() == "begins\n"
      listed = f"/proc/{process.pid}/task/{process.pid}/children"
      while not (child := open(listed).read().strip()):
        time.sleep(0.01)
      time.sleep(0.3)
      process.send_signal(signal.SIGINT)
      # The training would take minutes; on a busy machine an end takes seconds.
      _, errors = process.communicate(timeout=20)
    finally:
      with contextlib.suppress(ProcessLookupError):  # both have ended
        os.killpg(process.pid, signal.SIGKILL)
  assert "KeyboardInterrupt" in errors
  assert not os.path.exists(f"/proc/{child}")
