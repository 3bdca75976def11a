# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of one device, copied for another."""

from palm_mtf._tf import tf

# In Python TensorFlow takes long to check and to complete what an operation is
# given. What it found for the first device of a mesh holds for the others,
# which do the same with other tensors.


class OperationCopies:
  """Operations of one device, as templates for those of others."""

  def __init__(self, graph: tf.Graph, num_before: int):
    """Reads the last operations of a graph, those after `num_before`."""
    self._graph = graph
    scope = graph.get_name_scope()
    self._skipped = len(scope) + 1 if scope else 0
    self._templates = [
      (op, op.node_def, op.inputs, op.control_inputs)
      for op in graph.operations[num_before:]
    ]

  def can_be_made(self, device: str) -> bool:
    """Returns whether all of them are of `device`, and make no variable."""
    if self._graph.building_function:  # its body would have to capture tensors
      return False
    # What reads a variable has no device: it runs where the variable is.
    places = ("", tf.DeviceSpec.from_string(device).to_string())
    return all(
      node.device in places
      and node.op != "VarHandleOp"
      and "_class" not in node.attr
      for _, node, _, _ in self._templates
    )

  def make(self, device: str, tensors: dict[int, tf.Tensor]) -> dict:
    """Copies them; returns each copy by the id() of its original.

    Args:
      device: device of the copies.
      tensors: tensors that the copies read, by the id() of the original.
    """
    made = dict(tensors)
    graph = self._graph
    device = tf.DeviceSpec.from_string(device).to_string()
    for op, template, inputs, control_inputs in self._templates:
      node = type(template)()
      node.CopyFrom(template)
      node.device = device if template.device else ""
      node.name = graph.unique_name(template.name[self._skipped :])
      # As tf.Graph.create_op does, without its checks.
      with graph._mutation_lock():
        copy = tf.Operation.from_node_def(
          node,
          graph,
          inputs=[made.get(id(x), x) for x in inputs],
          control_inputs=[made.get(id(x), x) for x in control_inputs],
        )
        graph._create_op_helper(copy, compute_device=False)
      # TensorFlow infers no shapes of calls, nor of the operations of `native`.
      if "PartitionedCall" in template.op or template.op.startswith("Palm"):
        for x, same in zip(copy.outputs, op.outputs, strict=True):
          x.set_shape(same.shape)
      made[id(op)] = copy
      made.update(zip(map(id, op.outputs), copy.outputs, strict=True))
    return made
