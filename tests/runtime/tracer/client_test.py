# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs on virtual slices; buffers that later programs read early."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.tracer import shards
from tests import processes
from tests.refusals import message_of
from tests.runtime.served import Served

SECS = 20.0  # after which something that should have happened is missing
add_one = runtime.function(lambda x: x + 1)
double = runtime.function(lambda x: 2 * x)
total = runtime.function(lambda x: runtime.all_sum(x))


@pytest.fixture(scope="module")
def servers():
  """Addresses of two TensorFlow servers with two devices each."""
  started = [start_server(2, num_threads=1) for _ in range(2)]
  return [x.target.removeprefix("grpc://") for x in started]


# Each test has its own client, because a program costs the more the more
# programs its client has.
@pytest.fixture(params=["in process", "on servers"])
def client(request):
  if request.param == "in process":
    connected = runtime.connect(devices=4)
  else:
    connected = runtime.connect(request.getfixturevalue("servers"))
  with connected as client:
    yield client


# For tests of what happens only in the client.
in_process = pytest.mark.parametrize("client", ["in process"], indirect=True)


class Gate:
  """A function whose result exists once `open` is set; adds 1."""

  def __init__(self):
    self.begun, self.open = threading.Event(), threading.Event()

    def wait(x):
      self.begun.set()
      assert self.open.wait(SECS)
      return x + 1

    def add(x):
      return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)

    self.add = runtime.function(add)

  def shut_after_one_run(self, slice_, x):
    """Runs the function once, after which its program counts as a short one."""
    self.open.set()
    self.add.on(slice_)(x).wait()
    self.open.clear()
    self.begun.clear()


def stored(client, slice_, dtype=tf.float32):
  """Returns how many shards the store of each device has."""
  sizes = []
  with client.programs.graph.as_default():
    for device in slice_.devices:
      with tf.device(device):
        name = f"buffers_{dtype.name}"
        sizes.append(tf.raw_ops.MapSize(dtypes=[dtype], shared_name=name))
  return client.programs.call(Program(outputs=sizes))


@pytest.mark.parametrize(
  ("client", "dispatch"),
  [
    ("in process", "chained"),
    *(("on servers", x) for x in ("op_by_op", "chained", "fused")),
  ],
  indirect=["client"],
)
def test_a_block_is_a_program_on_two_slices(client, dispatch):
  a, b = client.slices("2", "2")

  @client.program(dispatch=dispatch)
  def f(v):
    x = double.on(a)(v)
    return {"x": x, "sums": [total.on(b)(x), x]}

  for v in (np.arange(4.0), np.float32([[1], [3]])):
    found = f(v)
    x, (y, again) = found["x"], found["sums"]
    assert again is x
    np.testing.assert_array_equal(x.fetch(), 2 * v)
    half = len(v) // 2
    sums = 2 * (v[:half] + v[half:])
    np.testing.assert_array_equal(y.fetch(), np.concatenate([sums, sums]))


@in_process
def test_a_buffer_says_what_it_is(client):
  (a,) = client.slices("2")
  x, y = (add_one.on(a)(np.zeros((4, 3), np.float32)) for _ in range(2))
  assert (x.slice, x.owner) == (a, client)
  assert (x.shape, x.dtype) == ((4, 3), tf.float32)
  assert x.handle != y.handle


def test_a_program_returns_before_it_ends_and_later_ones_read_its_result(
  client,
):
  a, b = client.slices("1", "2")
  gate = Gate()
  gate.shut_after_one_run(a, np.zeros(2))
  x = gate.add.on(a)(np.zeros(2))
  y = add_one.on(b)(x)
  z = double.on(a)(y)
  assert gate.begun.wait(SECS)
  gate.open.set()
  assert z.fetch().tolist() == [4, 4]


def test_programs_that_wait_hold_no_thread(client):
  """More programs wait than a server has threads."""
  a, b = client.slices("1", "1")
  gate = Gate()
  gate.shut_after_one_run(a, np.zeros(1))
  add_one.on(a)(add_one.on(a)(np.zeros(1))).wait()  # a short program
  x = gate.add.on(a)(np.zeros(1))
  assert gate.begun.wait(SECS)
  chain = [x]
  for _ in range(12):
    chain.append(add_one.on(a)(chain[-1]))
  assert add_one.on(b)(np.zeros(1)).fetch().tolist() == [1]
  gate.open.set()
  assert [y.fetch().tolist() for y in chain] == [[i + 1] for i in range(13)]


def test_readers_of_a_failed_program_raise_its_error_and_do_not_wait(client):
  a, b = client.slices("1", "1")
  gate = Gate()
  check = runtime.function(lambda x: tf.debugging.check_numerics(x, "bad x"))
  for function in (gate.add, check):  # programs that count as short
    gate.shut_after_one_run(a, np.zeros(1))
    gate.open.set()
    function.on(a)(add_one.on(b)(np.zeros(1))).wait()
  gate.open.clear()
  x = gate.add.on(a)(add_one.on(b)(np.float64([np.nan])))
  bad = check.on(a)(x)
  reader = add_one.on(b)(bad)
  of_reader = double.on(a)(reader)
  gate.open.set()
  for each in (bad, reader, of_reader):
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad x"):
      each.made.result(SECS)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad x"):
      each.fetch()
  with pytest.raises(tf.errors.InvalidArgumentError, match="bad x"):
    add_one.on(b)(bad).wait()  # dispatched after the failure
  assert x.fetch().tolist() != [0]


def test_a_program_that_waits_for_long_runs_in_the_end(client, monkeypatch):
  """Longer than programs wait in servers."""
  monkeypatch.setattr(shards, "WAIT_SECS", 0.2)
  a, b = client.slices("1", "1")
  gate, add_two = Gate(), runtime.function(lambda x: x + 2)
  gate.shut_after_one_run(a, np.zeros(1))
  add_two.on(b)(gate.add.on(a)(np.zeros(1)))
  gate.open.set()
  add_two.on(b)(gate.add.on(a)(np.zeros(1))).wait()
  gate.open.clear()
  y = add_two.on(b)(gate.add.on(a)(np.zeros(1)))
  z = double.on(a)(y)
  time.sleep(0.6)
  assert not y.made.done()
  gate.open.set()
  assert (y.fetch().tolist(), z.fetch().tolist()) == ([3], [6])
  assert add_one.on(a)(y).fetch().tolist() == [4]  # of a call that was repeated


@in_process
def test_an_array_may_be_changed_after_the_call(client):
  a, b = client.slices("1", "1")
  gate = Gate()
  x = gate.add.on(a)(np.zeros(2))
  given = np.float64([1, 2])
  two = runtime.function(lambda x, y: x + y)
  z = two.on(b)(x, given)
  given[:] = 7
  gate.open.set()
  assert z.fetch().tolist() == [2, 3]


def test_buffers_that_nothing_holds_leave_the_devices(client):
  (a,) = client.slices("2")
  before = stored(client, a)
  x = np.zeros((2, 2**18), np.float32)  # 1 MiB per device
  for _ in range(5):
    buffer = add_one.on(a)(x)
    reference = weakref.ref(buffer)
    buffer.wait()
    del buffer
    gc.collect()
    assert reference() is None
  kept = add_one.on(a)(x)
  processes.wait_for(lambda: max(stored(client, a)) <= max(before) + 1)
  assert kept.fetch().sum() == 2**19


def test_a_closed_client_has_no_buffers():
  with runtime.connect(devices=1) as first:
    (a,) = first.slices("1")
    x = add_one.on(a)(np.zeros(1))
  with runtime.connect(devices=1) as second:
    (b,) = second.slices("1")
    for use in (
      x.fetch,
      lambda: add_one.on(a)(np.zeros(1)),
      lambda: add_one.on(b)(x),
    ):
      assert message_of(use) == (
        "the client is closed, and its buffers ended with it: connect again, "
        "and run the programs that make them."
      )


def test_clients_in_one_process_do_not_share_buffers():
  with (
    runtime.connect(devices=1) as first,
    runtime.connect(devices=1) as second,
  ):
    (a,), (b,) = first.slices("1"), second.slices("1")
    x, y = add_one.on(a)(np.zeros(1)), double.on(b)(np.full(1, 4.0))
    assert x.handle == y.handle
    assert (x.fetch().tolist(), y.fetch().tolist()) == ([1], [8])
    assert message_of(double.on(b), x) == (
      "input 0 of <lambda> is a buffer of another client; fetch it, and pass "
      "the array."
    )


def test_slices_are_on_devices_with_the_fewest_slices():
  with runtime.connect(devices=4) as client:
    a, b, c = client.slices("2", "1", "data:1,model:2")
    assert [len(x.devices) for x in (a, b, c)] == [2, 1, 2]
    assert not {*a.devices} & {*b.devices}
    assert {*a.devices, *b.devices, *c.devices} == {*client.devices}
    (d,) = client.slices("2x2")
    assert (d.mesh_shape, d.devices) == ("x:2,y:2", client.devices)


@in_process
@pytest.mark.parametrize(
  ("shape", "message"),
  [
    (
      "2x4",
      'slice "x:2,y:4" has 8 devices, and the client has room for 4; give a '
      "slice of at most 4.",
    ),
    ("two", 'MESH_SHAPE = "two": "two" is not a pair; write "data:2,model:4".'),
  ],
)
def test_a_slice_that_cannot_be_is_one_line(client, shape, message):
  assert message_of(client.slices, shape) == message


@in_process
def test_a_call_knows_its_bytes_per_device(client):
  """A shard of each result; its inputs have their bytes already."""
  a, b, c = client.slices("2", "1", "1")
  x = add_one.on(a)(np.zeros((4, 3), np.float32))

  @client.program
  def f(x):
    return double.on(b)(add_one.on(c)(x)), total.on(a)(x)

  f(x)
  (lowered, _, _), *_ = f._traced.values()
  expected = dict.fromkeys([*b.devices, *c.devices], 0)
  expected |= dict.fromkeys(a.devices, 2 * 3 * 4)
  expected[b.devices[0]] += 4 * 3 * 4
  assert lowered.program.device_bytes == expected


@pytest.mark.slow  # two server processes
def test_a_server_that_ends_is_named():
  with Served(2) as servers:
    connected = runtime.connect(servers.addresses, timeout_secs=3)
    with connected as client:
      a, b = client.slices("1", "1")
      x = add_one.on(b)(add_one.on(a)(np.zeros(1)))
      assert x.fetch().tolist() == [2]
      servers.processes[1].kill()
      servers.processes[1].wait()
      with pytest.raises(UserError) as error:
        add_one.on(b)(np.zeros(1)).wait()
      assert servers.addresses[1] in str(error.value)
      assert "\n" not in str(error.value)


KILLED = """
import os, signal, sys
import numpy as np
from palm_mtf import runtime
from palm_mtf._tf import tf

def compute(x):
  for _ in range(20):
    with tf.control_dependencies([x]):
      y = tf.random.uniform([1500, 1500])
    x += 0 * tf.reduce_sum(tf.linalg.matmul(y, y), 0)[:1]
  return x

with runtime.connect(sys.argv[1:]) as client:
  a, b = client.slices("1", "1")
  function, add = runtime.function(compute), runtime.function(lambda x: x + 1)
  kept = runtime.function(lambda x: tf.ones([2**26]) + x).on(a)(np.float32(1))
  kept.wait()
  x = np.zeros(1, np.float32)
  for _ in range(3):
    function.on(a)(x).source.secs = 0.1
  pending = function.on(a)(x)
  waiting = [add.on(b)(pending) for _ in range(4)]
  print("waits", flush=True)
  os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # two server processes, three clients
def test_servers_work_on_after_clients_that_are_killed_while_they_wait():
  with Served(2) as servers:
    for _ in range(4):  # more than a server has threads
      killed = processes.start("-c", KILLED, *servers.addresses, stderr=None)
      assert killed.stdout.readline() == "waits\n"
      killed.wait()
    with runtime.connect(servers.addresses) as client:
      a, b = client.slices("1", "1")
      x = add_one.on(b)(add_one.on(a)(np.zeros(1)))
      x.made.result(SECS)
      assert x.fetch().tolist() == [2]
