# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf pods serve`: serves devices of this host to a client elsewhere."""

# The server knows no model: a client sends it the part of the graph that is
# placed on its devices, and it serves one client after another.

import logging
import os
import signal

from palm_mtf.cluster.addresses import (
  ANY_ADDRESS,
  check_free,
  is_loopback,
  resolve,
  split_address,
)
from palm_mtf.errors import UserError, check_count
from palm_mtf.machine.compiled_code import save_compiled_code

_logger = logging.getLogger(__name__)

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def serve(
  *,
  listen: str,
  devices: int = 1,
  threads: int | None = None,
  allow_any_address: bool = False,
) -> None:
  """Serves devices of this host until a signal stops it; prints where.

  Args:
    listen: ADDRESS:PORT; port 0 is any free port.
    devices: number of virtual CPU devices.
    threads: number of threads an operation has; None is one a core.
    allow_any_address: permit 0.0.0.0, every address of this host.

  Raises:
    UserError: this host cannot listen there.
  """
  check_count("--devices", devices)
  # How many threads share a sum decides its last bit, and pods hold the same
  # bits: the servers of a run have equally many (cluster/server_info.py).
  threads = len(os.sched_getaffinity(0)) if threads is None else threads
  check_count("--threads", threads)
  host, port = split_address("--listen", listen)
  ip = resolve("--listen", host)
  if ip == ANY_ADDRESS and not allow_any_address:
    raise UserError(
      f'--listen = "{listen}" lets every host that reaches this one run '
      "programs on it; give one address, or add --allow_any_address."
    )
  # Some systems list their own name as 127.0.1.1 in /etc/hosts: a server that
  # is named so would be reached by nobody else.
  if is_loopback(ip) and not _means_loopback(host):
    raise UserError(
      f'--listen = "{listen}": "{host}" is {ip} on this host, where no other '
      "host reaches it; give an address that others reach, or localhost."
    )
  check_free("--listen", ip, port)
  if not is_loopback(ip):
    where = "any address of this host" if ip == ANY_ADDRESS else ip
    _logger.warning(
      f"TensorFlow's protocol has no authentication: whoever reaches {where} "
      "can run programs and read files as this user; let a firewall admit the "
      "client and the other servers alone"
    )
  # Threads of the server, made later, inherit the mask: the signals wait until
  # this thread asks for them.
  signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
  from palm_mtf.cluster.server.start import start_server, watch_links

  server = start_server(devices, threads, (ip, port))
  watch_links(server)
  _, _, port_text = server.target.rpartition(":")
  print(f"serving {devices} devices on {ip}:{port_text}", flush=True)
  signal.sigwait(_STOP_SIGNALS)
  save_compiled_code()
  os._exit(0)  # the server has no other way to stop


def _means_loopback(host: str) -> bool:
  return host.startswith("localhost") or host.replace(".", "").isdigit()
