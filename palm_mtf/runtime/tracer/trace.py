# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Traces a Python block into one program.

TensorFlow's graph mode is the tracer. While the block runs, each function that
it calls on a slice is built in a graph that is never run, to find the shapes of
results. Then the functions are built in the client's graph, with an edge
wherever a function reads a result of another.
"""

import collections
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.ops.xla import fused
from palm_mtf.runtime.program import Program, state_of
from palm_mtf.runtime.tracer.functions import Function, to_rows
from palm_mtf.runtime.tracer.shards import (
  Sharding,
  Shards,
  Tickets,
  VirtualSlice,
  move,
)
from palm_mtf.user_code import user_code


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, as a key
class Value:
  """An array in a traced block."""

  trace: "Trace" = dataclasses.field(repr=False)
  shape: Sequence[int]
  dtype: tf.DType
  held: Sharding | None = None  # None if each call feeds a NumPy array


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
  """A call of a function on a slice."""

  function: Function
  slice: VirtualSlice
  inputs: Sequence[Value]
  read: Sequence[Sharding]  # shardings in which the function reads its inputs
  outputs: Sequence[Value]
  can_fuse: bool = False


class Trace:
  """The calls of functions in a block; error messages call the block `name`."""

  def __init__(self, name: str, owner: object):
    self.name, self._owner = name, owner
    # Arrays that the block passes to functions, besides the block's inputs.
    self.constants: dict[Value, np.ndarray] = {}
    self.nodes: list[Node] = []  # calls of functions, in order
    self._graph = tf.Graph()

  def run(self, block: Callable[..., Any], inputs: Sequence[Value]) -> Any:
    """Calls the block; returns its results, nested as in the block."""
    token = _TRACE.set(self)
    try:
      with user_code(self.name):
        nested = block(*inputs)
    finally:
      _TRACE.reset(token)
    for x in tf.nest.flatten(nested):
      if not isinstance(x, Value) or x.trace is not self or not x.held:
        kind = "an input" if isinstance(x, Value) else type(x).__name__
        raise UserError(
          f"{self.name} returns {kind}, which is on no slice: return what its "
          "functions make, in tuples, lists or dicts."
        )
    return nested

  def call(
    self, function: Function, slice_: VirtualSlice, inputs: Sequence[object]
  ) -> Any:
    """Adds the call of a function; returns the values that it makes."""
    if slice_.owner is not self._owner:
      raise UserError(
        f"{self.name}: {function.name} runs on a slice of another client; use "
        "slices of the client that traces the program."
      )
    values = [self._adopt(x, function.name) for x in inputs]
    read = function.read(slice_, values)
    with self._graph.as_default():
      shards = [
        [tf.placeholder(x.dtype, x.sizes) for _ in slice_.devices] for x in read
      ]
      built = function.build(slice_, read, shards)
    made = [Value(self, x.shape, x.dtype, x) for x in built.held]
    node = Node(function, slice_, values, read, made, built.can_fuse)
    self.nodes.append(node)
    return tf.nest.pack_sequence_as(built.nested, made)

  def _adopt(self, given: object, reader: str) -> Value:
    if not isinstance(given, Value):
      array = to_array(given, f"{self.name}: an input of {reader}")
      given = Value(self, array.shape, tf.as_dtype(array.dtype))
      self.constants[given] = array
    if given.trace is not self:
      raise UserError(
        f"{self.name}: {reader} reads a value of another trace, of "
        f"{given.trace.name}; return it there, and pass the buffer."
      )
    return given


_TRACE: contextvars.ContextVar = contextvars.ContextVar("trace", default=None)
current_trace: Callable[[], Trace | None] = _TRACE.get


def to_array(given: object, name: str) -> np.ndarray:
  """Converts numbers to an array, with the dtypes that TensorFlow gives them.

  Raises UserError, which says `name`, if `given` is not made of numbers.
  """
  if isinstance(given, np.ndarray) and given.dtype.kind not in "OSU":
    return given
  try:
    return tf.make_ndarray(tf.make_tensor_proto(given))
  except (TypeError, ValueError):
    raise UserError(
      f"{name} is {type(given).__name__}: give numbers; a buffer can only be "
      "an input of a program."
    ) from None


def fuse(nodes: Sequence[Node], results: Sequence[Value]) -> Iterator[Node]:
  """Joins consecutive nodes of a slice into one function that XLA compiles.

  `nodes` are the nodes of a trace. A joined function returns only the values
  that other nodes read, or that the program stores, `results`.
  """
  for _, group in itertools.groupby(
    nodes, lambda node: node.slice if node.can_fuse else node
  ):
    part = list(group)
    if not part[0].can_fuse:
      yield part[0]
      continue
    made = {x for node in part for x in node.outputs}
    read = {
      x: y
      for node in part
      for x, y in zip(node.inputs, node.read, strict=True)
      if x not in made
    }
    others = (x for node in nodes if node not in part for x in node.inputs)
    outputs = [x for x in dict.fromkeys((*results, *others)) if x in made]

    def run(*given: tf.Tensor, part=part, read=read, outputs=outputs) -> Any:
      shards = dict(zip(read, given, strict=True))
      for node in part:
        found = node.function.fn(*[shards[x] for x in node.inputs])
        found = map(to_rows, tf.nest.flatten(found))
        shards.update(zip(node.outputs, found, strict=True))
      return [shards[x] for x in outputs]

    function = Function(fused(run), part[0].function.name)
    yield Node(function, part[0].slice, [*read], [*read.values()], outputs)


@dataclasses.dataclass(eq=False)
class Lowered:
  """A traced block, built as a program in the client's graph."""

  program: Program
  buffers: Sequence[int]  # indices of the inputs that are buffers
  # For each input of `program` that takes a region of an array, the index of
  # the array among the inputs, and the region.
  feeds: dict[str, tuple[int, tuple[slice, ...]]]
  outputs: Sequence[Sharding]  # one for each result
  variables: Sequence[tf.Variable]  # read by `program`; calls initialize them
  secs: float = math.inf  # duration of the last call, to guess the next


def lower(
  inputs: Sequence[Value], nodes: Sequence[Node], results: Sequence[Value]
) -> Lowered:
  """Builds the nodes of a trace as one program in the current graph.

  The program stores the values `results` as buffers.
  """
  buffers = [i for i, x in enumerate(inputs) if x.held]
  outputs = [x.held for x in results]
  held = [*(inputs[i].held for i in buffers), *outputs]
  tickets = Tickets(held)
  for row in range(len(buffers)):
    tickets.wait(row)
  shards = {inputs[i]: tickets.peek(row) for row, i in enumerate(buffers)}
  fed: dict[str, tf.Tensor] = {}
  feeds, variables = {}, []

  def read(value: Value, wanted: Sharding) -> Shards:
    if value.held:
      return move(shards[value], value.held, wanted)
    index, found = inputs.index(value), []
    places = zip(wanted.slice.devices, wanted.regions, strict=True)
    for device, region in places:
      name = f"{index}{region} on {device}"
      feeds[name] = index, region
      if name not in fed:
        with tf.device(device):
          fed[name] = tf.placeholder(wanted.dtype, wanted.sizes)
      found.append(fed[name])
    return found

  for node in nodes:
    given = [*map(read, node.inputs, node.read)]
    built = node.function.build(node.slice, node.read, given)
    shards.update(zip(node.outputs, built.outputs, strict=True))
    variables += built.variables
  for row, x in enumerate(results, len(buffers)):
    tickets.stage(row, shards[x])
  used = (x.slice.devices for x in (*held, *nodes))
  num_bytes = collections.Counter(dict.fromkeys(itertools.chain(*used), 0))
  for x in outputs:
    num_bytes.update(x.count_bytes(1))
  program = Program(
    inputs={**fed, **tickets.placeholders},
    operations=tickets.signal(range(len(buffers), len(held))),
    reads=state_of(variables),
    device_bytes=num_bytes,
  )
  return Lowered(program, buffers, feeds, outputs, variables)
