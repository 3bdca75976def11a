# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients, and the requests of one client, take turns for free slots."""

import dataclasses

from palm_mtf.generation.serving.waiting_rows import WaitingRows


@dataclasses.dataclass(eq=False)
class Row:
  client: str
  request: str
  ended: str = ""


def waiting(*requests):
  """Returns the rows of (client, request, how many), in this order."""
  rows = WaitingRows()
  for client, request, count in requests:
    rows.add([Row(client, request) for _ in range(count)])
  return rows


def served(rows, num_slots, length=1):
  """Returns the requests in the order of their slots, freed in that order.

  A row has its slot for `length` turns of other rows.
  """
  in_slots, order = [], []
  while len(rows):
    row = rows.take(in_slots)
    order.append(row.request)
    in_slots.append(row)
    if len(in_slots) == num_slots:
      in_slots.pop(0)
  return "".join(order)


def test_clients_take_turns_for_one_slot():
  rows = waiting(("a", "1", 4), ("b", "2", 2), ("c", "3", 1))
  assert served(rows, 1) == "1231211"


def test_requests_of_a_client_take_turns():
  rows = waiting(("a", "1", 5), ("a", "2", 1), ("a", "3", 2))
  assert served(rows, 1) == "12313111"


def test_a_client_with_many_requests_has_no_more_turns_than_others():
  rows = waiting(("a", "1", 1), ("a", "2", 1), ("a", "3", 1), ("b", "4", 3))
  assert served(rows, 1) == "142434"


def test_a_free_slot_goes_to_the_client_with_the_fewest_slots():
  rows = waiting(("a", "1", 9), ("b", "2", 9))
  in_slots = [Row("a", "0") for _ in range(3)]
  for expected in "222":
    in_slots.append(rows.take(in_slots))
    assert in_slots[-1].request == expected
  assert {rows.take(in_slots).request, rows.take(in_slots).request} == {
    "1",
    "2",
  }


def test_a_newcomer_is_behind_those_that_wait_but_before_their_next_turn():
  rows = waiting(("a", "1", 3), ("b", "2", 3))
  first = rows.take([])
  rows.add([Row("c", "3")])
  assert first.request + served(rows, 1) == "1213212"


def test_ended_rows_leave_and_are_not_counted():
  rows = waiting(("a", "1", 2), ("b", "2", 1))
  first, *_ = rows
  first.ended = "cancelled"
  assert (len(rows), rows.count("a")) == (3, 2)
  rows.remove_ended()
  assert (len(rows), rows.count("a"), rows.count("none")) == (2, 1, 0)
  for row in rows:
    row.ended = "time"
  rows.remove_ended()
  assert len(rows) == 0 and not list(rows)
