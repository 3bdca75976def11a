# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process of one pod: a TensorFlow server that lives as long as its client.

  python -m palm_mtf.cluster.server_process <settings of ServerSettings as JSON

local_servers.py starts it and reads its address from stdout. It ends when its
stdin does, which is when its client ends, however that comes.
"""

import ctypes
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence

from palm_mtf.console import configure_logging

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """What a server is told.

  Attributes:
    client: process id of the client.
    num_devices: virtual CPU devices of the pod's mesh.
    cores: the numbers of the cores that it may use.
  """

  client: int
  num_devices: int
  cores: Sequence[int]


def serve(settings: ServerSettings) -> None:
  """Starts the server, says where it is, and waits for the client's end."""
  # Before TensorFlow is imported: it counts the cores that it may use.
  os.sched_setaffinity(0, settings.cores)
  from palm_mtf.cluster.connect import start_server

  server = start_server(settings.num_devices, num_threads=len(settings.cores))
  print(json.dumps({"address": server.target.removeprefix("grpc://")}))
  sys.stdout.flush()
  sys.stdin.read()  # to its end
  os._exit(0)  # the server has no other way to stop


def _die_with(client: int) -> None:
  """Asks the kernel to end this process with the thread that started it."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != client:  # it has ended before that
    os._exit(0)


def main() -> None:
  """Reads the settings from the first line of stdin, and serves."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's
  configure_logging()
  settings = ServerSettings(**json.loads(sys.stdin.readline()))
  _die_with(settings.client)
  serve(settings)


if __name__ == "__main__":
  main()
