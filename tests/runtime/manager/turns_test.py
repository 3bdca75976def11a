# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager charges programs the time that devices work for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager import turns as turns_module
from palm_mtf.runtime.manager.turns import DeviceTime, Turns
from palm_mtf.runtime.scheduler import GangScheduler, Ticket


def _program(devices):
  bytes_ = dict.fromkeys(devices, 0)
  return Ticket("client", bytes_, 1.0, 1.0, (), 0.0, (0.0, 0))


def test_programs_that_run_at_the_same_time_share_it():
  now = 0.0
  device_time = DeviceTime(lambda: now)
  one, other, elsewhere = _program("ab"), _program("b"), _program("c")
  device_time.begin(one)
  device_time.begin(elsewhere)
  now = 1.0
  device_time.begin(other)
  now = 4.0
  # On b, the second program got half of three seconds.
  assert device_time.end(other) == 1.5
  now = 5.0
  # Device a worked five seconds for the first program.
  assert device_time.end(one) == 5.0
  assert device_time.end(elsewhere) == 5.0


def test_a_program_that_has_not_begun_took_no_time():
  assert DeviceTime(lambda: 0.0).end(_program("a")) == 0.0


@given(
  st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=20
  )
)
def test_the_times_of_all_programs_add_up_to_the_time_that_a_device_works(
  spans,
):
  events = sorted(
    (when, i, is_end)
    for i, (begin, secs) in enumerate(spans)
    for when, is_end in ((begin, False), (begin + secs, True))
  )
  now, total = 0.0, 0.0
  device_time = DeviceTime(lambda: now)
  programs = [_program("a") for _ in spans]
  for when, i, is_end in events:
    now = float(when)
    if is_end:
      total += device_time.end(programs[i])
    else:
      device_time.begin(programs[i])
  worked = {sec for begin, secs in spans for sec in range(begin, begin + secs)}
  assert abs(total - len(worked)) < 1e-9


def test_a_program_on_devices_that_no_server_has_registered_yet_runs():
  devices = {}
  turns = Turns(GangScheduler("fifo", {}), lambda: devices)
  turns.add_client("client", 1.0, (answers := []).append)
  submit = {"submit": 1, "program": 7, "num_bytes": {"a": 5}, "after": []}
  turns.take("client", [submit, {"run": 1}, {"finish": 1, "kept": {"a": 5}}])
  assert answers == [{"start": 1}]
  devices["a"] = 10  # its server is back; the buffer of 5 bytes is still there
  turns.take("client", [submit | {"submit": 2, "num_bytes": {"a": 6}}])
  assert answers == [{"start": 1}]
  turns.take("client", [{"free": {"a": 5}}])
  assert answers == [{"start": 1}, {"start": 2}]


def _submit(number, device="a"):
  return {"submit": number, "program": 0, "num_bytes": {device: 0}, "after": []}


@pytest.mark.parametrize(
  ("messages", "why"),
  [
    ([_submit(1), _submit(1)], "program 1: has not ended"),
    ([_submit(i) for i in range(101)], "100 others have not"),
    ([{"keep": {f"{i}": 1}} for i in range(101)], "100 unknown devices"),
    ([{"finish": 7, "kept": {f"{i}": 1 for i in range(101)}}], "100 unknown"),
  ],
)
def test_a_client_cannot_make_the_manager_store_without_end(
  messages, why, monkeypatch
):
  monkeypatch.setattr(turns_module, "_MAX_LIVE", 100)
  monkeypatch.setattr(turns_module, "_MAX_DEVICES", 100)
  turns = Turns(GangScheduler("shares", {}), lambda: {"a": 10})
  turns.add_client("client", 1.0, [].append)
  with pytest.raises(UserError, match=why):
    turns.take("client", messages)
  turns.remove_client("client")
  # What the client held is free again.
  turns.add_client("other", 1.0, (answers := []).append)
  turns.take("other", [_submit(1) | {"num_bytes": {"a": 10}}])
  assert answers == [{"start": 1}]
