# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Copies the operations of a mesh's first device for the other devices."""

from palm_mtf._tf import tf

# All devices of a mesh run the same operations, on different tensors. To make
# an operation, TensorFlow's Python code checks and completes the arguments,
# which is slow. A copy skips these checks. With four devices, copying saves
# 10% of the time of a command that trains for two steps.


class OperationCopies:
  """The operations of one device, to copy for the mesh's other devices."""

  def __init__(self, graph: tf.Graph, num_before: int):
    # `make` copies all operations of `graph` except the first `num_before`.
    self._graph = graph
    scope = graph.get_name_scope()
    self._skipped = len(scope) + 1 if scope else 0
    self._templates = [
      (op, op.node_def, op.inputs, op.control_inputs)
      for op in graph.operations[num_before:]
    ]

  def can_be_made(self, device: str) -> bool:
    """Returns whether all operations are on `device` and make no variable."""
    if self._graph.building_function:  # copies would not capture outer tensors
      return False
    # Allow operations without a device: these operations, and their copies, run
    # on the device of the variable that they read.
    places = ("", tf.DeviceSpec.from_string(device).to_string())
    return all(
      node.device in places
      and node.op != "VarHandleOp"
      and "_class" not in node.attr
      for _, node, _, _ in self._templates
    )

  def make(self, device: str, tensors: dict[int, tf.Tensor]) -> dict:
    """Copies the operations; returns {id(original tensor): its copy}.

    Args:
      device: device of the copies.
      tensors: {id(x): y}: the copies read tensor y where the originals read x.
    """
    made = dict(tensors)
    graph = self._graph
    device = tf.DeviceSpec.from_string(device).to_string()
    for op, template, inputs, control_inputs in self._templates:
      node = type(template)()
      node.CopyFrom(template)
      node.device = device if template.device else ""
      node.name = graph.unique_name(template.name[self._skipped :])
      # Do what tf.Graph.create_op does, except for its slow checks.
      with graph._mutation_lock():
        copy = tf.Operation.from_node_def(
          node,
          graph,
          inputs=[made.get(id(x), x) for x in inputs],
          control_inputs=[made.get(id(x), x) for x in control_inputs],
        )
        graph._create_op_helper(copy, compute_device=False)
      # TensorFlow cannot infer these operations' output shapes, so copy them.
      if "PartitionedCall" in template.op or template.op.startswith("Palm"):
        for x, same in zip(copy.outputs, op.outputs, strict=True):
          x.set_shape(same.shape)
      made[id(op)] = copy
      made.update(zip(map(id, op.outputs), copy.outputs, strict=True))
    return made
