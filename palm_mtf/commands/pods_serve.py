# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf pods serve`: the server of a pod whose client is elsewhere.

It serves one client after another until it is stopped. All input is checked
before TensorFlow is imported.
"""

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

_logger = logging.getLogger(__name__)

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def serve(
  *,
  listen: str,
  devices: int = 1,
  threads: int | None = None,
  allow_any_address: bool = False,
) -> None:
  """Serves devices of this host; prints where, and returns only by an error.

  Args:
    listen: ADDRESS:PORT; port 0 is any that is free.
    devices: virtual CPU devices.
    threads: that share an operation's work; all servers of a run have as many.
      None is one for each core.
    allow_any_address: permits 0.0.0.0.

  Raises:
    UserError: this host cannot listen there.
  """
  check_count("--devices", devices)
  threads = len(os.sched_getaffinity(0)) if threads is None else threads
  check_count("--threads", threads)
  host, port = split_address("--listen", listen)
  ip = resolve("--listen", host)
  if ip == ANY_ADDRESS and not allow_any_address:
    raise UserError(
      f'--listen = "{listen}" lets every host that reaches this one run '
      "programs on it; give one address, or add --allow_any_address."
    )
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
  # Also in the threads of the server: they wait until this one asks for them.
  signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
  from palm_mtf.cluster.connect import start_server

  server = start_server(devices, threads, (ip, port))
  _, _, port_text = server.target.rpartition(":")
  print(f"serving {devices} devices on {ip}:{port_text}", flush=True)
  signal.sigwait(_STOP_SIGNALS)
  os._exit(0)  # the server has no other way to stop


def _means_loopback(host: str) -> bool:
  """Whether it is written so: some systems give their own name that address."""
  return host.startswith("localhost") or host.replace(".", "").isdigit()
