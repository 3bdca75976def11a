# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Only one trainer uses a MODEL_DIR, however the previous trainer ended."""

import errno
import os
import signal
import socket

import pytest

from palm_mtf.errors import UserError
from palm_mtf.model_dir.lock import training_lock
from tests import processes

HOLD = """
import sys, time
from palm_mtf.model_dir.lock import training_lock
with training_lock(sys.argv[1]):
  print("held", flush=True)
  time.sleep(60)
"""


def test_the_second_is_refused_with_the_others_pid_and_host(tmp_path):
  model_dir = str(tmp_path)
  with training_lock(model_dir):
    with pytest.raises(UserError) as error, training_lock(model_dir):
      pass
  assert str(error.value) == (
    f"MODEL_DIR = {model_dir!r}: process {os.getpid()} on "
    f"{socket.gethostname()} trains there; wait for it, stop it, or choose "
    "another MODEL_DIR."
  )
  with training_lock(model_dir):
    pass
  assert not os.listdir(tmp_path)


def test_a_killed_holder_leaves_no_lock_behind(tmp_path):
  holder = processes.start("-c", HOLD, str(tmp_path))
  assert holder.stdout.readline() == "held\n"
  with (
    pytest.raises(UserError, match=f"process {holder.pid} on"),
    training_lock(str(tmp_path)),
  ):
    pass
  holder.send_signal(signal.SIGKILL)
  holder.communicate()
  with training_lock(str(tmp_path)):
    pass


def test_a_lock_file_that_is_removed_by_hand_lets_nobody_in(tmp_path):
  with training_lock(str(tmp_path)):
    (tmp_path / "trainer.lock").unlink()
    with pytest.raises(UserError, match="trains there"):
      with training_lock(str(tmp_path)):
        pass
  assert not os.listdir(tmp_path)


def test_a_disk_without_a_byte_left_is_locked_too(tmp_path, monkeypatch):
  def refuse(*unused):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "write", refuse)
  with training_lock(str(tmp_path)):
    with pytest.raises(UserError, match="another process trains there"):
      with training_lock(str(tmp_path)):
        pass


def test_a_folder_that_nothing_came_of_is_not_left(tmp_path):
  model_dir = tmp_path / "new"
  with pytest.raises(UserError), training_lock(str(model_dir)):
    raise UserError("no text")
  assert not model_dir.exists()
