# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager: gives clients ("owners") slices of the servers that are alive.

Servers, drains (servers that get no new slices) and slices are on disk. Which
servers and owners are alive is only in memory, because a restarted manager soon
receives their heartbeats again.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from palm_mtf import errors
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.json_text import json_text
from palm_mtf.runtime.manager.slices import (
  WRONG_JSON,
  Allocation,
  Place,
  Places,
  Server,
  Wish,
  bind,
)

_logger = logging.getLogger(__name__)

_FORMAT = 2  # version of the format of the manager's file


class Store:
  """Servers and allocations, in a file, so that they outlive the manager."""

  def __init__(self, path: str):
    """Reads the file, or makes it; UserError if the file cannot be used."""
    if not path:
      raise UserError("--state is empty: name a file for servers and slices.")
    self._path = path
    with self._explain_errors():
      # Let several threads use the file: they use it one at a time.
      self._file = sqlite3.connect(path, timeout=0, check_same_thread=False)
      # With a write-ahead log, the exclusive lock is kept until the process
      # ends, so that a second manager cannot open the file.
      self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
      self._check_format()
      self._file.execute("PRAGMA journal_mode = WAL")
      self._file.execute(f"PRAGMA user_version = {_FORMAT}")
      self._file.execute(
        "CREATE TABLE IF NOT EXISTS items "
        "(kind TEXT, name TEXT, value TEXT, PRIMARY KEY (kind, name))"
      )
      rows = [*self._file.execute("SELECT * FROM items ORDER BY name")]
    self.servers: dict[str, Server] = {}  # by address
    self.allocations: dict[str, Allocation] = {}  # by owner
    for row in rows:
      try:
        self._add(*row)
      except WRONG_JSON:  # also UserError, which is a ValueError
        raise UserError(
          f"--state = {path!r}: {errors.shorten(row[:2])} is damaged; name "
          "another file, with which servers and runs join again."
        ) from None

  def _check_format(self) -> None:
    """Raises UserError, before any change, unless the file is a manager's."""
    (found,) = self._file.execute("PRAGMA user_version").fetchone()
    has_tables = self._file.execute("SELECT 1 FROM sqlite_master").fetchone()
    if found not in (0, _FORMAT):
      raise UserError(
        f"--state = {self._path!r}: is of another version of palm_mtf; use "
        "that version, or another file."
      )
    if has_tables and not found:
      raise UserError(
        f"--state = {self._path!r}: is a database of another program; name "
        "another file."
      )

  def _add(self, kind: str, name: str, text: str) -> None:
    fields = json.loads(text)
    if kind == "servers":
      item = Server(**fields)
    elif kind == "allocations":
      places = [[(x, i) for x, i in y] for y in fields["places"]]
      fields |= {"wish": Wish(**fields["wish"]), "places": places}
      item = Allocation(**fields)
    else:
      raise ValueError(kind)
    getattr(self, kind)[name] = item

  def put(self, kind: str, name: str, item: Server | Allocation) -> None:
    """Stores an item of `kind`, "servers" or "allocations", on disk."""
    row = kind, name, json_text(dataclasses.asdict(item))
    with self._explain_errors(), self._file:
      self._file.execute("REPLACE INTO items VALUES (?, ?, ?)", row)
    getattr(self, kind)[name] = item

  def remove(self, kind: str, name: str) -> None:
    """Removes an item; if the disk is full, only in memory.

    A restarted manager then finds the item again, and removes it once its
    server or owner has been silent for long enough.
    """
    del getattr(self, kind)[name]
    try:
      with self._explain_errors(), self._file:
        self._file.execute(
          "DELETE FROM items WHERE kind = ? AND name = ?", (kind, name)
        )
    except UserError as error:
      _logger.warning(f"{name} is removed in memory only: {error}")

  def close(self) -> None:
    """Lets another manager open the file."""
    self._file.close()

  @contextlib.contextmanager
  def _explain_errors(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.Error as error:
      why = f"{error}; mend that, or name another file"
      if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
        why = "another manager uses it; stop that one, or name another file"
      raise UserError(f"--state = {self._path!r}: {why}.") from None


# Servers and owners send one beat (heartbeat) per second. If there are many
# servers, all wait longer, so that servers send at most this many per second.
_MAX_BEATS_PER_SEC = 500.0
_LOST_BEATS = 6  # a server that misses this many beats is lost
_OWNER_SECS = 30.0  # an owner that is silent for longer loses its slices
_FORGET_SECS = 600.0  # a server that is silent for longer is removed
_LATE_SECS = 3.0  # a longer pause of `tick` is not counted as anyone's silence


class Manager:
  """Answers requests, whose arguments and results are JSON values."""

  def __init__(
    self,
    store: Store,
    count_devices: Callable[[str], int],
    take_release: Callable[[str], None] = lambda owner: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Continues with the servers and allocations of `store`.

    `count_devices` returns how many devices the TensorFlow server at an address
    has, and raises UserError if no server answers. `take_release` is called
    with the name of an owner that has lost its slices, to end its turns too.
    """
    self._store, self._count_devices = store, count_devices
    self._take_release = take_release
    self._clock, self._lock = clock, threading.RLock()
    self._last = clock()  # time of the last `tick`
    self._heard = dict.fromkeys(
      [*store.servers, *store.allocations], self._last
    )

  def tick(self) -> None:
    """Notes the time; call this at least once per second.

    Time in which this process was suspended does not count as others' silence.
    """
    with self._lock:
      now = self._clock()
      late = now - self._last
      if late > _LATE_SECS:
        self._heard = {x: y + late for x, y in self._heard.items()}
      self._last = now

  def register(self, server: Mapping[str, Any]) -> None:
    """Adds or replaces a server, given the fields of its `Server`.

    Raises UserError if the TensorFlow server at this address does not answer,
    or has fewer devices than `num_devices` says.
    """
    new = Server(**server)
    found = self._count_devices(new.address)
    if found < new.num_devices:
      raise UserError(
        f"the server {new.address} registers {new.num_devices} devices, and "
        f"TensorFlow has {found} there; start it with --devices {found}."
      )
    with self._lock:
      # A drain stays in force when the server is restarted.
      old = self._store.servers.get(new.address, new)
      new = dataclasses.replace(new, is_drained=old.is_drained)
      self._store.put("servers", new.address, new)
      self._heard[new.address] = self._clock()
    _logger.info(f"{new.address} has joined island {new.island}")

  def beat(self, name: str) -> dict[str, Any]:
    """Notes that a server (address) or owner lives; says when to beat next."""
    with self._lock:
      self.tick()
      is_known = name in self._store.servers or name in self._store.allocations
      if is_known:
        self._heard[name] = self._clock()
      return {"is_known": is_known, "pause_secs": self._pause_secs()}

  def leave(self, address: str) -> None:
    """Removes a server that ends."""
    with self._lock:
      if address in self._store.servers:
        self._store.remove("servers", address)
        _logger.info(f"{address} has left")

  def allocate(
    self,
    owner: str,
    wish: Mapping[str, Any],
    avoid: Collection[str] = (),
    is_trial: bool = False,
  ) -> Places:
    """Binds an owner's slices, and returns their devices.

    A slice stays where it is if its servers are alive, not drained and not
    avoided. Otherwise it moves if there is room. If there is no room, no slice
    moves, because a lost server may come back.

    `wish` has the fields of a `Wish`, and `avoid` the addresses of servers that
    the owner has lost. If `is_trial`, nothing changes. Raises UserError if no
    island can hold a slice.
    """
    new = Wish(**wish)
    with self._lock:
      self._reconcile()
      servers, old = self._store.servers, self._store.allocations.get(owner)
      states = {x: self._describe(y) for x, y in servers.items()}
      live = {x for x, state in states.items() if state != "lost"}
      usable = {x for x, state in states.items() if state == "serving"}
      others = [x for x in self._store.allocations.values() if x.owner != owner]
      bound: dict[int, list[Place]] = {}
      if old and dataclasses.replace(old.wish, slices=new.slices) == new:
        pairs = zip(old.wish.slices, old.places, new.slices, strict=False)
        bound = {i: y for i, (x, y, z) in enumerate(pairs) if x == z}
      near = usable - {*avoid}
      for stay, move in ((near, near), (live, usable)):
        kept = {i: x for i, x in bound.items() if all(y in stay for y, _ in x)}
        among = move | {x for x, _ in itertools.chain(*kept.values())}
        try:
          places = bind(new, [servers[x] for x in among], others, kept)
          break
        except UserError as error:
          refusal = error
      else:
        if len(bound) < len(new.slices):
          raise refusal
        places = [bound[i] for i in range(len(bound))]
      allocation = Allocation(owner=owner, wish=new, places=places)
      if not is_trial:
        self._heard[owner] = self._clock()
        if allocation != old:
          self._store.put("allocations", owner, allocation)
          _logger.info(f"{owner} has {', '.join(new.slices)}")
      return places

  def release(self, owner: str) -> None:
    """Removes an owner's slices; raises UserError if it has none."""
    with self._lock:
      _get("owner", owner, self._store.allocations)
      self._store.remove("allocations", owner)
      _logger.info(f"{owner} has no slices any more")
    self._take_release(owner)

  def drain(self, address: str, is_drained: bool) -> None:
    """Sets whether new slices avoid a server; UserError if it is unknown."""
    with self._lock:
      server = _get("server", address, self._store.servers)
      server = dataclasses.replace(server, is_drained=is_drained)
      self._store.put("servers", address, server)

  def list_all(self) -> list[dict[str, Any]]:
    """Returns a JSON object per server, then per owner, for `pods list`."""
    with self._lock:
      self._reconcile()
      owners: dict[str, set[str]] = {}  # {address of a server: owners}
      for each in self._store.allocations.values():
        for address, _ in itertools.chain(*each.places):
          owners.setdefault(address, set()).add(each.owner)
      return [
        {
          **dataclasses.asdict(x),
          "state": self._describe(x),
          "owners": sorted(owners.get(x.address, ())),
        }
        for x in self._store.servers.values()
      ] + [dataclasses.asdict(x) for x in self._store.allocations.values()]

  def list_devices(self) -> dict[str, int]:
    """Returns {"address/number": bytes of a device}, the scheduler's limits."""
    # Take no lock: a thread that writes to the disk may hold the lock for long,
    # and meanwhile no client's program could start.
    return {
      f"{x.address}/{i}": x.device_bytes
      for x in [*self._store.servers.values()]
      for i in range(x.num_devices)
    }

  def _reconcile(self) -> None:
    """Releases slices of silent owners; removes servers lost long ago."""
    self.tick()
    for owner in [*self._store.allocations]:
      if self._silent_secs(owner) > _OWNER_SECS:
        self.release(owner)
    for address in [*self._store.servers]:
      if self._silent_secs(address) > _FORGET_SECS:
        self.leave(address)

  def _silent_secs(self, name: str) -> float:
    return self._clock() - self._heard[name]

  def _pause_secs(self) -> float:
    return max(1.0, len(self._store.servers) / _MAX_BEATS_PER_SEC)

  def _describe(self, server: Server) -> str:
    if self._silent_secs(server.address) > _LOST_BEATS * self._pause_secs():
      return "lost"
    return "drained" if server.is_drained else "serving"


def _get(what: str, name: str, known: Mapping[str, Any]) -> Any:
  if name not in known:
    raise UserError(
      f'no {what} "{name}"{did_you_mean(name, known)}; `palm_mtf pods list` '
      f"prints every {what}."
    )
  return known[name]
