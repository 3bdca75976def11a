# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Managers outlive wrong, silent and many clients; clients a silent manager."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading

import grpc
import pytest

from palm_mtf.errors import UserError
from palm_mtf.runtime.client import turns as turns_module
from palm_mtf.runtime.client.turns import ManagedTurns
from palm_mtf.runtime.manager import client as client_module
from palm_mtf.runtime.manager import service
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.manager import Manager
from palm_mtf.runtime.program import Program
from tests.processes import wait_for
from tests.relay import Relay

SECS = 60.0
DEVICES = {"/cpu:0": "host:1/0"}
SUBMIT = {"program": 1, "num_bytes": {"host:1/0": 0}, "after": []}


@pytest.fixture
def hasty(monkeypatch):
  """Peers find out within two seconds that the other side is silent."""

  def hurry(options):
    return tuple((x, 1000 if y == 5000 else y) for x, y in options)

  names = {client_module: "CHANNEL_OPTIONS", service: "_SERVER_OPTIONS"}
  for module, name in names.items():
    monkeypatch.setattr(module, name, hurry(getattr(module, name)))


@pytest.fixture
def address(tmp_path, monkeypatch):
  monkeypatch.setattr(Manager, "list_devices", lambda _: {"host:1/0": 1000})
  state = str(tmp_path / "state")
  with service.serve("127.0.0.1", 0, state, "") as port:
    yield f"127.0.0.1:{port}"


class Stream:
  """A stream of turns, whose messages the test writes."""

  def __init__(self, channel, owner, **metadata):
    self.requests = queue.SimpleQueue()
    about = {"protocol": str(client_module.PROTOCOL), "owner": owner}
    about |= {"weight": "1.0", **metadata}
    self.answers = channel.stream_stream("/palm_mtf.Manager/turns")(
      iter(self.requests.get, None), metadata=[*about.items()]
    )

  def send(self, *messages):
    self.requests.put(json.dumps(messages).encode())

  def next(self):
    return json.loads(next(self.answers))

  def error(self):
    with pytest.raises(grpc.RpcError) as error:
      for _ in self.answers:
        pass
    return error.value.code(), error.value.details()


@pytest.fixture
def channel(address):
  with grpc.insecure_channel(address, client_module.CHANNEL_OPTIONS) as channel:
    yield channel


def ask(address, method, **arguments):
  with ManagerClient("MANAGER", address) as client:
    return client.call(method, **arguments)


def test_hundreds_of_open_streams_leave_the_other_calls_their_answers(
  address, channel
):
  streams = [Stream(channel, f"client-{i}") for i in range(300)]
  assert [x.next() for x in streams] == [[]] * 300
  assert len(ask(address, "list_all")) == 300
  assert ask(address, "beat", name="x")["is_known"] is False
  for i, stream in enumerate(streams):
    stream.send({"submit": i, **SUBMIT})
    assert stream.next() == [{"start": i}]
    stream.send({"finish": i, "kept": {}})
    stream.requests.put(None)
  wait_for(lambda: ask(address, "list_all") == [])


@pytest.mark.parametrize(
  "text",
  [
    b"no json",
    b"5",
    b"[5]",
    b"[" * 100_000,
    b'[{"submit": 1, "program": 2, "num_bytes": 5, "after": []}]',
    b'[{"submit": [1], "program": 2, "num_bytes": {}, "after": [[]]}]',
    b'[{"submit": 1, "program": 2, "num_bytes": {"a": -1}, "after": []}]',
    b'[{"free": 7}]',
    b'[{"keep": {"host:1/0": "x"}}]',
    b'[{"keep": {"host:1/0": 1e400}}]',
    b'[{"finish": [], "kept": {}}]',
    b'[{"free": {"host:1/0": 8}}]',
  ],
)
def test_a_wrong_message_ends_only_its_own_stream(text, address, channel):
  good, bad = Stream(channel, "good"), Stream(channel, "bad")
  assert good.next() == bad.next() == []
  bad.requests.put(text)
  code, why = bad.error()
  assert code == grpc.StatusCode.INVALID_ARGUMENT
  assert why == "these are no messages of palm_mtf." or "free each" in why
  good.send({"submit": 1, **SUBMIT})
  assert good.next() == [{"start": 1}]
  assert [x["client"] for x in ask(address, "list_all")] == ["good"]


def test_the_stream_of_a_client_that_reads_no_answers_ends(
  address, channel, monkeypatch
):
  monkeypatch.setattr(service, "_MAX_ANSWERS", 1000)
  stream = Stream(channel, "silent")
  assert stream.next() == []
  submit = {"program": 1, "num_bytes": {"nowhere/0": 0}, "after": []}
  for _ in range(10):  # each answer has some 20 bytes
    stream.send(*({"submit": i, **submit} for i in range(10_000)))
  wait_for(lambda: ask(address, "list_all") == [])


@pytest.mark.parametrize(
  "about",
  [{"weight": "nan"}, {"weight": "x"}, {"weight": "0"}, {"owner": "a b"}],
)
def test_a_stream_without_an_owner_and_a_weight_is_refused(about, channel):
  owner = about.pop("owner", "a")
  code, why = Stream(channel, owner, **about).error()
  assert code == grpc.StatusCode.INVALID_ARGUMENT
  assert why == "the stream needs an owner and a weight"


def test_the_end_of_a_client_s_old_stream_takes_nothing_from_its_new_one(
  channel,
):
  old = Stream(channel, "run", client="1")
  assert old.next() == []
  new = Stream(channel, "run", client="1")
  other = Stream(channel, "run", client="2")  # has the same name by accident
  with pytest.raises(StopIteration):
    old.next()  # the new stream has ended the old one
  assert new.next() == other.next() == []
  new.send(
    *({"submit": i, **SUBMIT} for i in range(6)), {"keep": {"host:1/0": 3}}
  )
  assert new.next() == [{"start": i} for i in range(4)]
  old.requests.put(None)
  other.requests.put(None)
  with pytest.raises(StopIteration):
    other.next()
  new.send({"finish": 0, "kept": {}}, {"free": {"host:1/0": 3}})
  assert new.next() == [{"start": 4}]


def test_list_shows_and_release_ends_what_a_client_without_slices_holds(
  address, channel
):
  blocking, waiting = Stream(channel, "blocking"), Stream(channel, "waiting")
  assert blocking.next() == waiting.next() == []
  blocking.send({"keep": {"host:1/0": 7}})
  blocking.send(*({"submit": i, **SUBMIT} for i in range(5)))
  assert blocking.next() == [{"start": i} for i in range(4)]
  waiting.send({"submit": 0, **SUBMIT})
  wait_for(lambda: ask(address, "list_all")[1]["num_waiting"] == 1)
  assert ask(address, "list_all")[0] == {
    "client": "blocking",
    "num_running": 4,
    "num_waiting": 1,
    "kept_bytes": {"host:1/0": 7},
  }
  ask(address, "release", owner="blocking")
  code, why = blocking.error()
  assert code == grpc.StatusCode.INVALID_ARGUMENT
  assert why == "the turns of blocking were released"
  assert waiting.next() == [{"start": 0}]
  with pytest.raises(UserError, match='no owner "blocking"'):
    ask(address, "release", owner="blocking")


CLIENT = f"""
import json, queue, sys, grpc
requests = queue.SimpleQueue()
submits = [dict(submit=i, **{SUBMIT}) for i in range(4)]
keeps = {{"keep": {{"host:1/0": 600}}}}
requests.put(json.dumps([keeps, *submits]).encode())
about = dict(protocol="{client_module.PROTOCOL}", owner="silent", weight="1")
channel = grpc.insecure_channel(sys.argv[1])
answers = channel.stream_stream("/palm_mtf.Manager/turns")(
  iter(requests.get, None), metadata=[*about.items()]
)
for answer in answers:
  print(answer.decode(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_client_that_is_stopped_or_killed_loses_its_turns_and_its_bytes(
  number, hasty, address
):
  with subprocess.Popen(
    [sys.executable, "-c", CLIENT, address], stdout=subprocess.PIPE
  ) as silent:
    assert silent.stdout.readline() == b"[]\n"
    assert silent.stdout.readline().count(b"start") == 4
    os.kill(silent.pid, number)
    try:
      with ManagerClient("MANAGER", address) as client:
        turns = ManagedTurns(client.open_turns("other", 1.0), DEVICES)
        with turns.take(Program(device_bytes={"/cpu:0": 500})):
          pass
        assert [x["client"] for x in ask(address, "list_all")] == ["other"]
        turns.close()
    finally:
      silent.kill()


MANAGER = """
import sys, threading
from palm_mtf.runtime.manager import service
from palm_mtf.runtime.manager.manager import Manager
Manager.list_devices = lambda self: {"host:1/0": 1000}
with service.serve("127.0.0.1", 0, sys.argv[1], "") as port:
  print(port, flush=True)
  threading.Event().wait()
"""


@contextlib.contextmanager
def separate_manager(path):
  """Yields a manager's process and port."""
  with subprocess.Popen(
    [sys.executable, "-c", MANAGER, str(path)], stdout=subprocess.PIPE
  ) as manager:
    try:
      yield manager, int(manager.stdout.readline())
    finally:
      manager.kill()


@pytest.mark.parametrize("fault", ["is stopped", "gets no packets"])
def test_programs_run_while_their_manager_is_silent_and_take_turns_again(
  hasty, tmp_path, caplog, fault
):
  def start(turns, entered, may_end):
    def run():
      with turns.take(Program()):
        entered.append(1)
        assert may_end.wait(SECS)

    threading.Thread(target=run, daemon=True).start()

  with contextlib.ExitStack() as stack:
    manager, port = stack.enter_context(separate_manager(tmp_path / "state"))
    relay = Relay(f"127.0.0.1:{port}")
    stack.callback(relay.close)
    client = stack.enter_context(ManagerClient("MANAGER", relay.address))
    turns = ManagedTurns(client.open_turns("run", 1.0), DEVICES)
    stack.callback(turns.close)
    with turns.take(Program()):
      pass
    if fault == "is stopped":
      os.kill(manager.pid, signal.SIGSTOP)
    else:
      relay.fail_after(0, closes=False)
    for _ in range(6):  # the first waits until the client knows
      with turns.take(Program()):
        pass
    assert caplog.text.count("programs run without turns") == 1
    os.kill(manager.pid, signal.SIGCONT)
    relay.fail_after(10**9, closes=False)
    wait_for(lambda: turns._requests is not None)
    entered, may_end = [], threading.Event()
    stack.callback(may_end.set)
    for _ in range(5):
      start(turns, entered, may_end)
    wait_for(lambda: len(entered) == 4)
    assert not turns._ended.wait(0.2)
    assert len(entered) == 4, "a manager lets four programs run at a time"


def test_a_client_that_ends_before_the_first_answer_leaves_no_thread(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(turns_module, "_FIRST_SECS", 0.5)
  with separate_manager(tmp_path / "state") as (manager, port):
    os.kill(manager.pid, signal.SIGSTOP)
    before = {*threading.enumerate()}
    with ManagerClient("MANAGER", f"127.0.0.1:{port}") as client:
      turns = ManagedTurns(client.open_turns("run", 1.0), DEVICES)
      assert {*threading.enumerate()} - before
      turns.close()
      os.kill(manager.pid, signal.SIGCONT)
      wait_for(lambda: not {*threading.enumerate()} - before)
