# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf pods`: serves devices, manages servers, and queries a manager.

A manager assigns servers' devices to clients. The argument `manager` is its
HOST:PORT; `manager_tls` is the PREFIX of its key and certificate, or "". If no
manager answers there, the commands raise UserError.

A server needs no model settings, because a client sends the part of the graph
that the server's devices compute.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import re
import signal
from typing import Any

from palm_mtf.console import format_table
from palm_mtf.errors import UserError, check_count
from palm_mtf.json_text import json_text
from palm_mtf.learners.client import LearnerClient
from palm_mtf.learners.members import add_member
from palm_mtf.machine.compiled_code import save_compiled_code
from palm_mtf.machine.host_memory import memory_bytes
from palm_mtf.model_dir.foreign_files import read_regular
from palm_mtf.runtime import addresses
from palm_mtf.runtime.host_functions import HOST_MODULES
from palm_mtf.runtime.manager import service
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Server, check_name

_logger = logging.getLogger(__name__)

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_MOST_TOKEN_BYTES = 1000
_TOKEN = re.compile(r"[\w-]+", re.ASCII)
_WAIT_SECS = 300.0  # how long a learner waits for a run that does not answer
_INFO_SECS = 60.0  # timeout for reading this server's info: a busy host is slow


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

  Raises UserError if this host cannot listen on that address, or the manager
  does not accept the server.
  """
  check_count("--devices", devices)
  # All servers of a run must have the same number of threads, because the last
  # bit of a sum depends on the number of threads, and results have to be
  # bit-identical on all pods.
  threads = len(os.sched_getaffinity(0)) if threads is None else threads
  check_count("--threads", threads)
  ip, port = addresses.listening_address(listen, allow_any_address)
  if not addresses.is_loopback(ip):
    where = "any address of this host" if ip == addresses.ANY_ADDRESS else ip
    _logger.warning(
      "TensorFlow's protocol has no authentication: every host that reaches "
      f"{where} can run programs and read files as this user; let a firewall "
      "admit only the client and the other servers"
    )
  client = None
  if manager:
    client = ManagerClient("--manager", manager, manager_tls)
    check_name("--island", island)
    if ip == addresses.ANY_ADDRESS:
      raise UserError(
        f'--listen = "{listen}": clients get the address from the manager; '
        "give the one that they reach."
      )
    client.call("beat", name="")  # fail early if no manager answers
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
    # If the manager does not answer, it will notice that this server is silent.
    with contextlib.suppress(UserError):
      client.call("leave", address=address)
  save_compiled_code()
  os._exit(0)  # a TensorFlow server cannot be stopped otherwise


def join_manager(client: ManagerClient, address: str, island: str) -> None:
  """Registers this server; starts heartbeats, which keep it registered."""
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


def manage(
  *,
  listen: str,
  state: str,
  policy: str,
  manager_tls: str,
  allow_any_address: bool,
) -> None:
  """Prints the address, then manages servers until a signal arrives.

  Raises UserError if this host cannot listen there, or another manager uses the
  file `state`.
  """
  ip, port = addresses.listening_address(listen, allow_any_address)
  if not addresses.is_loopback(ip) and not manager_tls:
    _logger.warning(
      f"everyone who reaches {ip} can take and release devices; give a key "
      "(--manager_tls), or let a firewall admit only servers and clients"
    )
  # Threads inherit the mask, so that a signal stays pending until sigwait.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
  try:
    with service.serve(ip, port, state, manager_tls, policy) as port:
      print(f"managing on {ip}:{port}", flush=True)
      signal.sigwait(_STOP_SIGNALS)
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def list_all(*, manager: str, manager_tls: str, as_json: bool) -> None:
  """Prints servers, and clients' devices (slices), programs and buffers."""
  found = _ask(manager, manager_tls, "list_all")
  if as_json:
    print(*map(json_text, found), sep="\n")
    return
  rows = [("server", "island", "devices", "GB per device", "state", "owners")]
  for each in (x for x in found if "address" in x):
    gigabytes = f"{each['device_bytes'] / 1e9:.1f}"
    names = each["address"], each["island"], str(each["num_devices"])
    owners = ", ".join(each["owners"]) or "-"
    rows.append((*names, gigabytes, each["state"], owners))
  print(format_table(rows, "<<<<<<"))
  for each in (x for x in found if "owner" in x):
    wish = each["wish"]
    slices, gigabytes = ", ".join(wish["slices"]), wish["device_bytes"] / 1e9
    print(f"{each['owner']} has {slices} ({gigabytes:.1f} GB per device)")
  for each in (x for x in found if "client" in x):
    kept = sum(each["kept_bytes"].values()) / 1e9
    print(
      f"{each['client']} runs {each['num_running']} programs, "
      f"{each['num_waiting']} wait, and keeps {kept:.1f} GB in buffers"
    )


def drain(
  *, server: str, undo: bool, manager: str, manager_tls: str, as_json: bool
) -> None:
  """Stops assigning a server's devices, so it can end; `undo` resumes."""
  _ask(manager, manager_tls, "drain", address=server, is_drained=not undo)
  if as_json:
    print(json_text({"address": server, "is_drained": not undo}))
  else:
    print(f"new slices {'may use' if undo else 'avoid'} {server}")


def release(
  *, owner: str, manager: str, manager_tls: str, as_json: bool
) -> None:
  """Takes all devices from client `owner`, so that others can use them."""
  _ask(manager, manager_tls, "release", owner=owner)
  print(json_text({"owner": owner}) if as_json else f"{owner} has no slices")


def token(*, name: str, tokens: str, as_json: bool) -> None:
  """Adds a learner to the file `tokens`; prints its token, once."""
  found = add_member(tokens, name)
  print(json_text({"name": name, "token": found}) if as_json else found)


def join(
  *,
  address: str,
  certificate: str,
  token_file: str,
  most_gb: int | None,
  **mesh: str | None,
) -> None:
  """Trains for a run at `address`, which need not trust this process.

  Raises UserError if the run refuses this learner or does not answer, or the
  run's model needs more memory than `most_gb`. `mesh` has TPU, MESH_SHAPE and
  LAYOUT in lower case; the run's values replace None.
  """
  check_count("--most_gb", 1 if most_gb is None else most_gb)
  try:
    own = read_regular(token_file, _MOST_TOKEN_BYTES).decode("ascii", "replace")
    wrong = "" if _TOKEN.fullmatch(own.strip()) else "has no token"
  except OSError as error:
    wrong = str(error.strerror)
  if wrong:
    raise UserError(
      f"--token_file = {token_file!r}: {wrong}; give a file with the token "
      "that `palm_mtf pods token` has printed."
    )
  most_bytes = most_gb * 10**9 if most_gb else memory_bytes()[1]
  with LearnerClient(address, certificate, own.strip(), _WAIT_SECS) as client:
    from palm_mtf.learners.volunteer import describe_kernels, take_part

    own_mesh = {x.upper(): y for x, y in mesh.items() if y is not None}
    header = {"kernels": describe_kernels()}
    take_part(client, header, own_mesh, most_bytes)
  print(f"{address} has no more work")


def _ask(manager: str, tls: str, method: str, **arguments: Any) -> Any:
  with ManagerClient("--manager", manager, tls) as client:
    return client.call(method, **arguments)
