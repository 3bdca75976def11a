# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that XLA compiles."""

import contextlib
import contextvars
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from palm_mtf._tf import (
  atomic_function,
  attr_value_pb2,
  control_flow_util,
  ops,
  tf,
  tf2,
)

# This module replaces two functions of TensorFlow, but only for tf2.functions
# whose names begin with _OURS. `_name_by_content` names a function by its
# content. `_call_of_known_shapes` infers no shapes at a call, which saves 10%
# of the time of a command that trains for two steps.
_OURS = "palm_mtf_"
_Result = TypeVar("_Result")
_from_func_graph = atomic_function.from_func_graph


def _name_by_content(
  name: str, graph: tf.Graph, attrs: dict, *more: object, **named: object
) -> object:
  # TensorFlow would add a counter to the name. With a hash instead, the name is
  # the same in every session and process, so that XLA's persistent cache
  # (machine/compiled_code.py) finds the compiled code.
  if "_XlaMustCompile" in attrs and graph.name.startswith(_OURS):
    content = graph.as_graph_def().SerializeToString(deterministic=True)
    ends = [x.name for x in (*graph.inputs, *graph.outputs)]
    digest = hashlib.sha256(content + repr(ends).encode()).hexdigest()
    name = f"__inference_{graph.name}_{digest[:16]}"
  return _from_func_graph(name, graph, attrs, *more, **named)


atomic_function.from_func_graph = _name_by_content
_partitioned_call_op = atomic_function.partitioned_call_op


def _call_of_known_shapes(
  name: str,
  args: Sequence[object],
  is_stateful: bool,
  tout: Sequence[int],
  config: bytes | None = None,
  executor_type: str | None = None,
  xla_compile_attr: attr_value_pb2.AttrValue | None = None,
) -> tf.Operation:
  # Create the call operation without shape inference, because the caller,
  # tf2.function, sets the output shapes. Each inference would walk through the
  # function's body and copy a table of all constants of the graph.
  if not tf.compat.as_str(name).startswith(f"__inference_{_OURS}"):
    given = (config, executor_type, xla_compile_attr)
    return _partitioned_call_op(name, args, is_stateful, tout, *given)
  value = attr_value_pb2.AttrValue
  args = [tf.convert_to_tensor(x) for x in args]
  inputs = [x.dtype.as_datatype_enum for x in args]
  attrs = {
    "Tin": value(list=value.ListValue(type=inputs)),
    "Tout": value(list=value.ListValue(type=tout)),
    "f": value(func=attr_value_pb2.NameAttrList(name=name)),
    "config_proto": value(s=config),
    "executor_type": value(s=(executor_type or "").encode()),
    "_disable_call_shape_inference": value(b=True),
  }
  if xla_compile_attr is not None:
    attrs["_XlaMustCompile"] = xla_compile_attr
  kind = "StatefulPartitionedCall" if is_stateful else "PartitionedCall"
  return ops.get_default_graph().create_op(
    kind, args, tout, name="PartitionedCall", attrs=attrs
  )


atomic_function.partitioned_call_op = _call_of_known_shapes


def _in_each_graph(fn: Callable, **options: object) -> Callable[..., object]:
  """Makes a tf2.function of fn per graph; it traces fn once per input shape."""
  # A tf2.function refers to the graph in which it was traced. The tf2.function
  # is an attribute of the graph, so that both are freed together. In a weak
  # dictionary from graphs to functions, a function would keep its graph alive.
  kept = "_functions_of_palm_mtf"

  def ours(*args: object) -> object:
    return fn(*args)

  name = getattr(fn, "__name__", "function")  # functools.partial has no name
  ours.__name__ = f"{_OURS}{name.strip('_')}"

  def call(*args: object) -> object:
    graph = ops.get_default_graph()
    while graph.building_function:
      graph = graph.outer_graph
    if not hasattr(graph, kept):
      setattr(graph, kept, {})
    made = getattr(graph, kept)
    if call not in made:
      made[call] = tf2.function(ours, autograph=False, **options)
    return made[call](*args)

  return call


def fused(fn: Callable[..., _Result]) -> Callable[..., _Result]:
  """Compiles an element-wise function of slices into one pass over memory.

  Decorate module-level functions, not closures, so that all layers that call
  the same function with the same shapes share the compiled code.
  """
  # On a CPU, element-wise operations that XLA fuses are two to four times as
  # fast as TensorFlow's separate operations. Matrix products do not belong in
  # `fn`, because oneDNN's are faster than XLA's.
  compiled = _in_each_graph(fn, jit_compile=True)

  @functools.wraps(fn)
  def call(*args: object) -> _Result:
    is_plain = in_xla_computation() or _is_plain.get()
    return (fn if is_plain else compiled)(*args)

  return call


@contextlib.contextmanager
def set_true(flag: contextvars.ContextVar[bool]) -> Iterator[None]:
  """Makes the context variable `flag` true while the `with` body runs."""
  token = flag.set(True)
  try:
    yield
  finally:
    flag.reset(token)


_is_plain = contextvars.ContextVar("is_plain", default=False)
# Context manager: in its body, `fused` functions build plain operations,
# because a SavedModel must run without XLA.
without_fusion = functools.partial(set_true, _is_plain)


@functools.cache
def fused_update(
  fn: Callable[..., Sequence[tf.Tensor]],
) -> Callable[..., tf.Tensor]:
  """Compiles an element-wise function that updates variables in place.

  Args:
    fn: module-level function. It takes a list of the variables' values, then
      more tensors, the first of which has the variables' shape. It returns the
      variables' next values.

  Returns:
    A function that takes a list of variables and the tensors. It returns a
    tensor, [] bool, that is computed after the variables are updated.
  """

  # If nothing else holds the previous value, XLA writes the next value over it,
  # so that there is no second copy of the variables.
  def update(handles, like, *others):
    values = []
    for handle, dtype in handles:
      value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
      value.set_shape(like.shape)
      values.append(value)
    after = fn(values, like, *others)
    for (handle, _), value in zip(handles, after, strict=True):
      tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return tf.constant(True)

  update.__name__ = fn.__name__
  compiled = _in_each_graph(update, jit_compile=True)

  def call(variables: Sequence[tf.Variable], *tensors: tf.Tensor) -> tf.Tensor:
    handles = [(x.handle, x.dtype.base_dtype) for x in variables]
    return compiled(handles, *tensors)

  return call


def function(fn: Callable[..., object]) -> Callable[..., object]:
  """Makes a call of fn one operation; a graph has fn's body once per shape."""
  return _in_each_graph(fn)


_is_xla = contextvars.ContextVar("is_xla", default=False)
# Context manager: in its body, `in_xla_computation` returns True.
xla_computation = functools.partial(set_true, _is_xla)


def in_xla_computation() -> bool:
  """Returns whether XLA will compile the operations that are being built."""
  graph = ops.get_default_graph()
  return _is_xla.get() or control_flow_util.GraphOrParentsInXlaContext(graph)


# On a CPU, XLA sums a tensor one number after another, and each addition waits
# for the previous one. So a tensor is first split into eight parts, which are
# added with vector instructions on all cores. (Sixteen parts are slow on old
# CPUs.) The bits of TensorFlow's own sums depend on the number of cores.
_PARTS = 8

# XLA passes sums of at least _MOST numbers to the library YNNPACK, so `_sum`
# splits longer tensors. In TF 2.21, two threads that prepare such sums write to
# one list without a lock (`EmitYnnFusionBuilder`), which crashed about one
# training process in a thousand in its first step.
_MOST = 4096


@fused
def _sum(x):
  while x.shape[0] >= _MOST:
    x = tf.pad(x, [[0, -x.shape[0] % _PARTS]])
    x = functools.reduce(tf.add, tf.unstack(tf.reshape(x, [_PARTS, -1])))
  return tf.reduce_sum(x)


def fused_sum(fn: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  """Compiles the sum of an element-wise function's result, [] float32.

  The sum has the same bits on any number of cores. Decorate module-level
  functions, as with `fused`.
  """

  @fused
  @functools.wraps(fn)
  def part(*args: object) -> tf.Tensor:
    x = fn(*args)
    parts = _PARTS if x.shape.num_elements() % _PARTS == 0 else 1
    return tf.reduce_sum(tf.reshape(x, [parts, -1]), 0)

  @functools.wraps(fn)
  def call(*args: object) -> tf.Tensor:
    if in_xla_computation():
      return tf.reduce_sum(fn(*args))
    return _sum(part(*args))

  return call
