# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the manager knows is on disk at once, and for one manager at a time."""

import dataclasses
import sqlite3

import pytest

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.slices import Allocation, Server, Wish
from palm_mtf.runtime.manager.store import Store
from tests import processes

SERVER = Server(
  address="10.0.0.1:2222",
  island="east",
  num_devices=2,
  device_bytes=10**9,
  kind={"palm_mtf": "1", "threads": "2"},
)
ALLOCATION = Allocation(
  owner="run-1",
  wish=Wish(slices=["2", "1x1"], device_bytes=5, islands="apart"),
  places=[[("10.0.0.1:2222", 0), ("10.0.0.1:2222", 1)], [("b:1", 0)]],
)


def refusal(path):
  with pytest.raises(UserError) as error:
    Store(str(path))
  return str(error.value)


def test_another_process_reads_what_was_put_before_a_kill(tmp_path):
  path = str(tmp_path / "state")
  program = f"""
import os, signal
from tests.runtime.manager.store_test import ALLOCATION, SERVER
from palm_mtf.runtime.manager.store import Store
store = Store({path!r})
store.put("servers", SERVER.address, SERVER)
store.put("allocations", "run-1", ALLOCATION)
os.kill(os.getpid(), signal.SIGKILL)
"""
  assert processes.python("-c", program).returncode == -9
  store = Store(path)
  assert store.servers == {"10.0.0.1:2222": SERVER}
  assert store.allocations == {"run-1": ALLOCATION}
  drained = dataclasses.replace(SERVER, is_drained=True)
  store.put("servers", drained.address, drained)
  store.remove("allocations", "run-1")
  store.close()
  store = Store(path)
  assert store.servers == {"10.0.0.1:2222": drained}
  assert store.allocations == {}
  store.close()


def test_a_second_manager_is_refused_while_the_first_lives(tmp_path):
  path = tmp_path / "state"
  store = Store(str(path))
  assert refusal(path) == (
    f"--state = '{path}': another manager uses it; stop that one, or name "
    "another file."
  )
  store.close()
  Store(str(path)).close()


def test_what_is_no_state_of_this_version_is_refused(tmp_path):
  path = tmp_path / "state"
  path.write_text("not a database, but a longer text than its header\n" * 9)
  before = path.read_bytes()
  assert refusal(path) == (
    f"--state = '{path}': file is not a database; mend that, or name another "
    "file."
  )
  assert path.read_bytes() == before
  missing = tmp_path / "missing" / "state"
  assert refusal(missing) == (
    f"--state = '{missing}': unable to open database file; mend that, or name "
    "another file."
  )
  later = tmp_path / "later"
  with sqlite3.connect(later) as file:
    file.execute("PRAGMA user_version = 99")
  file.close()
  assert refusal(later) == (
    f"--state = '{later}': is of another version of palm_mtf; use that "
    "version, or another file."
  )
