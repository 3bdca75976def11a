# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf pods serve`: serves this host's devices to clients elsewhere."""

# The server needs no model settings, because a client sends the part of the
# graph that the server's devices compute.

import contextlib
import dataclasses
import importlib
import logging
import os
import signal

from palm_mtf.errors import UserError, check_count
from palm_mtf.machine.compiled_code import save_compiled_code
from palm_mtf.runtime.addresses import (
  ANY_ADDRESS,
  is_loopback,
  listening_address,
)
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Server, check_name
from palm_mtf.training.host_modules import HOST_MODULES

_logger = logging.getLogger(__name__)

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_INFO_SECS = 60.0  # timeout for reading this server's own info


def serve(
  *,
  listen: str,
  devices: int = 1,
  threads: int | None = None,
  allow_any_address: bool = False,
  manager: str = "",
  manager_tls: str = "",
  island: str = "main",
) -> None:
  """Prints the address, then serves this host's devices until a signal arrives.

  Raises:
    UserError: if this host cannot listen on that address, or the manager does
      not accept the server.
  """
  check_count("--devices", devices)
  # All servers of a run must have the same number of threads, because the last
  # bit of a sum depends on the number of threads, and results have to be
  # bit-identical on all pods.
  threads = len(os.sched_getaffinity(0)) if threads is None else threads
  check_count("--threads", threads)
  ip, port = listening_address(listen, allow_any_address)
  if not is_loopback(ip):
    where = "any address of this host" if ip == ANY_ADDRESS else ip
    _logger.warning(
      "TensorFlow's protocol has no authentication: every host that reaches "
      f"{where} can run programs and read files as this user; let a firewall "
      "admit only the client and the other servers"
    )
  client = None
  if manager:
    client = ManagerClient("--manager", manager, manager_tls)
    check_name("--island", island)
    if ip == ANY_ADDRESS:
      raise UserError(
        f'--listen = "{listen}": clients get the address from the manager; '
        "give the one that they reach."
      )
    client.call("beat", name="")  # before TensorFlow is imported
  # Block the signals before the server starts threads, which inherit the mask,
  # so that a signal stays pending until this thread calls sigwait.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
  for name in HOST_MODULES:
    importlib.import_module(name)
  from palm_mtf.runtime.server.start import start_server

  try:
    server = start_server(devices, threads, (ip, port))
    address = f"{ip}:{server.target.rpartition(':')[2]}"
    if client:
      join_manager(client, address, island)
  except UserError:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    raise
  print(f"serving {devices} devices on {address}", flush=True)
  signal.sigwait(_STOP_SIGNALS)
  if client:
    # If no manager answers, it will notice that the server is silent.
    with contextlib.suppress(UserError):
      client.call("leave", address=address)
  save_compiled_code()
  os._exit(0)  # a TensorFlow server cannot be stopped otherwise


def join_manager(client: ManagerClient, address: str, island: str) -> None:
  """Registers this server, and keeps it registered."""
  from palm_mtf.runtime.server_info import read_info

  info = read_info(address, _INFO_SECS)
  server = Server(
    address=address,
    island=island,
    num_devices=info.num_devices,
    device_bytes=info.device_bytes,
    kind={
      "palm_mtf": info.palm_mtf,
      "tensorflow": info.tensorflow,
      "threads": str(info.num_threads),
      "cpu": " ".join(info.cpu_flags),
    },
  )

  def register() -> None:
    client.call("register", server=dataclasses.asdict(server))

  register()
  client.send_beats(address, register)
