# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which waiting row gets a free slot."""

import dataclasses

import pytest

from palm_mtf.generation.serving.batcher import take_row


@dataclasses.dataclass(eq=False)
class Waiting:
  client: str
  asked: str
  ended: str = ""


def waiting(*requests):
  """Returns rows for triples (client, request, number of rows), in order."""
  return [Waiting(*each) for *each, count in requests for _ in range(count)]


def serve_slot(rows):
  """Returns the requests in the order in which they get the only slot."""
  return "".join(take_row(rows, []).asked for _ in range(len(rows)))


@pytest.mark.parametrize(
  ("requests", "order"),
  [
    # Clients take turns for one slot, and so do requests of a client.
    ([("a", "1", 4), ("b", "2", 2), ("c", "3", 1)], "1231211"),
    ([("a", "1", 5), ("a", "2", 1), ("a", "3", 2)], "12313111"),
    # A client with many requests has no more turns than others.
    ([("a", "1", 1), ("a", "2", 1), ("a", "3", 1), ("b", "4", 3)], "142434"),
  ],
)
def test_clients_and_their_requests_take_turns(requests, order):
  assert serve_slot(waiting(*requests)) == order


def test_a_free_slot_goes_to_the_client_with_the_fewest_slots():
  rows = waiting(("a", "1", 9), ("b", "2", 9))
  in_slots = [Waiting("a", "0") for _ in range(3)]
  for expected in "222":
    in_slots.append(take_row(rows, in_slots))
    assert in_slots[-1].asked == expected
  assert {take_row(rows, in_slots).asked for _ in "12"} == {"1", "2"}


def test_a_new_client_comes_after_waiting_clients_but_before_their_next_turn():
  rows = waiting(("a", "1", 3), ("b", "2", 3))
  first = take_row(rows, [])
  rows.append(Waiting("c", "3"))
  assert first.asked + serve_slot(rows) == "1213212"
