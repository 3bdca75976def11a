# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process of a pod's server, if the pods are on the client's machine.

client/local_servers.py starts the process, writes ServerSettings as JSON to its
stdin, and reads the server's address from its stdout. The process ends with the
client.
"""

import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from palm_mtf.console import configure_logging
from palm_mtf.json_text import json_text, read_dataclass
from palm_mtf.machine.compiled_code import save_compiled_code
from palm_mtf.machine.process import die_with, own_process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """Settings that the client sends to the server process."""

  client: int  # the client's process id
  num_devices: int  # virtual CPU devices of the pod's mesh
  modules: Sequence[str]  # names of modules with host functions, to import
  cores: Sequence[int]  # numbers of the CPU cores that the process may use


def serve(settings: ServerSettings) -> None:
  """Starts the server, prints its address, and waits until the client ends."""
  # Set the cores before TensorFlow is imported and counts them for its threads.
  os.sched_setaffinity(0, settings.cores)
  for name in settings.modules:
    importlib.import_module(name)
  from palm_mtf.runtime.server.start import start_server

  server = start_server(settings.num_devices, num_threads=len(settings.cores))
  print(json_text({"address": server.target.removeprefix("grpc://")}))
  sys.stdout.flush()
  sys.stdin.read()  # ends when the client ends, even if it is killed
  save_compiled_code()
  os._exit(0)  # a TensorFlow server has no other way to stop


def main() -> None:
  """Reads the settings from the first line of stdin, and serves."""
  # Ignore signals that a terminal or a batch system sends to every process of a
  # job, because the client handles them and then stops this server.
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  configure_logging()
  own_process()
  settings = read_dataclass(ServerSettings, sys.stdin.readline())
  die_with(settings.client)
  serve(settings)


if __name__ == "__main__":
  main()
