# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager's file: servers with their drains, and allocations."""

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterator

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.manager.slices import Allocation, Server, Wish

_FORMAT = 2  # of the file


class Store:
  """Servers and allocations. A change is on disk when its call returns.

  Attributes:
    servers: servers by address.
    allocations: allocations by owner.
  """

  def __init__(self, path: str):
    """Reads the file, or makes it.

    Raises:
      UserError: another manager uses the file, or it is no such file.
    """
    self._path = path
    with self._explain_errors():
      # Several threads use the file, one at a time.
      self._file = sqlite3.connect(path, timeout=0, check_same_thread=False)
      # With a write-ahead log, the exclusive lock is kept until the process
      # ends, so that a second manager cannot open the file.
      self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
      self._file.execute("PRAGMA journal_mode = WAL")
      (found,) = self._file.execute("PRAGMA user_version").fetchone()
      if found not in (0, _FORMAT):
        raise UserError(
          f"--state = {path!r}: is of another version of palm_mtf; use that "
          "version, or another file."
        )
      self._file.execute(f"PRAGMA user_version = {_FORMAT}")
      self._file.execute(
        "CREATE TABLE IF NOT EXISTS items "
        "(kind TEXT, name TEXT, value TEXT, PRIMARY KEY (kind, name))"
      )
      rows = [*self._file.execute("SELECT * FROM items ORDER BY name")]
    self.servers: dict[str, Server] = {}
    self.allocations: dict[str, Allocation] = {}
    for kind, name, text in rows:
      fields = json.loads(text)
      if kind == "servers":
        self.servers[name] = Server(**fields)
      else:
        places = [[(x, i) for x, i in y] for y in fields["places"]]
        fields |= {"wish": Wish(**fields["wish"]), "places": places}
        self.allocations[name] = Allocation(**fields)

  def put(self, kind: str, name: str, item: Server | Allocation) -> None:
    """Adds or replaces an item; `kind` is "servers" or "allocations"."""
    row = kind, name, json_text(dataclasses.asdict(item))
    with self._explain_errors(), self._file:
      self._file.execute("REPLACE INTO items VALUES (?, ?, ?)", row)
    getattr(self, kind)[name] = item

  def remove(self, kind: str, name: str) -> None:
    """Removes an item; `kind` is "servers" or "allocations"."""
    with self._explain_errors(), self._file:
      self._file.execute(
        "DELETE FROM items WHERE kind = ? AND name = ?", (kind, name)
      )
    del getattr(self, kind)[name]

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
