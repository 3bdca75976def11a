# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers of two pods that chaos.py kills and cuts off."""

import contextlib
import random
import subprocess
from pathlib import Path

from tests import processes
from tests.relay import Relay

# TensorFlow says what is an error alone.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


class Servers:
  """Servers of two pods, the second behind a link."""

  def __init__(self, folder: Path, stack: contextlib.ExitStack):
    self._log = stack.enter_context(open(folder / "servers.txt", "a"))
    self._stack = stack
    self._processes: list[subprocess.Popen | None] = [None, None]
    self._link: Relay | None = None

  def islands(self) -> list[list[str]]:
    """Returns ISLANDS, after starting anew what has ended."""
    addresses = []
    for number, process in enumerate(self._processes):
      if process:  # it may have heard of a client that is gone
        self._end(process)
      flags = ["--listen=127.0.0.1:0", "--devices=1", "--threads=1"]
      process = processes.start(
        *("-m", "palm_mtf", "pods", "serve", *flags),
        variables=QUIET,
        stderr=self._log,
      )
      self._stack.callback(self._end, process)
      self._processes[number] = process
      addresses.append(process.stdout.readline().split()[-1])
    if self._link:
      self._link.close()
    self._link = Relay(addresses[1])
    self._stack.callback(self._link.close)
    return [[addresses[0]], [self._link.address]]

  @staticmethod
  def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()

  def kill(self, number: int) -> None:
    """Kills one server."""
    self._processes[number].kill()

  def cut(self, rng: random.Random) -> None:
    """Cuts the link, or makes it silent, within the next bytes."""
    self._link.fail_after(rng.randrange(50_000), closes=rng.random() < 0.5)
