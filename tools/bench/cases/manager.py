# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures a manager of many servers: beats, slices and clients that join.

  python -m tools.bench manager
  python -m tools.bench manager --servers 96,1536
  python -m tools.bench manager --servers '' --real 64

Simulated servers are addresses of one TensorFlow server with four devices: the
manager counts the devices at each address, and a client joins each address, as
with different servers. Real servers are processes with one device each. They
are forks of one process, and share what it has imported. A client runs a
program on all of them, and then `palm_mtf train` runs two steps on two of them.

`messages` are requests to the manager and sessions with servers. If a step
needs the same number per server for any number of servers, its cost is linear.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.commands.pods import join_manager
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.executors.host.starter import HostStarter
from palm_mtf.runtime import server_info
from palm_mtf.runtime.client.connect import Membership, connect
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.host_functions import HOST_MODULES
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Server, Wish
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.server.clients import Registration
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import read_incarnation, read_info
from tools.bench.command import Flag, count, worker_command
from tools.bench.pairs import POSITIVE

NUM_DEVICES, NUM_PODS = 4, 8
SECS = 60.0  # POD_TIMEOUT_SECS
BOUNDS = dict.fromkeys(("seconds", "messages"), POSITIVE)
HEAD = (
  "servers            step        seconds  per second  messages  per server"
)


def _read_numbers(name: str, text: str) -> list[int]:
  return [count()(name, x) for x in text.split(",") if x]


FLAGS = {
  "--servers": Flag("96,384,1536", "numbers of simulated ones", _read_numbers),
  "--real": Flag(0, "number of real ones, a multiple of 8", count(0)),
}


def row(record: dict) -> str:
  """Returns a line of the table."""
  number, messages = record["servers"], record["messages"]
  name = f"{number} {record['kind']}"
  rate = f"{number / record['seconds']:,.0f}"
  return (
    f"{name:<18} {record['step']:<9}{record['seconds']:10.3f}{rate:>12}"
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
  if chosen.real % NUM_PODS:
    raise UserError(f"--real = {chosen.real}: give a multiple of {NUM_PODS}.")
  for number in chosen.servers:
    yield from _measure_simulated(number)
  if chosen.real:
    yield from _measure_real(chosen.real)


def _measure_simulated(number: int) -> Iterator[dict]:
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
      yield messages.time(work, kind="simulated", servers=number, step=step)
      if step == "allocate":
        places = itertools.chain(*messages.result)
        assert {Place(*x).address for x in places} == {*names}


def _measure_real(number: int) -> Iterator[dict]:
  pods = {"pods": "cluster", "islands": "auto", "num_pods": NUM_PODS}
  mesh = DeviceMesh(mesh_shape=f"data:{number // NUM_PODS}", layout="")
  with contextlib.ExitStack() as stack:
    manager = stack.enter_context(_manager())
    messages = _Messages(stack)

    def start() -> None:
      work = worker_command("manager", manager=manager, number=number)
      stack.enter_context(_process(*work))

    def measure(step: str, work: Callable[[], object]) -> dict:
      return messages.time(work, kind="real", servers=number, step=step)

    yield measure("start", start)
    settings = PodsConfig(manager=manager, **pods)
    servers = stack.enter_context(PodServers(settings, mesh))
    yield measure("allocate", servers.places)
    places = messages.result
    yield measure("ask", lambda: Heartbeat(servers, places, SECS))
    infos = stack.enter_context(messages.result).infos
    given = HostStarter(), settings, mesh, places, infos
    yield measure("connect", lambda: connect(*given))
    cluster = messages.result
    yield measure("join", lambda: stack.enter_context(cluster.client()))
    client = messages.result
    with client.graph.as_default():
      ones = []
      for device in itertools.chain(*cluster.devices.pods):
        with tf.device(device):
          ones.append(tf.random.uniform([]) * 0 + 1)
      program = Program(outputs=tf.add_n(ones))
    for step in ("first run", "run"):
      yield measure(step, lambda: client.call(program))
      assert messages.result == number
    yield measure("train", lambda: _train(manager))


def _train(manager: str) -> None:
  with tempfile.TemporaryDirectory() as folder:
    macros = {
      "MODEL_DIR": folder,
      "TEXT_FILES": str(Path(json.__file__).parent / "*.py"),
      "VOCAB_SIZE": 400,
      "VALIDATION_SHARE": 0.3,
      "MANAGER": manager,
      "TRAIN_STEPS": 2,
    }
    files = "recipes/quickstart.gin", "pods/managed.gin"
    subprocess.run(
      [
        *(sys.executable, "-m", "palm_mtf", "train"),
        *(f"--gin_file={x}" for x in files),
        *(f"--gin.{name}={value!r}" for name, value in macros.items()),
      ],
      check=True,
      stdout=subprocess.DEVNULL,
    )


def work(manager: str, number: int) -> None:
  """Runs servers of a manager, each in a process; prints when all run."""
  for name in HOST_MODULES:
    importlib.import_module(name)
  ready, report = os.pipe()
  for _ in range(number):
    if not os.fork():
      server = start_server(1, 1)
      client = ManagerClient("--manager", manager)
      join_manager(client, server.target.removeprefix("grpc://"), "main")
      os.write(report, b".")
      break
  else:
    for _ in range(number):
      os.read(ready, 1)
    print("ready", flush=True)
  sys.stdin.read()
  os._exit(0)  # a TensorFlow server cannot be stopped otherwise
