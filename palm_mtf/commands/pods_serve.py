# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf pods serve`: serves this host's devices to clients elsewhere."""

# The server needs no model settings, because a client sends the part of the
# graph that the server's devices compute. The server has one client at a time.

import importlib
import logging
import os
import signal

from palm_mtf.errors import UserError, check_count
from palm_mtf.machine.compiled_code import save_compiled_code
from palm_mtf.runtime.addresses import (
  ANY_ADDRESS,
  check_free,
  is_loopback,
  resolve,
  split_address,
)
from palm_mtf.training.host_modules import HOST_MODULES

_logger = logging.getLogger(__name__)

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def serve(
  *,
  listen: str,
  devices: int = 1,
  threads: int | None = None,
  allow_any_address: bool = False,
) -> None:
  """Prints the address, then serves this host's devices until a signal arrives.

  Args:
    listen: ADDRESS:PORT; port 0 selects a free port.
    devices: number of virtual CPU devices.
    threads: number of threads per operation; None for one per core.
    allow_any_address: permit 0.0.0.0, which means every address of this host.

  Raises:
    UserError: if this host cannot listen on that address.
  """
  check_count("--devices", devices)
  # All servers of a run must have the same number of threads, because the last
  # bit of a sum depends on the number of threads, and results have to be
  # bit-identical on all pods.
  threads = len(os.sched_getaffinity(0)) if threads is None else threads
  check_count("--threads", threads)
  host, port = split_address("--listen", listen)
  ip = resolve("--listen", host)
  if ip == ANY_ADDRESS and not allow_any_address:
    raise UserError(
      f'--listen = "{listen}" lets every host that can reach this host run '
      "programs on it; give one address, or add --allow_any_address."
    )
  # On some systems /etc/hosts gives the host's own name the address 127.0.1.1,
  # which no other host can reach.
  if is_loopback(ip) and not _means_loopback(host):
    raise UserError(
      f'--listen = "{listen}": "{host}" is {ip} on this host, which no other '
      "host can reach; give an address that others can reach, or localhost."
    )
  check_free("--listen", ip, port)
  if not is_loopback(ip):
    where = "any address of this host" if ip == ANY_ADDRESS else ip
    _logger.warning(
      "TensorFlow's protocol has no authentication: every host that reaches "
      f"{where} can run programs and read files as this user; let a firewall "
      "admit only the client and the other servers"
    )
  # Block the signals before the server starts threads, which inherit the mask,
  # so that a signal stays pending until this thread calls sigwait.
  signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
  for name in HOST_MODULES:
    importlib.import_module(name)
  from palm_mtf.runtime.server.start import start_server, watch_links

  server = start_server(devices, threads, (ip, port))
  watch_links(server)
  _, _, port_text = server.target.rpartition(":")
  print(f"serving {devices} devices on {ip}:{port_text}", flush=True)
  signal.sigwait(_STOP_SIGNALS)
  save_compiled_code()
  os._exit(0)  # a TensorFlow server cannot be stopped otherwise


def _means_loopback(host: str) -> bool:
  return host.startswith("localhost") or host.replace(".", "").isdigit()
