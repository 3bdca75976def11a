# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of one manager take turns on the devices that they share."""

import collections
import contextlib
import threading
import time

import pytest

from palm_mtf.runtime.client.turns import ManagedTurns
from palm_mtf.runtime.manager import service
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.manager import Manager
from palm_mtf.runtime.program import Program
from tests.processes import wait_for

SECS = 10.0
DEVICES = {"/cpu:0": "host:1/0", "/cpu:1": "host:1/1"}
BYTES = 1000  # of each device


@pytest.fixture
def manager(tmp_path, monkeypatch):
  monkeypatch.setattr(
    Manager, "list_devices", lambda _: dict.fromkeys(DEVICES.values(), BYTES)
  )

  @contextlib.contextmanager
  def started(port=0, policy="fifo"):
    state = str(tmp_path / "state.sqlite")
    with service.serve("127.0.0.1", port, state, "", policy) as port:
      yield f"127.0.0.1:{port}"

  return started


@contextlib.contextmanager
def taker(address, owner, share=1.0, reserved=0):
  with ManagerClient("MANAGER", address) as client:
    turns = ManagedTurns(client.open_turns(owner, share), DEVICES, reserved)
    try:
      yield turns
    finally:
      turns.close()


def start(turns, program, order, name, may_end):
  """Runs a program in a thread, which notes its start and waits to end."""

  def run():
    with turns.take(program):
      order.append(name)
      assert may_end.wait(SECS)

  thread = threading.Thread(target=run)
  thread.start()
  return thread


def test_programs_on_other_devices_do_not_wait(manager):
  order, may_end = [], threading.Event()
  first, second = (Program(device_bytes={x: 0}) for x in DEVICES)
  with manager() as address, taker(address, "a") as a:
    threads = [start(a, first, order, "first", may_end) for _ in range(5)]
    wait_for(lambda: len(order) == 4)
    with a.take(second):
      assert order == ["first"] * 4
    may_end.set()
    for thread in threads:
      thread.join(SECS)


def test_clients_have_throughput_and_device_time_by_their_shares(manager):
  program = Program(device_bytes=dict.fromkeys(DEVICES, 0))
  counts, secs = collections.Counter(), collections.Counter()
  until = time.monotonic() + 3

  def run(turns, share):
    while time.monotonic() < until:
      with turns.take(program):
        begin = time.monotonic()
        time.sleep(0.02)
        secs[share] += time.monotonic() - begin
      counts[share] += 1

  with (
    manager(policy="shares") as address,
    taker(address, "a", share=1.0) as a,
    taker(address, "b", share=4.0) as b,
  ):
    # Each client keeps eight programs submitted.
    given = [(a, 1.0), (b, 4.0)] * 8
    threads = [threading.Thread(target=run, args=x) for x in given]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(SECS)
  for found in (counts, secs):
    assert 2.5 < found[4.0] / found[1.0] < 6


def test_buffers_wait_for_memory_that_a_run_reserves(manager):
  order, may_end = [], threading.Event()
  may_end.set()
  large = Program(device_bytes=dict.fromkeys(DEVICES, 500))
  with manager() as address, taker(address, "a") as a:
    with taker(address, "run", reserved=600) as run:
      with run.take(Program()):  # the manager has the run's message
        pass
      thread = start(a, large, order, "large", may_end)
      with run.take(Program()):
        time.sleep(0.2)
        assert not order
    thread.join(SECS)
  assert order == ["large"]


@pytest.mark.slow
def test_a_restarted_manager_knows_the_buffers_of_its_clients(manager):
  kept, large = (
    Program(device_bytes=dict.fromkeys(DEVICES, n)) for n in (600, 500)
  )
  with contextlib.ExitStack() as first:
    address = first.enter_context(manager())
    with taker(address, "a") as a:
      with a.take(kept):  # its client keeps the buffers
        pass
      with a.take(Program()):  # runs while the manager is restarted
        first.close()
        again = manager(int(address.rpartition(":")[2]))
        stack = contextlib.ExitStack()
        stack.enter_context(again)
        time.sleep(2.5)
      with stack:
        order, may_end = [], threading.Event()
        thread = start(a, large, order, "large", may_end)
        with taker(address, "b") as b, b.take(Program()):
          time.sleep(0.2)
          assert not order
        a.free(kept.device_bytes)
        wait_for(lambda: order == ["large"])
        may_end.set()
        thread.join(SECS)
