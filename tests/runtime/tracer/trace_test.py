# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A block becomes one program, with one call, however it is dispatched."""

import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from tests.refusals import message_of

add_one = runtime.function(lambda x: x + 1)
multiply = runtime.function(lambda x, y: x * y, name="multiply")
share = runtime.function(lambda x: x / runtime.all_sum(tf.reduce_sum(x)))


@pytest.fixture(scope="module")
def client():
  with runtime.connect(devices=4) as client:
    yield client


@pytest.fixture(scope="module")
def slices(client):
  return client.slices("2", "2")


@pytest.fixture
def calls(client, monkeypatch):
  """The programs that the client starts."""
  started, run = [], client.programs.run

  def record(program, *inputs, **more):
    started.append(program)
    return run(program, *inputs, **more)

  monkeypatch.setattr(client.programs, "run", record)
  return started


def compiled_functions(client):
  """Operations that call a function that XLA compiles."""
  return [
    x
    for x in client.programs.graph.get_operations()
    if x.type.endswith("PartitionedCall") and x.get_attr("_XlaMustCompile")
  ]


@pytest.mark.parametrize(
  ("dispatch", "num_calls", "num_compiled"),
  [("op_by_op", 7, 0), ("chained", 1, 0), ("fused", 1, 2)],
)
def test_dispatch_decides_calls_and_functions_but_no_result(
  client, slices, calls, dispatch, num_calls, num_compiled
):
  a, b = slices

  @client.program(dispatch=dispatch)
  def f(x, y):
    for _ in range(3):
      x = add_one.on(a)(multiply.on(a)(x, y))
    return share.on(b)(x)

  before = len(compiled_functions(client))
  x, y = np.arange(1, 5.0), np.float64(0.5)
  found = f(x, y).fetch()
  assert len(calls) == num_calls
  # One compiled function, on each of two devices.
  assert len(compiled_functions(client)) - before == num_compiled
  for _ in range(3):
    x = x * y + 1
  np.testing.assert_allclose(found, x / x.sum(), rtol=1e-15)


def test_a_block_is_traced_once_per_kind_of_input(client, slices):
  a, _ = slices
  kinds = []

  @client.program
  def f(x):
    kinds.append((tuple(x.shape), x.dtype))
    return add_one.on(a)(x)

  for x in (np.zeros(2), np.ones(2), np.zeros(4), np.float32([1, 2])):
    assert f(f(x)).fetch().tolist() == (x + 2).tolist()
  assert len(kinds) == 6  # each kind as an array, and as a buffer


def test_constants_and_programs_are_parts_of_a_program(client, slices, calls):
  a, b = slices

  @client.program
  def inner(x):
    return multiply.on(b)(x, np.arange(4.0)), None or add_one.on(a)([5.0, 6.0])

  @client.program
  def outer(x):
    y, z = inner(add_one.on(a)(x))
    return {"y": y, "z": z}

  for _ in range(2):
    made = outer(np.ones(4))
    assert made["y"].fetch().tolist() == [0, 2, 4, 6]
    assert made["z"].fetch().tolist() == [6, 7]
  assert len(calls) == 2


def returns_its_input(x):
  return x


def returns_a_number(x):
  return 3


def uses_code_that_is_no_function(x):
  return x + 1


@pytest.mark.parametrize(
  ("block", "message"),
  [
    (
      returns_its_input,
      "returns_its_input returns an input, which is on no slice: return what "
      "its functions make, in tuples, lists or dicts.",
    ),
    (
      returns_a_number,
      "returns_a_number returns int, which is on no slice: return what its "
      "functions make, in tuples, lists or dicts.",
    ),
    (
      uses_code_that_is_no_function,
      "uses_code_that_is_no_function: TypeError: unsupported operand type(s) "
      "for +: 'Value' and 'int' (tests/runtime/tracer/trace_test.py:LINE, in "
      "uses_code_that_is_no_function)",
    ),
  ],
)
def test_a_block_that_is_no_program_is_one_line(client, block, message):
  line = uses_code_that_is_no_function.__code__.co_firstlineno + 1
  message = message.replace("LINE", str(line))
  assert message_of(client.program(block), np.zeros(2)) == message


@pytest.mark.parametrize("dispatch", ["op_by_op", "chained", "fused"])
def test_a_program_that_calls_itself_is_refused(client, slices, dispatch):
  a, _ = slices

  @client.program(dispatch=dispatch)
  def f(x):
    return add_one.on(a)(g(x))

  @client.program
  def g(x):
    return f(x)

  assert message_of(f, np.zeros(2)) == (
    "f calls itself, so that its results would be its own inputs; a program is "
    "a graph without cycles."
  )


def test_values_belong_to_their_trace(client, slices):
  a, _ = slices
  kept = []

  @client.program
  def first(x):
    kept.append(add_one.on(a)(x))
    return kept[0]

  @client.program
  def second(x):
    return multiply.on(a)(x, kept[0])

  buffer = first(np.zeros(2))
  assert message_of(second, np.zeros(2)) == (
    "second: multiply reads a value of another trace, of first; return it "
    "there, and pass the buffer."
  )
  kept[0] = buffer
  assert message_of(second, np.zeros(2)) == (
    "second: an input of multiply is Buffer: give numbers; a buffer can only "
    "be an input of a program."
  )


def test_a_slice_of_another_client_is_refused(slices):
  a, _ = slices
  with runtime.connect(devices=1) as other:

    @other.program
    def f(x):
      return multiply.on(a)(x, x)

    assert message_of(f, np.zeros(2)) == (
      "f: multiply runs on a slice of another client; use slices of the client "
      "that traces the program."
    )


def test_a_wrong_dispatch_is_refused(client):
  with pytest.raises(UserError) as error:
    client.program(dispatch="chain")
    client.program(returns_its_input, dispatch="chain")
  assert str(error.value) == (
    "dispatch = 'chain' (did you mean \"chained\"?): choose one of 'chained', "
    "'op_by_op', 'fused'."
  )
