# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices stay, move or end as servers and owners join, leave and fall silent.

Time is a number here, and servers only their registrations; service_test.py has
real servers.
"""

import contextlib
import dataclasses
import json
import os
import resource
import sqlite3

import pytest

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.manager import Manager, Store
from palm_mtf.runtime.manager.slices import Allocation, Server, Wish
from tests.refusals import message_of

SERVER = Server(
  address="10.0.0.1:2222",
  island="east",
  num_devices=2,
  device_bytes=10**9,
  kind={"palm_mtf": "1", "threads": "2"},
)
ONE = {"slices": ["2"]}


class Cluster:
  """A manager of servers with two devices each."""

  def __init__(self, path):
    self.path, self.now = str(path), 0.0
    self.store = None
    self.start()

  def start(self):
    """Starts the manager, or another one on the file of a closed one."""
    if self.store:
      self.store.close()
    self.store = Store(self.path)
    self.manager = Manager(self.store, lambda _: 2, clock=lambda: self.now)

  def join(self, *names, island="main"):
    for name in names:
      given = {"address": f"{name}:1", "island": island}
      fields = dataclasses.replace(SERVER, **given)
      self.manager.register(dataclasses.asdict(fields))

  def wait(self, secs, *alive):
    """Lets time pass, in which only some servers and owners send beats."""
    for _ in range(secs):
      self.now += 1.0
      self.manager.tick()
      for name in alive:
        assert self.manager.beat(name)["is_known"], name

  def hosts(self, owner, wish=ONE, **arguments):
    places = self.manager.allocate(owner, wish, **arguments)
    return ["".join({x[0] for x, _ in each}) for each in places]

  def states(self):
    listed = self.manager.list_all()
    return {x["address"][0]: x["state"] for x in listed if "address" in x}


@pytest.fixture
def cluster(tmp_path):
  found = Cluster(tmp_path / "state")
  with contextlib.closing(found.store):
    yield found


def test_a_slice_moves_from_a_lost_server_and_not_from_a_silent_second(cluster):
  cluster.join("a", "b")
  assert cluster.hosts("run") == ["a"]
  cluster.wait(5, "b:1", "run")
  assert cluster.hosts("run") == ["a"]
  cluster.wait(2, "b:1", "run")
  assert cluster.states() == {"a": "lost", "b": "serving"}
  assert cluster.hosts("run") == ["b"]
  cluster.wait(1, "a:1", "b:1", "run")
  assert cluster.states() == {"a": "serving", "b": "serving"}
  assert cluster.hosts("run") == ["b"], "it moved back by itself"


def test_a_slice_without_another_place_waits_for_its_server(cluster):
  cluster.join("a")
  assert cluster.hosts("run") == ["a"]
  cluster.wait(9, "run")
  assert cluster.states() == {"a": "lost"}
  assert cluster.hosts("run") == ["a"]
  assert "no island can hold" in message_of(cluster.hosts, "other")
  cluster.join("b")  # a server that starts later
  assert cluster.hosts("run") == ["b"]


def test_a_drain_moves_nothing_but_new_slices_avoid_the_server(cluster):
  cluster.join("a", "b")
  assert cluster.hosts("run") == ["a"]
  cluster.manager.drain("a:1", True)
  before = cluster.store.allocations["run"]
  assert cluster.states() == {"a": "drained", "b": "serving"}
  for owner in ("first", "second"):
    assert cluster.hosts(owner) == ["b"]
  assert cluster.store.allocations["run"] == before
  assert cluster.hosts("run") == ["b"]  # it asked again
  cluster.join("a")  # the server's process is started again
  assert cluster.states()["a"] == "drained"
  cluster.manager.drain("a:1", False)
  assert cluster.hosts("third") == ["a"]


def test_only_slices_on_lost_servers_move(cluster):
  cluster.join("a", "b", "c")
  two = {"slices": ["2", "2"]}
  first, second = cluster.hosts("run", two)
  (spare,) = {"a", "b", "c"} - {first, second}
  cluster.wait(9, f"{second}:1", f"{spare}:1", "run")
  assert cluster.hosts("run", two) == [spare, second]
  # Without its second pod, the run has only its first slice.
  assert cluster.hosts("run", ONE, avoid=[f"{second}:1"]) == [spare]


def test_a_server_that_its_owner_has_lost_is_avoided_if_there_is_another(
  cluster,
):
  """The manager may reach a server that the owner or a pod does not."""
  cluster.join("a", "b")
  assert cluster.hosts("run") == ["a"]
  assert cluster.hosts("run", avoid=["a:1"]) == ["b"]
  assert cluster.hosts("run", avoid=["a:1", "b:1"]) == ["b"]


def test_a_slice_that_is_added_leaves_the_others_where_they_are(cluster):
  cluster.join("a", "b", "c")
  assert cluster.hosts("run", {"slices": ["1"]}) == ["a"]
  assert cluster.hosts("run", {"slices": ["1", "2"]}) == ["a", "b"]


@pytest.mark.parametrize("islands", ["same", "apart"])
def test_slices_that_stay_decide_the_islands_of_the_others(cluster, islands):
  cluster.join("a", "b", island="east")
  cluster.join("c", "d", island="west")
  wish = {"slices": ["2", "2"], "islands": islands}
  first, second = cluster.hosts("run", wish)
  alive = [f"{x}:1" for x in "abcd" if x != second]
  cluster.wait(9, *alive, "run")
  if islands == "apart":
    (other,) = {*"cd"} - {second} if second in "cd" else {*"ab"} - {second}
    assert cluster.hosts("run", wish) == [first, other]
  else:
    assert {*cluster.hosts("run", wish)} in ({"a", "b"}, {"c", "d"})


def test_a_manager_that_is_restarted_has_everything_and_hears_it_again(cluster):
  cluster.join("a", "b")
  cluster.manager.drain("b:1", True)
  assert cluster.hosts("run") == ["a"]
  before = cluster.manager.list_all()
  cluster.now += 3600.0  # it was down for an hour
  cluster.start()
  assert cluster.manager.list_all() == before
  assert cluster.hosts("run") == ["a"]
  cluster.wait(9, "b:1", "run")
  assert cluster.states() == {"a": "lost", "b": "drained"}


def test_a_silent_owner_loses_its_slices_and_a_long_lost_server_is_removed(
  cluster,
):
  cluster.join("a", "b")
  for owner in ("run", "dead"):
    cluster.hosts(owner, {"slices": ["1"]})
  cluster.wait(31, "a:1", "b:1", "run")
  cluster.manager.list_all()
  assert cluster.store.allocations.keys() == {"run"}
  assert not cluster.manager.beat("dead")["is_known"]
  cluster.wait(601, "a:1", "run")
  assert cluster.states() == {"a": "serving"}
  assert not cluster.manager.beat("b:1")["is_known"]


def test_a_server_that_leaves_is_gone_at_once(cluster):
  cluster.join("a", "b")
  assert cluster.hosts("run") == ["a"]
  cluster.manager.leave("a:1")
  cluster.manager.leave("a:1")
  assert cluster.states() == {"b": "serving"}
  assert cluster.hosts("run") == ["b"]


def test_a_trial_changes_nothing(cluster):
  cluster.join("a")
  assert cluster.hosts("run", is_trial=True) == ["a"]
  assert cluster.store.allocations == {}
  assert cluster.manager.list_all()[0]["owners"] == []


def test_many_servers_send_beats_less_often(cluster):
  """A manager that answers 500 beats per second copes with any number."""
  cluster.join("a")
  assert cluster.manager.beat("a:1")["pause_secs"] == 1.0
  for i in range(1536):
    server = dataclasses.replace(cluster.store.servers["a:1"], address=f"h:{i}")
    cluster.store.servers[server.address] = server
  assert cluster.manager.beat("a:1")["pause_secs"] == 1537 / 500


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (
      lambda x: x.drain("a:2", True),
      'no server "a:2" (did you mean "a:1"?); `palm_mtf pods list` prints '
      "every server.",
    ),
    (
      lambda x: x.release("rum"),
      'no owner "rum" (did you mean "run"?); `palm_mtf pods list` prints every '
      "owner.",
    ),
    (
      lambda x: x.allocate("a b", {"slices": ["1"]}),
      'owner = \'a b\': give a name of letters, digits, ".", "-" and "_".',
    ),
  ],
)
def test_unknown_and_wrong_names_are_one_line(function, message, cluster):
  cluster.join("a")
  cluster.hosts("run")
  assert message_of(function, cluster.manager) == message


TEXT = "not a database, but a longer text than its header\n" * 9


@pytest.mark.parametrize(
  ("state", "message"),
  [
    (TEXT, "file is not a database; mend that, or name another file."),
    (None, "unable to open database file; mend that, or name another file."),
    (
      "PRAGMA user_version = 99",
      "is of another version of palm_mtf; use that version, or another file.",
    ),
    (
      "CREATE TABLE photos (x)",
      "is a database of another program; name another file.",
    ),
  ],
)
def test_what_is_no_state_of_this_version_is_refused(state, message, tmp_path):
  path = tmp_path / ("state" if state else "missing/state")
  if state == TEXT:
    path.write_text(state)
  elif state:
    with contextlib.closing(sqlite3.connect(path)) as file:
      file.execute(state)
  before = path.read_bytes() if state else None
  assert message_of(Store, str(path)) == f"--state = '{path}': {message}"
  assert not state or path.read_bytes() == before


def test_a_state_needs_a_name():
  assert message_of(Store, "") == (
    "--state is empty: name a file for servers and slices."
  )


@pytest.mark.parametrize(
  ("kind", "text"),
  [
    ("servers", "{"),
    ("servers", "5"),
    ("servers", json.dumps({**dataclasses.asdict(SERVER), "zone": "x"})),
    ("servers", json.dumps({**dataclasses.asdict(SERVER), "num_devices": 0})),
    ("allocations", json.dumps({"owner": "run", "places": [[5]]})),
    ("photos", "{}"),
  ],
)
def test_a_stored_item_that_is_damaged_is_named(kind, text, tmp_path):
  path = tmp_path / "state"
  Store(str(path)).close()
  with sqlite3.connect(path) as file:
    file.execute("INSERT INTO items VALUES (?, ?, ?)", (kind, "a", text))
  file.close()
  assert message_of(Store, str(path)) == (
    f"--state = '{path}': ('{kind}', 'a') is damaged; name another file, with "
    "which servers and runs join again."
  )


@pytest.mark.parametrize(
  "odd",
  [
    {"device_bytes": "many"},
    {"device_bytes": -1},
    {"device_bytes": float("nan")},
    {"kind": [1]},
    {"kind": {"cpu": [[]]}},
    {"kind": None},
    {"is_drained": "x"},
    {"num_devices": True},
    {"num_devices": 10**12},
    {"address": 5},
    {"address": "host"},
    {"island": None},
  ],
)
def test_a_registration_that_is_none_changes_nothing(odd, cluster):
  cluster.join("a")
  with pytest.raises(UserError):
    cluster.manager.register({**dataclasses.asdict(SERVER), **odd})
  assert cluster.states() == {"a": "serving"}
  assert cluster.hosts("run") == ["a"]


def test_a_manager_that_stood_still_counts_nobody_as_silent(cluster):
  cluster.join("a")
  assert cluster.hosts("run") == ["a"]
  for ask in (cluster.states, lambda: cluster.hosts("other"), cluster.states):
    cluster.now += 100.0
    ask()
    assert cluster.states() == {"a": "serving"}
    assert "run" in cluster.manager.list_all()[0]["owners"]
  cluster.wait(31, "a:1")
  assert cluster.manager.list_all()[0]["owners"] == [], "really silent"


def test_a_full_disk_refuses_slices_and_loses_none(cluster):
  cluster.join("a", "b")
  assert cluster.hosts("run") == ["a"]
  store = cluster.store
  (pages,) = store._file.execute("PRAGMA page_count").fetchone()
  store._file.execute(f"PRAGMA max_page_count = {pages}")
  wish = dataclasses.asdict(Wish(slices=["1"] * 2000))
  with pytest.raises(UserError, match="full; mend that"):
    kept = Allocation(owner="x", wish=Wish(**wish), places=[])
    store.put("allocations", "x", kept)
  assert cluster.hosts("run") == ["a"]
  assert "x" not in store.allocations


@contextlib.contextmanager
def full_disk(path: str):
  """In this process, no file gets larger than SQLite's log of `path` is."""
  _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  size = os.path.getsize(f"{path}-wal")
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_on_a_full_disk_slices_are_released_and_nothing_new_is_kept(
  cluster, caplog
):
  """A silent owner does not make all requests fail."""
  cluster.join("a", "b")
  assert [*cluster.hosts("run"), *cluster.hosts("other")] == ["a", "b"]
  with full_disk(cluster.path):
    cluster.wait(31, "a:1", "b:1", "run")
    assert cluster.states() == {"a": "serving", "b": "serving"}
    assert cluster.hosts("run") == ["a"]
    assert [*cluster.store.allocations] == ["run"]
    cluster.manager.leave("b:1")
    assert cluster.states() == {"a": "serving"}
    with pytest.raises(UserError, match=r"disk I/O error|disk is full"):
      cluster.join("c")
  assert "other is removed in memory only: --state = " in caplog.text
  cluster.start()
  assert cluster.states() == {"a": "serving", "b": "serving"}
  cluster.wait(31, "a:1", "run")
  assert cluster.states() == {"a": "serving", "b": "lost"}
  assert [*cluster.store.allocations] == ["run"]
