# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The order in which rows that wait are given free slots."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class WaitingRow(Protocol):
  """What decides when a row has its turn.

  Attributes:
    client: who asked for the row.
    request: which request of the client asked for it.
    ended: "" unless the row needs no slot any more.
  """

  client: str
  request: object
  ended: str


RowT = TypeVar("RowT", bound=WaitingRow)


class WaitingRows(Generic[RowT]):
  """Rows that wait for slots.

  A free slot goes to the client that has the fewest rows in slots, and of its
  requests to the one that has the fewest. Of several such clients or requests
  it goes to the one whose last turn is longest ago.
  """

  def __init__(self):
    """Begins without rows."""
    # {client: {request: its rows}}, in the order of their last turns.
    self._rows: dict[str, dict[object, collections.deque[RowT]]] = {}

  def __iter__(self) -> Iterator[RowT]:
    """Iterates over all rows."""
    for requests in self._rows.values():
      for rows in requests.values():
        yield from rows

  def __len__(self) -> int:
    """Returns the number of rows."""
    return sum(map(self.count, self._rows))

  def count(self, client: str) -> int:
    """Returns the number of rows of a client."""
    return sum(map(len, self._rows.get(client, {}).values()))

  def add(self, rows: Sequence[RowT]) -> None:
    """Adds the rows of one request."""
    requests = self._rows.setdefault(rows[0].client, {})
    requests[rows[0].request] = collections.deque(rows)

  def take(self, in_slots: Iterable[RowT]) -> RowT:
    """Removes and returns the row whose turn it is.

    Args:
      in_slots: rows that have slots.
    """
    counts: dict[object, int] = collections.Counter()
    for row in in_slots:
      counts.update([row.client, row.request])
    client = min(self._rows, key=counts.__getitem__)
    requests = self._rows.pop(client)
    request = min(requests, key=counts.__getitem__)
    rows = requests.pop(request)
    row = rows.popleft()
    if rows:
      requests[request] = rows
    if requests:
      self._rows[client] = requests
    return row

  def remove_ended(self) -> None:
    """Removes the rows that have ended."""
    if any(row.ended for row in self):
      for client, requests in list(self._rows.items()):
        kept = {
          request: collections.deque(x for x in rows if not x.ended)
          for request, rows in requests.items()
        }
        self._rows[client] = {x: rows for x, rows in kept.items() if rows}
        if not self._rows[client]:
          del self._rows[client]
