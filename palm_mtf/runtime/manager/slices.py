# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices: meshes of logical devices, which are bound to devices of servers.

An owner of slices is a client, such as a training run. The load of a device is
the number of its owners. A slice lies on one island, servers with a fast
network between them. It shares devices with other owners only if its island has
too few free devices. Slices of one owner share no server, because a server has
one name in a client's session.
"""

import bisect
import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from palm_mtf.config.device_mesh import MAX_DEVICES
from palm_mtf.config.pods import MANAGED_ISLANDS
from palm_mtf.errors import UserError, check_choice, check_count, shorten
from palm_mtf.runtime.addresses import split_address

# Exceptions to expect while reading JSON of other processes or damaged files.
WRONG_JSON = (
  ArithmeticError,
  AttributeError,
  LookupError,
  RecursionError,
  TypeError,
  ValueError,
)
Place = tuple[str, int]  # "host:port" of a server, and the number of a device
Places = list[list[Place]]  # devices of each slice, in the order of its mesh
# {address of a server: (load, number) of its devices, lowest load first}
_Devices = dict[str, list[tuple[int, int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
  """A server of `palm_mtf pods serve`."""

  address: str  # "host:port" where the manager, clients and servers reach it
  island: str  # name that servers with a fast network between them share
  num_devices: int
  device_bytes: int  # memory in bytes of each device
  # The server's versions, threads and CPU. Servers of different kinds may
  # compute different bits, so all servers of an owner have the same kind.
  kind: Mapping[str, str]
  is_drained: bool = False  # whether new slices avoid the server

  def __post_init__(self) -> None:
    # Check, because other processes or a damaged file may give any JSON.
    split_address("address", str(self.address))
    check_name("--island", self.island)
    check_count("--devices", self.num_devices, 1, MAX_DEVICES)
    check_count("device_bytes", self.device_bytes, minimum=0)
    _check_kind(self.kind)
    if not isinstance(self.is_drained, bool):
      raise UserError("is_drained: give true or false.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
  """The slices that an owner wants."""

  slices: Sequence[str]  # shape of each slice, such as "2x4"
  device_bytes: int = 0  # memory in bytes that each device needs
  # "auto", on any islands; "same", all slices on one island; or "apart", each
  # slice on a different island.
  islands: str = "auto"
  # Versions that the servers must have; a subset of `Server.kind`.
  kind: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    check_count("device_bytes", self.device_bytes, minimum=0)
    _check_kind(self.kind)
    if not isinstance(self.slices, list | tuple):
      raise UserError(f"slices = {shorten(self.slices)}: give a list.")
    check_choice("islands", self.islands, MANAGED_ISLANDS)
    for shape in self.slices or [""]:
      if not re.fullmatch(
        r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,9}", str(shape)
      ):
        example = 'write its sizes as in "4", "2x4" or "2x2x2"'
        raise UserError(f"slice {shorten(shape)}: {example}.")
      check_count(f'devices of slice "{shape}"', _size(shape), 1, MAX_DEVICES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
  """The slices that an owner wants, and the devices that it has."""

  owner: str
  wish: Wish
  places: Places

  def __post_init__(self) -> None:
    check_name("owner", self.owner)


def _check_kind(kind: object) -> None:
  is_dict = isinstance(kind, Mapping)
  texts = [*kind.keys(), *kind.values()] if is_dict else []
  if not is_dict or not all(isinstance(x, str) for x in texts):
    raise UserError(f"kind = {shorten(kind)}: give texts by name.")


def check_name(what: str, name: object) -> None:
  """Raises UserError unless `name` is one word of at most 300 characters."""
  if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,300}", name):
    raise UserError(
      f'{what} = {shorten(name)}: give a name of letters, digits, ".", "-" and '
      '"_".'
    )


def bind(
  wish: Wish,
  servers: Iterable[Server],
  others: Iterable[Allocation],
  kept: Mapping[int, list[Place]],
) -> Places:
  """Chooses devices for each slice, with few other owners if possible.

  Args:
    wish, others: what the owner wants, and what other owners have.
    servers: servers that may be used, including those in `kept`.
    kept: devices of slices that do not move, by the slice's index.

  Raises UserError, which names the largest slices that fit, if no island can
  hold a slice.
  """
  loads: collections.Counter[Place] = collections.Counter()
  used: collections.Counter[Place] = collections.Counter()  # reserved bytes
  for other in others:
    for place in itertools.chain(*other.places):
      loads[place] += 1
      used[place] += other.wish.device_bytes
  # {(kind, island if islands = "same"): {island: devices}}. One of these groups
  # has to hold all slices, because only servers of one kind agree in all bits.
  groups: dict[object, dict[str, _Devices]] = {}
  for server in sorted(servers, key=lambda x: x.address):
    if wish.kind.items() <= server.kind.items():
      same = server.island if wish.islands == "same" else None
      key = *sorted(server.kind.items()), same
      island = groups.setdefault(key, {}).setdefault(server.island, {})
      island[server.address] = sorted(
        (loads[server.address, i], i)
        for i in range(server.num_devices)
        if used[server.address, i] + wish.device_bytes <= server.device_bytes
      )
  found = [_bind_group(wish, kept, x) for x in groups.values()]
  if bound := [x for x in found if x]:
    return min(bound, key=lambda x: sum(loads[y] for y in itertools.chain(*x)))
  raise _refuse(wish, groups.values())


def _refuse(
  wish: Wish, groups: Collection[Mapping[str, _Devices]]
) -> UserError:
  """Returns the error that names the largest slices that fit."""

  def fits(slices: Sequence[str]) -> bool:
    less = dataclasses.replace(wish, slices=slices)
    return any(_bind_group(less, {}, x) for x in groups)

  number, shapes = len(wish.slices), [*dict.fromkeys(wish.slices)]
  names = " and ".join(f'"{x}"' for x in shapes)
  sizes = " and ".join(f"{_size(x):,}" for x in shapes)
  slices, each = (f"{number} slices", " each") if number > 1 else ("slice", "")
  memory = f" of {wish.device_bytes:,} bytes" if wish.device_bytes else ""
  where = f"{number} islands" if wish.islands == "apart" else "island"
  most = bisect.bisect_left(
    range(number), True, key=lambda n: not fits(["1"] * (n + 1))
  )
  rest = f"there is room for {most:,}; ask for that"
  if not most:
    rest = "no server has such a device; ask for less"
  elif most == number:
    smaller = next(
      x
      for x in _divide(max(shapes, key=_size))
      if fits([min(x, y, key=_size) for y in wish.slices])
    )
    rest = f'the largest that fits is "{smaller}"; ask for that'
  return UserError(
    f"no {where} can hold the {slices} {names} ({sizes} devices{each}"
    f"{memory}): {rest}, or start more servers (`palm_mtf pods serve "
    "--manager`)."
  )


def _size(shape: str) -> int:
  return math.prod(map(int, shape.split("x")))


def _divide(shape: str) -> list[str]:
  """Returns shapes that divide `shape`, largest first, for an error message."""
  sizes = [int(x) for x in shape.split("x")]
  divisors = [[y for y in range(x, 0, -1) if x % y == 0] for x in sizes]
  shapes = ["x".join(map(str, x)) for x in itertools.product(*divisors)]
  return sorted(shapes, key=_size, reverse=True)


def _bind_group(
  wish: Wish, kept: Mapping[int, list[Place]], group: Mapping[str, _Devices]
) -> Places | None:
  """Returns devices for all slices; None if a group of servers has too few."""
  left = {island: dict(devices) for island, devices in group.items()}
  sizes = [_size(x) for x in wish.slices]
  bound = dict(kept)
  # Large slices come first, because an island that can hold a large slice can
  # hold a small one too.
  for i in sorted(range(len(sizes)), key=lambda i: (i not in kept, -sizes[i])):
    if i in kept:
      islands = [x for x in left if kept[i][0][0] in left[x]]
    else:
      choices = {x: _choose(sizes[i], left[x]) for x in left}
      islands = sorted((x for x in left if choices[x]), key=choices.get)
      bound[i] = choices[islands[0]][-1] if islands else []
    if not islands:
      return None
    for address in {x for x, _ in bound[i]}:
      del left[islands[0]][address]
    if wish.islands == "apart":
      del left[islands[0]]
  return [bound[i] for i in range(len(sizes))]


def _choose(
  size: int, devices: _Devices
) -> tuple[int, float, list[Place]] | None:
  """Returns an island's best devices for a slice; None if it has too few.

  The result is (the devices' highest load, the island's mean load, devices).
  """
  loads = sorted(load for each in devices.values() for load, _ in each)
  if len(loads) < size:
    return None
  most = loads[size - 1]
  offers = {x: [i for y, i in devices[x] if y <= most] for x in devices}
  busy = {x: sum(load for load, _ in devices[x]) for x in devices}
  places: list[Place] = []
  while missing := size - len(places):
    # Use few servers: first the server that offers the most devices. If the
    # rest fits on one server, use the least busy such server; of equally busy
    # servers, use the one that offers the fewest devices.
    fits = [x for x in offers if len(offers[x]) >= missing]
    address = min(
      fits or offers,
      key=lambda x: (
        (busy[x], len(offers[x])) if fits else (-len(offers[x]), busy[x])
      ),
    )
    places += [(address, i) for i in sorted(offers.pop(address)[:missing])]
  return most, sum(loads) / len(loads), places
