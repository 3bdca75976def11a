# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs programs for TPUs on a CPU: each device's copy, collectives written out.

`tf.tpu.replicate` writes down one device's part, which the TPU's compiler then
makes for all. `simulated` does that here: it copies every operation of a part
as often as there are devices, gives each copy its own inputs and outputs, and
puts plain TensorFlow in place of what the copies tell each other. It knows
TensorFlow's operations, and nothing of ours.
"""

import collections

import numpy as np

from palm_mtf._tf import tf

_CLUSTER = "_tpu_replicate"


def simulated(graph: tf.Graph) -> tf.Graph:
  """Returns a graph with all of `graph` under the same names, for one CPU."""
  definition = graph.as_graph_def()
  return _Simulation(definition).graph()


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

  def graph(self) -> tf.Graph:
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
    with tf.Graph().as_default() as made:
      tf.import_graph_def(self._made, name="")
    return made

  def _cluster(self, node) -> str:
    return node.attr[_CLUSTER].s.decode() if _CLUSTER in node.attr else ""

  def _outside_inputs(self, node):
    for name in node.input:
      source, index = _split(name)
      found = self._nodes[source]
      if found.op == "TPUReplicatedOutput":
        if index is None:  # ^control: of all copies
          source, _ = _split(found.input[0])
          size = self._sizes[self._cluster(self._nodes[source])]
          yield from (f"^{_named(source, i)}" for i in range(size))
        else:
          inner, inner_index = _split(found.input[0])
          yield f"{_named(inner, index)}:{inner_index}"
      elif cluster := self._cluster(found):
        assert index is None, f"{node.name} reads {name} of {cluster}"
        yield from (
          f"^{_named(source, i)}" for i in range(self._sizes[cluster])
        )
      else:
        yield name

  def _inputs(self, node, replica):
    """Returns what copy `replica` of a node of a cluster reads."""
    return [self._input(name, replica) for name in node.input]

  def _input(self, name, replica):
    source, index = _split(name)
    found = self._nodes[source]
    if found.op == "TPUReplicatedInput":
      return found.input[replica] if index is not None else f"^{source}"
    if self._cluster(found):
      source = _named(source, replica)
    return f"^{source}" if index is None else f"{source}:{index}"

  def _copy(self, node, replica):
    name = _named(node.name, replica)
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
        copy.attr["frame_name"].s = _named(frame, replica).encode()
      del copy.input[:]
      copy.input.extend(self._inputs(node, replica))

  def _reduce(self, node, replica, name):
    """Adds up, or takes the greatest of, what the group of a copy has."""
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
    """Returns the devices of a collective among which `replica` is."""
    source, _ = _split(node.input[1])
    groups = tf.make_ndarray(self._nodes[source].attr["value"].tensor)
    (row,) = np.nonzero((groups == replica).any(axis=1))[0]
    return groups[row].tolist()

  def _add(self, name, op, inputs, attributes=()):
    node = self._made.node.add(name=name, op=op)
    node.input.extend(inputs)
    for key, value in dict(attributes).items():
      node.attr[key].CopyFrom(value)


def _named(name: str, replica: int) -> str:
  return f"{name}__replica_{replica}"


def _split(name: str) -> tuple[str, int | None]:
  """Returns the operation and the output that an input names, None: control."""
  if name.startswith("^"):
    return name[1:], None
  operation, _, index = name.partition(":")
  return operation, int(index or 0)


def counts(graph: tf.Graph) -> dict[str, int]:
  """Returns how many operations of each type one device's programs have."""
  return collections.Counter(
    op.type for op in graph.get_operations() if _has_cluster(op)
  )


def _has_cluster(op: tf.Operation) -> bool:
  try:
    return bool(op.get_attr(_CLUSTER))
  except ValueError:
    return False
