# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that XLA compiles."""

import functools
import hashlib
from collections.abc import Callable, Sequence

from palm_mtf._tf import (
  atomic_function,
  attr_value_pb2,
  control_flow_util,
  ops,
  tf,
  tf2,
)

# Two functions of TensorFlow are replaced here, for functions of ours alone,
# which their names tell: they are named by content, and a call of one looks for
# no shapes. Other code in the process has TensorFlow as it is.
_OURS = "palm_mtf_"
_from_func_graph = atomic_function.from_func_graph


def _named_by_content(
  name: str, graph: tf.Graph, attrs: dict, *more: object, **named: object
) -> object:
  """Names what XLA compiles by what it computes, where a counter would."""
  # So the compiled code has one name in every session and process, and XLA's
  # cache on disk, where somebody asks for one with --tf_xla_persistent_cache_
  # directory in TF_XLA_FLAGS, is of use.
  if "_XlaMustCompile" in attrs and graph.name.startswith(_OURS):
    content = graph.as_graph_def().SerializeToString(deterministic=True)
    ends = [x.name for x in (*graph.inputs, *graph.outputs)]
    digest = hashlib.sha256(content + repr(ends).encode()).hexdigest()
    name = f"__inference_{graph.name}_{digest[:16]}"
  return _from_func_graph(name, graph, attrs, *more, **named)


atomic_function.from_func_graph = _named_by_content


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
  """Calls a function; infers no shapes in it if it is ours."""
  # The caller, tf2.function, knows them and sets them. To infer them TensorFlow
  # walks through the body and copies a table of all constants of the graph,
  # each time.
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
  """Returns tf2.function(fn), another one for each graph that calls it."""
  # A function keeps what it traced, and with that the graph. So the graph keeps
  # the function, and both are freed together; as the value of a weak key it
  # would keep the key.
  kept = "_functions_of_palm_mtf"

  def ours(*args: object) -> object:
    return fn(*args)

  name = getattr(fn, "__name__", "function")  # a partial has none
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


def fused(fn: Callable[..., object]) -> Callable[..., object]:
  """Compiles an element-wise function of slices into one pass over memory.

  Decorate functions of a module, not closures: all layers that call the same
  function with the same shapes share the compiled code.
  """
  # XLA fuses the element-wise chain, two to four times as fast on a CPU as
  # TensorFlow's op after op; matrix products stay outside, where oneDNN is the
  # faster one.
  compiled = _in_each_graph(fn, jit_compile=True)

  @functools.wraps(fn)
  def call(*args: object) -> object:
    # Within what XLA compiles anyway there is nothing to compile apart.
    return (fn if in_xla_computation() else compiled)(*args)

  return call


@functools.cache
def fused_update(
  fn: Callable[..., Sequence[tf.Tensor]],
) -> Callable[..., tf.Tensor]:
  """Compiles an element-wise function that sets variables, in their memory.

  Args:
    fn: function of a module; takes a list of the variables' values, and
      tensors of which the first has their shape; returns their next values.

  Returns:
    Function of a list of variables and those tensors. It returns a tensor that
    is there once the variables are set.
  """

  # XLA writes a next value over the one before, where nothing else holds that:
  # there is no second copy of the variables, and they stay where they are.
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
  """Builds a function once in a graph; each call of it is one operation.

  Args:
    fn: takes tensors of the same shapes each time.
  """
  return _in_each_graph(fn)


def in_xla_computation() -> bool:
  """Returns whether XLA compiles what is built now, as a program of a TPU."""
  graph = ops.get_default_graph()
  return control_flow_util.GraphOrParentsInXlaContext(graph)


# On a CPU XLA adds up one number after another, each addition waiting for the
# one before. It adds the eight parts of a tensor to one part as many numbers at
# once as the CPU can, and on all cores. (Of sixteen parts older CPUs are slow.)
# TensorFlow's sums would have other bits on another number of cores.
_PARTS = 8

# Sums of so many numbers XLA would give to YNNPACK. In TensorFlow 2.21 two
# threads may prepare one such sum at a time, and both write to a list that no
# lock guards (`EmitYnnFusionBuilder`): a training process in a thousand or so
# ended by a signal in its first step.
_MOST = 4096


@fused
def _sum(x):
  while x.shape[0] >= _MOST:
    x = tf.pad(x, [[0, -x.shape[0] % _PARTS]])
    x = functools.reduce(tf.add, tf.unstack(tf.reshape(x, [_PARTS, -1])))
  return tf.reduce_sum(x)


def fused_sum(fn: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  """Compiles the sum of what an element-wise function returns, [] float32.

  It has the same bits on any number of cores. Decorate functions of a module,
  as with `fused`.
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
