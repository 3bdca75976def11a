# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures a manager of many servers: beats, slices and clients that join.

  python -m tools.bench manager
  python -m tools.bench manager --servers 96,1536

Servers are addresses of one TensorFlow server with four devices: the manager
counts the devices at each address, and a client joins each address, as with
different servers.

`messages` are requests to the manager and sessions with servers. If a step
needs the same number per server for any number of servers, its cost is linear.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from palm_mtf.runtime import server_info
from palm_mtf.runtime.client.connect import Membership
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Server, Wish
from palm_mtf.runtime.server.clients import Registration
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import read_incarnation, read_info
from tools.bench.command import Flag, numbers

NUM_DEVICES = 4
SECS = 60.0  # POD_TIMEOUT_SECS
HEAD = "servers  step        seconds  per second  messages  per server"


FLAGS = {"--servers": Flag("96,384,1536", "numbers of them", numbers)}


def row(record: dict) -> str:
  """Returns a line of the table."""
  number, messages = record["servers"], record["messages"]
  rate = f"{number / record['seconds']:,.0f}"
  return (
    f"{number:<8} {record['step']:<9}{record['seconds']:10.3f}{rate:>12}"
    f"{messages:>10,}{messages / number:>12.2f}"
  )


class _Messages:
  """Counts the requests and sessions of this process until `stack` ends."""

  def __init__(self, stack: contextlib.ExitStack):
    self.number, self.result = 0, None
    for owner, name in ((ManagerClient, "call"), (server_info, "_session")):
      original = getattr(owner, name)
      setattr(owner, name, self._count(original))
      stack.callback(setattr, owner, name, original)

  def _count(self, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
      self.number += 1
      return function(*arguments, **keywords)

    return run

  def time(self, work: Callable[[], Any], **record: Any) -> dict:
    """Returns the record with seconds and messages; keeps `work`'s `result`."""
    before, start = self.number, time.perf_counter()
    self.result = work()
    seconds = time.perf_counter() - start
    return {**record, "seconds": seconds, "messages": self.number - before}


@contextlib.contextmanager
def _process(*command: str) -> Iterator[str]:
  """Runs a command; yields the last word of its first line."""
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as process:
    try:
      yield process.stdout.readline().split()[-1]
    finally:
      process.kill()


@contextlib.contextmanager
def _manager() -> Iterator[str]:
  """Runs a manager; yields its address."""
  with tempfile.TemporaryDirectory() as folder:
    flags = "--listen=127.0.0.1:0", f"--state={folder}/state"
    command = sys.executable, "-m", "palm_mtf", "pods", "manage", *flags
    with _process(*command) as address:
      yield address


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields the seconds and messages of each step, for each number."""
  for number in chosen.servers:
    yield from _measure_number(number)


def _measure_number(number: int) -> Iterator[dict]:
  serve = "pods", "serve", f"--devices={NUM_DEVICES}", "--threads=1"
  with (
    _manager() as manager,
    _process(sys.executable, "-m", "palm_mtf", *serve) as server,
    ManagerClient("--manager", manager) as client,
    concurrent.futures.ThreadPoolExecutor(32) as threads,
    contextlib.ExitStack() as stack,
  ):
    port = server.partition(":")[2]
    names = [f"127.1.{i // 250}.{i % 250 + 1}:{port}" for i in range(number)]
    own = start_server(1, 1).target.removeprefix("grpc://")
    registration = Registration(
      name="client_bench",
      address=own,
      incarnation=read_incarnation(own, SECS),
      secs=SECS,
    )
    info = read_info(names[0], SECS)
    membership = Membership(registration, dict.fromkeys(names, info))
    shape = f"{number // 2}x{NUM_DEVICES}"

    def register(address: str) -> None:
      fields = Server(
        address=address,
        island="main",
        num_devices=NUM_DEVICES,
        device_bytes=10**9,
        kind={"palm_mtf": "1"},
      )
      client.call("register", server=dataclasses.asdict(fields))

    def beat(name: str) -> None:
      assert client.call("beat", name=name)["is_known"]

    messages = _Messages(stack)
    for step, work in {
      "register": lambda: list(threads.map(register, names)),
      "beat": lambda: list(threads.map(beat, names)),
      "allocate": lambda: client.allocate("bench", Wish(slices=[shape] * 2)),
      "join": lambda: membership.join(),
      "release": lambda: client.call("release", owner="bench"),
    }.items():
      yield messages.time(work, servers=number, step=step)
      if step == "allocate":
        places = itertools.chain(*messages.result)
        assert {Place(*x).address for x in places} == {*names}
