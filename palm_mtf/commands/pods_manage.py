# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf pods manage`, and the commands that ask a manager.

The arguments `manager`, HOST:PORT, and `manager_tls`, the PREFIX of its key and
certificate or "", say how to reach the manager. Every command raises UserError
if no manager answers there.
"""

import logging
import signal
from typing import Any

from palm_mtf.json_text import json_text
from palm_mtf.runtime.addresses import is_loopback, listening_address
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.service import serve

_logger = logging.getLogger(__name__)

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_HEAD = ("server", "island", "devices", "GB per device", "state", "owners")


def manage(
  *,
  listen: str,
  state: str,
  policy: str,
  manager_tls: str,
  allow_any_address: bool,
) -> None:
  """Prints the address, then manages servers until a signal arrives.

  Raises:
    UserError: this host cannot listen on that address, or another manager uses
      `state`.
  """
  ip, port = listening_address(listen, allow_any_address)
  if not is_loopback(ip) and not manager_tls:
    _logger.warning(
      f"everyone who reaches {ip} can take and release devices; give a key "
      "(--manager_tls), or let a firewall admit only servers and clients"
    )
  # Threads inherit the mask, so that a signal stays pending until sigwait.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
  try:
    with serve(ip, port, state, manager_tls, policy) as port:
      print(f"managing on {ip}:{port}", flush=True)
      signal.sigwait(_STOP_SIGNALS)
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def list_all(*, manager: str, manager_tls: str, as_json: bool) -> None:
  """Prints all servers, then all owners of slices."""
  found = _ask(manager, manager_tls, "list_all")
  if as_json:
    print(*map(json_text, found), sep="\n")
    return
  rows = [_HEAD]
  for each in (x for x in found if "address" in x):
    gigabytes = f"{each['device_bytes'] / 1e9:.1f}"
    names = each["address"], each["island"], str(each["num_devices"])
    owners = ", ".join(each["owners"]) or "-"
    rows.append((*names, gigabytes, each["state"], owners))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    cells = (f"{x:{width}}" for x, width in zip(row, widths, strict=True))
    print("  ".join(cells).rstrip())
  for each in (x for x in found if "owner" in x):
    wish = each["wish"]
    slices, gigabytes = ", ".join(wish["slices"]), wish["device_bytes"] / 1e9
    print(f"{each['owner']} has {slices} ({gigabytes:.1f} GB per device)")


def drain(
  *, server: str, undo: bool, manager: str, manager_tls: str, as_json: bool
) -> None:
  """Makes new slices avoid a server; with `undo` they may use it again."""
  _ask(manager, manager_tls, "drain", address=server, is_drained=not undo)
  if as_json:
    print(json_text({"address": server, "is_drained": not undo}))
  else:
    print(f"new slices {'may use' if undo else 'avoid'} {server}")


def release(
  *, owner: str, manager: str, manager_tls: str, as_json: bool
) -> None:
  """Gives the devices of an owner to other owners."""
  _ask(manager, manager_tls, "release", owner=owner)
  print(json_text({"owner": owner}) if as_json else f"{owner} has no slices")


def _ask(manager: str, tls: str, method: str, **arguments: Any) -> Any:
  with ManagerClient("--manager", manager, tls) as client:
    return client.call(method, **arguments)
