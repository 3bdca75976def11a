# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Two pods for tools/chaos.py, and the faults of their servers."""

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.client import ManagerClient
from tests import processes, runs
from tests.relay import Relay
from tests.runtime.intrusion import free_ports

POD_TIMEOUT_SECS = 4.0
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # only errors in the log of TensorFlow
_ISLANDS = ("east", "west")


def start_process(
  stack: contextlib.ExitStack, log: IO[str], *arguments: str, **keywords
) -> subprocess.Popen:
  """Starts palm_mtf in a process that ends with `stack`."""
  process = processes.start(
    *("-m", "palm_mtf", *arguments), variables=QUIET, stderr=log, **keywords
  )
  stack.callback(end_process, process)
  return process


def end_process(process: subprocess.Popen) -> None:
  """Kills a process, if it still runs."""
  process.kill()
  process.wait()


class ListedPods:
  """Servers that the run names; the second is reached through a link.

  Attributes:
    faults: by name, functions that make a fault, given a source of random
      numbers.
    end_no_run: whether a run continues after these faults.
  """

  end_no_run = False

  def __init__(self, stack: contextlib.ExitStack, folder: Path, *unused: Path):
    self._log = stack.enter_context(open(folder / "servers.txt", "a"))
    self._stack = stack
    self._processes: list[subprocess.Popen] = []
    self._link: Relay | None = None
    self.faults: dict[str, Callable[[random.Random], None]] = {
      "killed server": lambda rng: rng.choice(self._processes).kill(),
      "cut link": self._cut,
    }

  def prepare(self) -> dict[str, object]:
    """Starts both servers again."""
    for process in self._processes:
      end_process(process)
    flags = ["--listen=127.0.0.1:0", "--threads=1"]
    self._processes = [
      start_process(self._stack, self._log, "pods", "serve", *flags)
      for _ in range(2)
    ]
    one, other = (x.stdout.readline().split()[-1] for x in self._processes)
    if self._link:
      self._link.close()
    self._link = Relay(other)
    self._stack.callback(self._link.close)
    return {"ISLANDS": [[one], [self._link.address]]}

  def _cut(self, rng: random.Random) -> None:
    """Cuts the link, or makes it silent, within the next 50,000 bytes."""
    self._link.fail_after(rng.randrange(50_000), closes=rng.random() < 0.5)


class ManagedPods:
  """Four servers on two islands, which a manager gives to the run.

  Attributes:
    faults: by name, functions that make a fault, given a source of random
      numbers.
    end_no_run: whether a run continues after these faults.
  """

  end_no_run = True

  def __init__(self, stack: contextlib.ExitStack, folder: Path, corpus: Path):
    self._log = stack.enter_context(open(folder / "servers.txt", "a"))
    self._stack, self._folder, self._corpus = stack, folder, corpus
    (port,) = free_ports(1)
    self._address, self._num_clients = f"127.0.0.1:{port}", 0
    self._manager = self._manage()
    self._servers = [self._serve(i) for i in range(2 * len(_ISLANDS))]
    for server in self._servers:
      server.stdout.readline()  # waits until it serves
    self.faults: dict[str, Callable[[random.Random], None]] = {
      "killed manager": self._kill_manager,
      "lost server, another joins": lambda rng: self._replace(
        rng, signal.SIGKILL
      ),
      "server leaves, another joins": lambda rng: self._replace(
        rng, signal.SIGTERM
      ),
      "drained island": self._drain,
      "killed client on the same servers": self._kill_client,
    }

  def prepare(self) -> dict[str, object]:
    """Returns the macros."""
    return {
      "ISLANDS": "auto",
      "MANAGER": self._address,
      "ON_POD_FAILURE": "wait",
      "POD_WAIT_SECS": 120.0,
    }

  def _manage(self) -> subprocess.Popen:
    flags = f"--listen={self._address}", f"--state={self._folder}/state"
    process = start_process(self._stack, self._log, "pods", "manage", *flags)
    process.stdout.readline()  # when it answers
    return process

  def _serve(self, number: int) -> subprocess.Popen:
    island = _ISLANDS[number % len(_ISLANDS)]
    flags = f"--manager={self._address}", f"--island={island}", "--threads=1"
    return start_process(self._stack, self._log, "pods", "serve", *flags)

  def _kill_manager(self, rng: random.Random) -> None:
    end_process(self._manager)
    time.sleep(rng.uniform(0, 3))
    self._manager = self._manage()

  def _replace(self, rng: random.Random, number: signal.Signals) -> None:
    """Ends a server by a signal, and starts another on the same island."""
    index = rng.randrange(len(self._servers))
    self._servers[index].send_signal(number)
    self._servers[index].wait()
    self._servers[index] = self._serve(index)
    self._servers[index].stdout.readline()

  def _drain(self, rng: random.Random) -> None:
    """Drains the servers of one island, and no others."""
    island = rng.choice(_ISLANDS)
    with ManagerClient("--manager", self._address) as client:
      for each in client.call("list_all"):
        # A server may have left in the meantime.
        with contextlib.suppress(UserError):
          if "address" in each:
            client.call(
              "drain",
              address=each["address"],
              is_drained=each["island"] == island,
            )

  def _kill_client(self, rng: random.Random) -> None:
    """Trains another run on the same servers, and kills it."""
    self._num_clients += 1
    flags = runs.arguments(
      "train",
      self._corpus,
      self._folder / f"client{self._num_clients}",
      **{"NUM_PODS": 2, "PODS": "cluster", **self.prepare()},
    )
    other = start_process(self._stack, self._log, *flags, stdout=self._log)
    with contextlib.suppress(subprocess.TimeoutExpired):
      other.wait(rng.uniform(2, 20))
    end_process(other)
