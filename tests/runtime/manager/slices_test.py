# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices lie on one island, share devices last, and are refused with a size."""

import collections
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.slices import Allocation, Server, Wish, bind
from tests.refusals import message_of

GB = 10**9
KIND = {"palm_mtf": "1", "threads": "2"}


def server(address, devices, island="main", gigabytes=8, kind=KIND):
  sizes = {"num_devices": devices, "device_bytes": gigabytes * GB}
  return Server(address=address, island=island, kind=kind, **sizes)


def place(wish, servers, others=(), kept=()):
  return bind(wish, servers, others, dict(kept))


def size(shape):
  return math.prod(map(int, shape.split("x")))


SHAPES = st.sampled_from(["1", "2", "3", "4", "1x3", "2x2", "2x4", "2x2x2"])
KINDS = st.sampled_from([KIND, {**KIND, "threads": "4"}])


@st.composite
def clusters(draw):
  """Servers, and owners that were bound one after another."""
  servers = [
    server(
      f"h{i}:1",
      draw(st.integers(1, 5)),
      draw(st.sampled_from("ab")),
      draw(st.integers(1, 4)),
      draw(KINDS),
    )
    for i in range(draw(st.integers(1, 8)))
  ]
  owners = []
  for i in range(draw(st.integers(0, 5))):
    try:
      wish = draw(wishes())
      places = place(wish, servers, owners)
      owners.append(Allocation(owner=f"o{i}", wish=wish, places=places))
    except UserError:
      pass
  return servers, owners


@st.composite
def wishes(draw):
  return Wish(
    slices=draw(st.lists(SHAPES, min_size=1, max_size=3)),
    device_bytes=draw(st.integers(0, 3)) * GB,
    islands=draw(st.sampled_from(["auto", "same", "apart"])),
  )


@settings(max_examples=60, deadline=None)
@given(clusters(), wishes())
def test_slices_have_their_devices_on_islands_as_wished(cluster, wish):
  servers, owners = cluster
  try:
    found = place(wish, servers, owners)
  except UserError:
    return
  by_address = {x.address: x for x in servers}
  assert [len(x) for x in found] == [size(x) for x in wish.slices]
  assert len({*itertools.chain(*found)}) == sum(map(len, found))
  hosts = [{address for address, _ in places} for places in found]
  assert len(set.union(*hosts)) == sum(map(len, hosts)), "a shared server"
  islands = [{by_address[x].island for x in y} for y in hosts]
  assert all(len(x) == 1 for x in islands)
  number = len(set.union(*islands))
  if wish.islands != "auto":
    assert number == (1 if wish.islands == "same" else len(found))
  assert len({str(by_address[x].kind) for y in hosts for x in y}) == 1
  used = collections.Counter()
  for each in [*owners, Allocation(owner="new", wish=wish, places=found)]:
    for key in itertools.chain(*each.places):
      used[key] += each.wish.device_bytes
  for (address, device), needed in used.items():
    assert 0 <= device < by_address[address].num_devices
    assert needed <= by_address[address].device_bytes


@settings(max_examples=60, deadline=None)
@given(clusters(), SHAPES, st.integers(0, 3))
def test_one_slice_takes_free_devices_first_and_is_refused_only_if_too_large(
  cluster, shape, gigabytes
):
  servers, owners = cluster
  loads, used = collections.Counter(), collections.Counter()
  for each in owners:
    for key in itertools.chain(*each.places):
      loads[key] += 1
      used[key] += each.wish.device_bytes
  fits = collections.Counter()  # devices with enough memory
  free = collections.Counter()  # those without an owner
  for each in servers:
    for i in range(each.num_devices):
      key = each.address, i
      if used[key] + gigabytes * GB <= each.device_bytes:
        group = each.island, str(each.kind)
        fits[group] += 1
        free[group] += loads[key] == 0
  wish = Wish(slices=[shape], device_bytes=gigabytes * GB)
  most = max(fits.values(), default=0)
  if most < size(shape):
    message = message_of(place, wish, servers, owners)
    sides = (range(1, int(x) + 1) for x in shape.split("x"))
    whole = [[y for y in x if x[-1] % y == 0] for x in sides]
    sizes = map(math.prod, itertools.product(*whole))
    best = max((x for x in sizes if x <= most), default=0)
    if best:
      largest = message.partition('the largest that fits is "')[2]
      assert size(largest.partition('"')[0]) == best
    else:
      assert "no server has such a device" in message
    return
  (found,) = place(wish, servers, owners)
  if max(free.values()) >= size(shape):
    assert not any(loads[x] for x in found)


@settings(max_examples=40, deadline=None)
@given(clusters(), wishes())
def test_slices_that_stay_have_their_devices_and_restrict_the_others(
  cluster, wish
):
  servers, owners = cluster
  try:
    before = place(wish, servers, owners)
  except UserError:
    return
  for index, stays in enumerate(before):
    after = place(wish, servers, owners, {index: stays}.items())
    assert after[index] == stays
    others = {x for i, y in enumerate(after) if i != index for x, _ in y}
    assert not others & {x for x, _ in stays}


def test_owners_spread_over_servers_and_share_devices_when_none_is_free():
  servers = [server("a:1", 2), server("b:1", 2)]
  owners, bound = [], []
  for i in range(6):
    wish = Wish(slices=["1"])
    places = place(wish, servers, owners)
    owners.append(Allocation(owner=f"o{i}", wish=wish, places=places))
    bound += places[0]
  assert {x for x, _ in bound[:2]} == {"a:1", "b:1"}
  assert len({*bound[:4]}) == 4
  assert len({*bound[4:]}) == 2


def test_a_slice_uses_few_servers():
  servers = [server(f"h{i}:1", 1) for i in range(4)] + [server("large:1", 4)]
  assert place(Wish(slices=["2x2"]), servers) == [
    [("large:1", i) for i in range(4)]
  ]


@pytest.mark.parametrize(
  ("wish", "message"),
  [
    (
      {"slices": ["4x4"]},
      'no island can hold the slice "4x4" (16 devices): the largest that fits '
      'is "4x1"; ask for that',
    ),
    (
      {"slices": ["3", "3"]},
      'no island can hold the 2 slices "3" (3 devices each): the largest that '
      'fits is "1"; ask for that',
    ),
    (
      {"slices": ["6", "2"]},
      'no island can hold the 2 slices "6" and "2" (6 and 2 devices each): the '
      'largest that fits is "3"; ask for that',
    ),
    (
      {"slices": ["1", "2", "1"], "islands": "same"},
      'no island can hold the 3 slices "1" and "2" (1 and 2 devices each): '
      "there is room for 2; ask for that",
    ),
    (
      {"slices": ["1", "1", "1"], "islands": "apart"},
      'no 3 islands can hold the 3 slices "1" (1 devices each): there is room '
      "for 2; ask for that",
    ),
    (
      {"slices": ["2"], "device_bytes": 9 * GB},
      'no island can hold the slice "2" (2 devices of 9,000,000,000 bytes): no '
      "server has such a device; ask for less",
    ),
    (
      {"slices": ["2"], "kind": {"palm_mtf": "2"}},
      'no island can hold the slice "2" (2 devices): no server has such a '
      "device; ask for less",
    ),
  ],
)
def test_what_no_island_can_hold_is_refused_with_the_largest_that_fits(
  wish, message
):
  servers = [server("a:1", 3), server("b:1", 1), server("c:1", 2, "other")]
  assert message_of(place, Wish(**wish), servers) == (
    f"{message}, or start more servers (`palm_mtf pods serve --manager`)."
  )


SIZES = 'write its sizes as in "4", "2x4" or "2x2x2".'


@pytest.mark.parametrize(
  ("wish", "message"),
  [
    ({"slices": ["2x"]}, f"slice '2x': {SIZES}"),
    ({"slices": []}, f"slice '': {SIZES}"),
    ({"slices": ["0x2"]}, f"slice '0x2': {SIZES}"),
    ({"slices": ["2x\u0662"]}, f"slice '2x\u0662': {SIZES}"),
    (
      {"slices": ["2048x1024"]},
      'devices of slice "2048x1024" = 2,097,152: give a whole number of at '
      "most 1,048,576.",
    ),
    (
      {"slices": ["2"], "islands": "sam"},
      "islands = 'sam' (did you mean \"same\"?): choose one of 'auto', "
      "'same', 'apart'.",
    ),
    (
      {"slices": ["2"], "device_bytes": -1},
      "device_bytes = -1: give a whole number of at least 0.",
    ),
  ],
)
def test_a_wrong_wish_is_one_line(wish, message):
  assert message_of(Wish, **wish) == message
