# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs programs for TPUs on a CPU.

`tf.tpu.replicate` builds one device's part, which the TPU's compiler then
compiles for all devices. `simulated` replaces the compiler: it copies every
operation of a part once per device, gives each copy its own inputs and outputs,
and replaces collectives between the copies by plain TensorFlow. Loops, which
may contain collectives too, are unrolled. The module knows only TensorFlow's
operations, none of palm_mtf.
"""

import numpy as np
from tensorflow.python.framework.function_def_to_graph import (
  function_def_to_graph_def,
)

from palm_mtf._tf import tf

_CLUSTER = "_tpu_replicate"


def simulated(graph: tf.Graph, *max_rounds: int) -> tf.Graph:
  """Returns `graph` rewritten for one CPU, with the same names.

  Args:
    graph: programs for TPUs.
    *max_rounds: largest number of rounds of a loop; of a loop inside a loop.
  """
  definition = graph.as_graph_def()
  functions = tf.GraphDef(library=definition.library)
  with tf.Graph().as_default() as made:
    tf.import_graph_def(functions, name="")  # finds loops inside loops
    for rounds in max_rounds:
      _write_out_loops(definition, rounds)
    assert not any(_is_loop(node) for node in definition.node)
    tf.import_graph_def(_Simulation(definition).definition(), name="")
  return made


def _is_loop(node: tf.NodeDef) -> bool:
  return node.op in ("While", "StatelessWhile") and _CLUSTER in node.attr


def _write_out_loops(definition: tf.GraphDef, max_rounds: int) -> None:
  """Unrolls each loop into `max_rounds` rounds.

  After the loop's condition is false, further rounds keep the values. The next
  call unrolls loops inside loops.
  """
  functions = {
    each.signature.name: each for each in definition.library.function
  }
  nodes, ends = [], {}
  for node in definition.node:
    if not _is_loop(node):
      nodes.append(node)
      continue
    values = [x for x in node.input if not x.startswith("^")]
    for number in range(max_rounds):
      prefix = f"{node.name}/round_{number}"
      parts = []
      for part in ("cond", "body"):
        function = functions[node.attr[part].func.name]
        parts.append(_inline(nodes, function, values, f"{prefix}/{part}", node))
      (is_on,), after = parts
      for i, (old, new) in enumerate(zip(values, after, strict=True)):
        if new == old:
          continue
        chosen = tf.NodeDef(
          name=f"{prefix}/value_{i}", op="SelectV2", input=[is_on, new, old]
        )
        chosen.attr["T"].type = node.attr["T"].list.type[i]
        chosen.attr[_CLUSTER].CopyFrom(node.attr[_CLUSTER])
        nodes.append(chosen)
        values[i] = chosen.name
    ends[node.name] = values
  for node in nodes:
    for i, name in enumerate(node.input):
      source, index = _split(name)
      if source in ends:
        last, _ = _split(ends[source][index or 0])
        node.input[i] = f"^{last}" if index is None else ends[source][index]
  del definition.node[:]
  definition.node.extend(nodes)


def _inline(nodes, function, values, prefix, loop) -> list[str]:
  """Adds the operations of a function; returns the names of its results."""
  definition, flat_names = function_def_to_graph_def(function)
  arguments = [each.name for each in function.signature.input_arg]
  given = dict(zip(arguments, values, strict=True))

  def renamed(name):
    source, index = _split(name)
    if source in given:
      argument, _ = _split(given[source])
      return f"^{argument}" if index is None else given[source]
    here = f"{prefix}/{source}"
    return f"^{here}" if index is None else f"{here}:{index}"

  for node in definition.node:
    if node.name in given:
      continue
    inputs = [renamed(x) for x in node.input]
    node.name = f"{prefix}/{node.name}"
    del node.input[:]
    node.input.extend(inputs)
    node.attr[_CLUSTER].CopyFrom(loop.attr[_CLUSTER])
    nodes.append(node)
  results = [function.ret[each.name] for each in function.signature.output_arg]
  return [renamed(flat_names[x]) for x in results]


class _Simulation:
  """Rewrites one graph."""

  def __init__(self, definition: tf.GraphDef):
    self._nodes = {node.name: node for node in definition.node}
    self._versions, self._library = definition.versions, definition.library
    self._sizes = {
      self._cluster(node): node.attr["num_replicas"].i
      for node in definition.node
      if node.op == "TPUReplicateMetadata"
    }
    self._made = tf.GraphDef()
    self._made.versions.CopyFrom(self._versions)
    self._made.library.CopyFrom(self._library)

  def definition(self) -> tf.GraphDef:
    """Returns the rewritten graph."""
    for node in self._nodes.values():
      if node.op in ("TPUReplicatedInput", "TPUReplicatedOutput"):
        continue
      if node.op == "TPUCompilationResult":
        self._add(node.name, "NoOp", [])
      elif self._cluster(node):
        for replica in range(self._sizes[self._cluster(node)]):
          self._copy(node, replica)
      else:
        copy = self._made.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        copy.attr.pop("_class", None)
        del copy.input[:]
        copy.input.extend(self._outside_inputs(node))
    return self._made

  def _cluster(self, node) -> str:
    return node.attr[_CLUSTER].s.decode() if _CLUSTER in node.attr else ""

  def _outside_inputs(self, node):
    for name in node.input:
      source, index = _split(name)
      found = self._nodes[source]
      if found.op == "TPUReplicatedOutput":
        if index is None:  # ^control: on all copies
          source, _ = _split(found.input[0])
          size = self._sizes[self._cluster(self._nodes[source])]
          yield from (f"^{_name(source, i)}" for i in range(size))
        else:
          inner, inner_index = _split(found.input[0])
          yield f"{_name(inner, index)}:{inner_index}"
      elif cluster := self._cluster(found):
        assert index is None, f"{node.name} reads {name} of {cluster}"
        yield from (f"^{_name(source, i)}" for i in range(self._sizes[cluster]))
      else:
        yield name

  def _inputs(self, node, replica):
    """Returns the inputs of copy `replica` of a node in a cluster."""
    return [self._input(name, replica) for name in node.input]

  def _input(self, name, replica):
    source, index = _split(name)
    found = self._nodes[source]
    if found.op == "TPUReplicatedInput":
      return found.input[replica] if index is not None else f"^{source}"
    if self._cluster(found):
      source = _name(source, replica)
    return f"^{source}" if index is None else f"{source}:{index}"

  def _copy(self, node, replica):
    name = _name(node.name, replica)
    if node.op == "TPUReplicateMetadata":
      self._add(name, "NoOp", self._inputs(node, replica))
    elif node.op in ("CrossReplicaSum", "XlaAllReduce"):
      self._reduce(node, replica, name)
    elif node.op == "XlaReduceScatter":
      self._reduce(node, replica, f"{name}/sum")
      group = self._group(node, replica)
      axis = self._input(node.input[2], replica)
      dtype = node.attr["T"]
      self._add(
        f"{name}/parts",
        "Split",
        [axis, f"{name}/sum"],
        {"T": dtype, "num_split": tf.AttrValue(i=len(group))},
      )
      part = f"{name}/parts:{group.index(replica)}"
      self._add(name, "Identity", [part], {"T": dtype})
    else:
      copy = self._made.node.add()
      copy.CopyFrom(node)
      copy.name, copy.device = name, ""
      for attribute in ("_class", _CLUSTER):
        copy.attr.pop(attribute, None)
      if node.op == "XlaOptimizationBarrier":
        copy.op = "IdentityN"
      if node.op == "Enter":
        frame = node.attr["frame_name"].s.decode()
        copy.attr["frame_name"].s = _name(frame, replica).encode()
      del copy.input[:]
      copy.input.extend(self._inputs(node, replica))

  def _reduce(self, node, replica, name):
    """Returns the sum, or the maximum, over the group that holds a copy."""
    dtype = node.attr["T"]
    terms = [
      self._input(node.input[0], other) for other in self._group(node, replica)
    ]
    if node.op == "XlaAllReduce" and node.attr["reduce_op"].s == b"Max":
      for i, term in enumerate(terms[1:], 1):
        last = i == len(terms) - 1
        so_far = name if last else f"{name}/{i}"
        self._add(so_far, "Maximum", [terms[0], term], {"T": dtype})
        terms[0] = so_far
    else:
      n = tf.AttrValue(i=len(terms))
      self._add(name, "AddN", terms, {"T": dtype, "N": n})

  def _group(self, node, replica):
    """Returns the devices that share a collective with `replica`."""
    source, _ = _split(node.input[1])
    groups = tf.make_ndarray(self._nodes[source].attr["value"].tensor)
    (row,) = np.nonzero((groups == replica).any(axis=1))[0]
    return groups[row].tolist()

  def _add(self, name, op, inputs, attributes=()):
    node = self._made.node.add(name=name, op=op)
    node.input.extend(inputs)
    for key, value in dict(attributes).items():
      node.attr[key].CopyFrom(value)


def _name(name: str, replica: int) -> str:
  return f"{name}__replica_{replica}"


def _split(name: str) -> tuple[str, int | None]:
  """Returns operation and output of an input (None for control inputs)."""
  if name.startswith("^"):
    return name[1:], None
  operation, _, index = name.partition(":")
  return operation, int(index or 0)
