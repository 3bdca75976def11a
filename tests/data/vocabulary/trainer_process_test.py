# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import contextlib
import io
import os
import signal
import subprocess
import threading
import time

import pytest
import sentencepiece

from palm_mtf.data.vocabulary.trainer_process import (
  RefusedError,
  train_sentencepiece,
)
from palm_mtf.errors import UserError
from tests import processes

SETTINGS = {"model_type": "bpe", "vocab_size": 1000, "byte_fallback": True}


def train(sentences, told=None) -> bytes:
  told = [] if told is None else told
  return train_sentencepiece(sentences, SETTINGS, on_progress=told.append)


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
  """Returns a list of the processes that this process starts."""
  found, popen = [], subprocess.Popen

  def start_noted(*arguments, **settings):
    found.append(popen(*arguments, **settings))
    return found[-1]

  monkeypatch.setattr(subprocess, "Popen", start_noted)
  return found


def test_the_model_is_that_of_this_process_and_progress_nearly_all_merges(code):
  lines = [line for text in code for line in text.splitlines()]
  here, told = io.BytesIO(), []
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(lines), model_writer=here, minloglevel=2, **SETTINGS
  )
  model = train(lines, told)
  assert model == here.getvalue()
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  pieces = map(processor.IdToPiece, range(processor.GetPieceSize()))
  merged = [piece for piece in pieces if len(piece) > 1 and piece[0] != "<"]
  assert min(told) > 0
  assert 0 <= len(merged) - sum(told) <= 100  # reported every hundred


def test_a_refusal_has_sentencepieces_own_message(started):
  with pytest.raises(RefusedError, match=r"set it to a value <= \d+"):
    train(["a few words"])
  assert [process.returncode for process in started] == [0]


def test_a_crash_is_ours_and_shows_the_last_words():
  with pytest.raises(RuntimeError, match="'int' object is not iterable"):
    train(3)


# SIGABRT is what native code raises on itself.
@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT"])
def test_a_killed_process_is_explained(code, started, name):
  number = getattr(signal, name)

  def kill_it():
    while not started:
      time.sleep(0.01)
    os.kill(started[0].pid, number)

  killer = threading.Thread(target=kill_it)
  killer.start()
  with pytest.raises(
    UserError, match=rf"killed \(signal {number}\), as it is where me"
  ):
    train(code * 200)
  killer.join()


PROGRAM = """
from palm_mtf.data.vocabulary.trainer_process import train_sentencepiece
words = [str(i) + " some words " + str(i * i) for i in range(2_000_000)]
print("begins", flush=True)
train_sentencepiece(words, {"vocab_size": 90000}, on_progress=lambda n: None)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_trainer_outlives_a_caller_that_is_killed(number):
  with processes.start("-c", PROGRAM, start_new_session=True) as process:
    try:
      assert process.stdout.readline() == "begins\n"
      listed = f"/proc/{process.pid}/task/{process.pid}/children"
      while not (child := open(listed).read().strip()):
        time.sleep(0.01)
      time.sleep(0.3)
      process.send_signal(number)
      process.communicate(timeout=20)
      end = time.monotonic() + 20
      while is_alive(child) and time.monotonic() < end:
        time.sleep(0.01)
      assert not is_alive(child)
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_alive(pid):
  """Returns whether a process runs; a zombie does not."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def test_an_interrupt_ends_both_processes_at_once():
  with processes.start("-c", PROGRAM, start_new_session=True) as process:
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
