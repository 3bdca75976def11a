# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A client runs programs in the order that their state asks for."""

import threading

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.mesh.session import session_config
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program
from tests.refusals import message_of

SECS = 10.0  # after which a call that should have begun is missing
A, B = frozenset("a"), frozenset("b")


@pytest.fixture
def client():
  with (
    tf.Graph().as_default(),
    Client(tf.Session(config=session_config(4))) as client,
  ):
    yield client


def nan():
  """Returns a tensor that fails."""
  return tf.debugging.check_numerics(tf.constant(np.nan), "bad number")


class Gate:
  """A program that says when it has begun, and ends when it is let go."""

  def __init__(self, device=0, **state):
    self.begun, self.may_end = threading.Event(), threading.Event()

    def wait():
      self.begun.set()
      assert self.may_end.wait(SECS)
      return np.int32(1)

    with tf.device(f"/device:cpu:{device}"):
      value = tf.numpy_function(wait, [], tf.int32)
    self.program = Program(outputs=value, **state)


def test_inputs_and_outputs_have_names(client):
  x, y = (tf.placeholder(tf.float32, []) for _ in "xy")
  divide = Program({"x": x, "y": y}, {"quotient": x / y, "both": [x, y]})
  expected = {"quotient": 1.5, "both": [3.0, 2.0]}
  assert client.call(divide, {"y": 2.0, "x": 3.0}) == expected
  assert client.run(divide, {"y": 2.0, "x": 3.0}).result() == expected


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (
      {"prompts": 1, "length": 2},
      'the program has no input "length" (did you mean "lengths"?).',
    ),
    ({"prompts": 1}, 'the program needs its input "lengths": give it.'),
  ],
)
def test_a_wrong_input_is_named_before_anything_runs(client, given, message):
  names = ("prompts", "lengths")
  program = Program({name: tf.placeholder(tf.int32, []) for name in names})
  assert message_of(client.run, program, given) == message


W, R = {"writes": A}, {"reads": A}


@pytest.mark.parametrize(
  ("first", "second"), [(W, W), (W, R), (R, {"writes": A | B})]
)
def test_a_call_waits_for_an_earlier_one_that_its_state_depends_on(
  client, first, second
):
  gate, later = Gate(**first), Gate(1, **second)
  earlier = client.run(gate.program)
  assert gate.begun.wait(SECS)
  future = client.run(later.program)
  assert not later.begun.wait(0.3)
  gate.may_end.set()
  assert later.begun.wait(SECS)
  assert earlier.done()
  later.may_end.set()
  assert future.result() == 1


@pytest.mark.parametrize(
  ("first", "second"), [(R, R), (W, {"writes": B}), (W, {})]
)
def test_calls_that_share_no_changed_state_run_at_the_same_time(
  client, first, second
):
  gates = Gate(**first), Gate(1, **second)
  futures = [client.run(x.program) for x in gates]
  assert all(x.begun.wait(SECS) for x in gates)
  for gate in gates:
    gate.may_end.set()
  assert [x.result() for x in futures] == [1, 1]


def test_calls_that_change_a_variable_do_so_in_the_order_they_were_made(client):
  text = tf.Variable("", use_resource=True, trainable=False)
  letter = tf.placeholder(tf.string, [])
  append = [text.assign(tf.strings.join([text, letter])).op]
  append = Program({"letter": letter}, operations=append, writes=A)
  client.call(Program(operations=[text.initializer], writes=A))
  letters = [chr(ord("a") + i % 26) for i in range(200)]
  for x in letters:
    client.run(append, {"letter": x})
  found = client.call(Program(outputs=text.read_value(), reads=A))
  assert found.decode() == "".join(letters)


def test_a_call_fails_with_the_error_of_the_call_that_it_waits_for(client):
  gate = Gate(writes=A)
  with tf.control_dependencies([gate.program.outputs]):
    bad = Program(outputs=nan(), writes=A)
  good = Program(outputs=tf.constant(1), reads=A)
  bad, good = client.run(bad), client.run(good)
  gate.may_end.set()
  for future in (bad, good):
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad number"):
      future.result(SECS)
  # A call that is made later does not wait for the failed call.
  assert client.call(Program(outputs=tf.constant(2), reads=A)) == 2


def test_sequences_run_at_the_same_time_each_in_its_order(client):
  gates = [Gate(0), Gate(1)]
  x = tf.placeholder(tf.int32, [])
  double = Program({"x": x}, 2 * x)

  def calls(gate):
    yield gate.program, {}, {}
    yield from ((double, {"x": i}, {}) for i in range(3))
    gates[0].may_end.set()  # the first sequence ends last

  gates[1].may_end.set()
  outputs = client.call_all(calls(x) for x in gates)
  assert outputs == [[1, 0, 2, 4], [1, 0, 2, 4]]
  assert all(gate.begun.is_set() for gate in gates)


def test_an_error_of_a_sequence_is_raised_while_another_waits_for_it(client):
  queue = tf.FIFOQueue(1, [tf.int32])
  waits = Program(outputs=queue.dequeue())
  bad = Program(outputs=nan())
  with pytest.raises(tf.errors.InvalidArgumentError, match="bad number"):
    client.call_all([[(waits, {}, {})], [(bad, {}, {})]])
