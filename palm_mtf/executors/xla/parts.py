# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a Mesh TensorFlow graph as functions of one device's arrays.

JAX calls the functions inside `jax.shard_map`. A scan can call the function of
one layer for all layers.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import export
from jax.experimental import jax2tf

from palm_mtf._tf import mtf, tf, tf2
from palm_mtf.executors.xla.xla_placement import RANDOM_STATE, XlaPlacement
from palm_mtf.mesh.stages import Send, find_parts
from palm_mtf.ops.variables import variables_read
from palm_mtf.ops.xla import xla_computation


class Cut(Send):
  """Outputs its input; `cut_graph` cuts the graph into functions here."""

  def __init__(self, x: mtf.Tensor):
    super().__init__(x, x.mesh)

  def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor]:
    """Cuts the backward pass in the same place."""
    return [cut(grad_ys[0])]


class _Summed(mtf.Operation):
  """Outputs its input, summed over devices if each holds a term of it."""

  def __init__(self, x: mtf.Tensor):
    super().__init__([x], name="summed")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor]:
    """Returns the gradient of the sum, which is the gradient of each term."""
    return grad_ys

  def lower(self, lowering: mtf.Lowering) -> None:
    """Does the all-reduce that the input still needs, if any."""
    x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
    lowering.set_tensor_lowering(self.outputs[0], x)


def cut(x: mtf.Tensor) -> mtf.Tensor:
  """Returns x as an input of the next part of the graph."""
  # Sum x over devices before the cut. Otherwise each part that reads x (a
  # block's forward and backward pass) would all-reduce it.
  return Cut(_Summed(x).outputs[0]).outputs[0]


class Given(mtf.Operation):
  """A placeholder: a tensor that a `DeviceFunction` takes as an argument."""

  def __init__(self, mesh: mtf.Mesh, name: str, shape: mtf.Shape, dtype: Any):
    super().__init__([], mesh, name=name)
    self._outputs = [mtf.Tensor(self, shape, dtype)]


class LoweringError(Exception):
  """XLA cannot run an operation: its name, and one line that says why not."""


# TensorFlow's error for an operation that XLA lacks: its type and its name,
# which begins with the name of the Mesh TensorFlow operation.
_LACKING = re.compile(r"(\w+) \(No registered .*?\{\{node (.+?)\}\}")


class DeviceFunction:
  """Operations of a graph as a function that JAX calls on one device.

  Attributes:
    takes: tensors that the function takes.
    gives: tensors that the function returns.
    variables: names of the variables that the function reads.
  """

  def __init__(
    self,
    placement: XlaPlacement,
    takes: Iterable[mtf.Tensor],
    gives: Sequence[mtf.Tensor],
    updates: Sequence[mtf.Operation] = (),
    *,
    open_axes: dict[mtf.Tensor, list[int]] | None = None,
    in_scan: bool = False,
  ):
    """Finds the operations; JAX builds them at the first call.

    Args:
      takes: tensors that the caller computes; those that no operation needs are
        left out of the attribute `takes`.
      gives: tensors to return.
      updates: operations that assign variables.
      open_axes: {tensor: numbers of the mesh axes over which each device holds
        only its term of a sum}. The first call reads the axes of `takes` and
        adds the axes of `gives`, which the function returns without all-reduce.
        If None, the function all-reduces each tensor that it returns.
      in_scan: value of `XlaPlacement.in_scan` for the operations.
    """
    placement.num_functions += 1
    self._placement, self._number = placement, placement.num_functions
    self._open_axes, self._in_scan = open_axes, in_scan
    self.gives, self._updates = list(gives), list(updates)
    known = dict.fromkeys(takes)
    self._operations = _find_operations(known, self.gives, self._updates)
    needed = {x for each in self._operations for x in _inputs_of(each)}
    needed |= {*self.gives}
    self.takes = [x for x in known if x in needed]
    read = [y for x in self._operations for y in variables_read(x)]
    names = [x.name for x in read]
    if any(isinstance(x, mtf.ops.RandomOperation) for x in self._operations):
      names.append(RANDOM_STATE)
    self.variables = list(dict.fromkeys(names))
    self._exported: export.Exported | None = None

  def __call__(
    self,
    taken: Mapping[mtf.Tensor, jax.Array],
    variables: Mapping[str, jax.Array],
  ) -> tuple[dict[mtf.Tensor, jax.Array], dict[str, jax.Array]]:
    """Returns {tensor in `gives`: slice}, {name of an updated variable: slice}.

    Args:
      taken: the device's slices of the tensors in `takes`.
      variables: the device's slices of variables, by name.
    """
    if not self._operations:  # nothing is wanted, as of frozen layers
      return {}, {}
    arrays = (
      self._placement.find_index(),
      [taken[x] for x in self.takes],
      [variables[x] for x in self.variables],
    )
    # Pods of a process may make the first call at once: let one of them lower.
    with self._placement.lock:
      if not self._exported:
        try:
          self._exported = export_function(
            self._build, arrays, self._placement.platform
          )
        except ValueError as error:
          if found := _LACKING.search(str(error)):
            lacking, operation = found.groups()
            raise LoweringError(operation, f"XLA has no {lacking}") from None
          raise
    values, assigned = self._exported.call(*arrays)
    return dict(zip(self.gives, values, strict=True)), assigned

  def _build(
    self,
    index: tf.Tensor,
    taken: Sequence[tf.Tensor],
    variables: Sequence[tf.Tensor],
  ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
    placement, open_axes = self._placement, self._open_axes
    values = dict(zip(self.variables, variables, strict=True))
    placement.begin(
      index, function=self._number, values=values, in_scan=self._in_scan
    )
    tensors = {}
    for x, value in zip(self.takes, taken, strict=True):
      tensors[x] = placement.LaidOutTensor([value])
      if open_axes and x in open_axes:
        axes = open_axes[x]
        tensors[x] = mtf.LazyAllreduceSum(placement, tensors[x], axes)
    with xla_computation():
      lowered = _Lowering(placement, self._operations, tensors).tensors
      values = []
      for x in self.gives:
        value = lowered[x]
        is_open = isinstance(value, mtf.LazyAllreduceSum)
        if is_open and open_axes is not None:
          open_axes[x], value = value.mesh_axes, value.laid_out_input
        values.append(value.to_laid_out_tensor().one_slice)
    return values, placement.assigned


def export_function(
  build: Callable, arrays: Any, platform: str
) -> export.Exported:
  """Lowers a function of a device, so that JAX can call it.

  Args:
    build: takes tensors and returns tensors, nested like `arrays`.
    arrays: positional arguments; only shapes and dtypes are read.
    platform: JAX's name of the devices' kind in lowered programs.
  """
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays
  )
  function = tf2.function(build, autograph=False)
  exported = export.export(
    jax.jit(jax2tf.call_tf(function)), platforms=["cpu"]
  )(*shapes)
  # TensorFlow for CPUs cannot lower for other devices. But what it lowers for
  # CPUs is StableHLO, in which nothing depends on the kind of device.
  return dataclasses.replace(exported, platforms=(platform,))


class _Lowering(mtf.Lowering):
  """Lowers one part of a graph: `operations`, whose inputs are `tensors`."""

  def __init__(
    self,
    placement: XlaPlacement,
    operations: Sequence[mtf.Operation],
    tensors: Mapping[mtf.Tensor, Any],
  ):
    # Do not call mtf.Lowering's constructor, which lowers the whole graph.
    self.graph = operations[0].graph
    self.mesh_to_impl = {operations[0].mesh: placement}
    self.tensors, self.operations = dict(tensors), {}
    self.variables = _Variables()
    self.variables.placement = placement
    self._counters = []
    for operation in operations:
      with tf.name_scope(operation.name):
        try:
          operation.lower(self)
        except Exception as error:
          line = (str(error).splitlines() or [type(error).__name__])[0]
          raise LoweringError(operation.name, line) from error


class _Variables(dict):
  """{variable: the device's slice}; a variable's first use adds its slice."""

  # An update does not list its variables as inputs. So Mesh TensorFlow may
  # lower the update before it lowers the variables.
  placement: XlaPlacement

  def __missing__(self, variable: mtf.Variable) -> Any:
    laid_out = self.placement.LaidOutVariable(variable, self.placement)
    return self.setdefault(variable, laid_out)


def _find_operations(
  known: Collection[mtf.Tensor],
  gives: Sequence[mtf.Tensor],
  updates: Sequence[mtf.Operation],
) -> list[mtf.Operation]:
  """Returns `updates`, and the operations that they and `gives` depend on.

  The result is in graph order. It lacks operations that only compute tensors in
  `known`, because the caller already has the values of these tensors.
  """
  todo = [*updates, *(x.operation for x in gives if x not in known)]
  if not todo:
    return []
  found = set(todo)
  while todo:
    inputs = _inputs_of(todo.pop())
    more = {x.operation for x in inputs if x not in known} - found
    found |= more
    todo += more
  (graph,) = {x.graph for x in found}
  return [x for x in graph.operations if x in found]


def _inputs_of(operation: mtf.Operation) -> list[mtf.Tensor]:
  """Returns an operation's inputs and, for a loop, those of its operations."""
  if not isinstance(operation, mtf.ops.WhileLoopOperation):
    return operation.inputs
  # Mesh TensorFlow lists only the loop's variables, which the body replaces.
  inner = {operation, *operation._cond_ops, *operation._body_ops}
  read = [operation._cond_output, *operation._body_outputs]
  read += [x for each in inner for x in each.inputs]
  return [*operation.inputs, *(x for x in read if x.operation not in inner)]


def cut_graph(
  placement: XlaPlacement,
  graph: mtf.Graph,
  first: Mapping[mtf.Operation, int],
  wanted: Sequence[mtf.Tensor],
  scanned: Collection[int] = (),
) -> tuple[list[DeviceFunction], dict[mtf.Tensor, list[int]]]:
  """Cuts a graph of one mesh at each `Cut`; makes a function of each part.

  Operations that depend on none of `first` (such as casts of weights) belong to
  no part: each part that needs their outputs computes them.

  Args:
    first: {operation: number of the earliest part that may compute it}.
    wanted: tensors to return, whether or not another part takes them.
    scanned: numbers of the parts that JAX scans over the layers.

  Returns:
    The functions, in the order of the parts; and their `open_axes`.
  """
  numbers = find_parts(graph.operations, first)
  given = [x.outputs[0] for x in graph.operations if isinstance(x, Given)]
  for x in given:
    numbers.pop(x.operation, None)
  taken = {
    (x, number): None
    for operation, number in numbers.items()
    for x in operation.inputs
    if numbers.get(x.operation, number) != number
  }
  open_axes: dict[mtf.Tensor, list[int]] = {}
  functions = []
  for number in sorted({*numbers.values()}):
    gives = dict.fromkeys([*(x for x, _ in taken), *wanted])
    functions.append(
      DeviceFunction(
        placement,
        [*given, *(x for x, taker in taken if taker == number)],
        [x for x in gives if numbers[x.operation] == number],
        open_axes=open_axes,
        in_scan=number in scanned,
      )
    )
  return functions, open_axes
