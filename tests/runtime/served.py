# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts servers of `palm_mtf pods serve`, for the tests."""

import contextlib

from tests import processes


class Served(contextlib.ExitStack):
  """Servers with one device each; their addresses; ISLANDS with a pod each."""

  def __init__(
    self,
    num_servers: int,
    threads: int = 1,
    variables: dict[str, str] | None = None,
  ):
    super().__init__()
    self._threads, self._variables = threads, variables
    self.processes = [self.start() for _ in range(num_servers)]
    self.addresses = [x.stdout.readline().split()[-1] for x in self.processes]
    self.islands = [[address] for address in self.addresses]

  def start(self, port=0):
    """Starts another server, at `port`; 0 is any free port."""
    flags = [f"--listen=localhost:{port}", f"--threads={self._threads}"]
    process = processes.start(
      *("-m", "palm_mtf", "pods", "serve", "--devices=1", *flags),
      variables=self._variables,
      stderr=None,
    )
    self.enter_context(process)
    self.callback(process.kill)
    return process
