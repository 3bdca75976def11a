# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sends tensors between the meshes of a pipeline; cuts the graph at each send.

One call of the session runs one part of the graph, such as a stage's forward
pass, on a microbatch, so that stages compute different microbatches at the same
time. A tensor that another part reads is kept in a queue on the CPU of the
tensor's device, until a call of the other part takes it. A call may start
before the tensors that it takes exist; it then waits for them. Queues belong to
the session, and end with it.
"""

# TensorFlow's staging areas (Unstage, MapUnstage, MapPeek) could keep tensors
# on GPUs. But a staging operation that waits blocks a thread of the server, and
# TensorFlow cannot cancel it: a client that is killed would leave the thread
# blocked forever. A queue operation that waits blocks no thread, and ends with
# its call.

import collections
from collections.abc import Callable, Iterable, Mapping

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.cpu_gpu import CpuGpuLowering, CpuGpuPlacement, LaidOut
from palm_mtf.mesh.slices import cpu_near


class Send(mtf.Operation):
  """Outputs its input on another mesh, which has the same shape.

  Each device sends its slice to the device with the same index.
  """

  def __init__(self, x: mtf.Tensor, mesh: mtf.Mesh):
    super().__init__([x], mesh=mesh, name="send")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor]:
    """Sends the gradient back to the mesh of the input."""
    return [send(grad_ys[0], self.inputs[0].mesh)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one copy per device; an all-reduce may follow the copy."""
    mesh_impl, x = lowering.mesh_impl(self), lowering.tensors[self.inputs[0]]
    copy = _map_slices(x, lambda x: mesh_impl.slicewise(tf.identity, x))
    if isinstance(copy, mtf.LazyAllreduceSum):
      copy.mesh_impl = mesh_impl
    lowering.set_tensor_lowering(self.outputs[0], copy)


def send(x: mtf.Tensor, mesh: mtf.Mesh) -> mtf.Tensor:
  """Returns x on a mesh; x itself if it is on that mesh already."""
  return x if x.mesh is mesh else Send(x, mesh).outputs[0]


def _map_slices(x: LaidOut, fn: Callable[[LaidOut], LaidOut]) -> LaidOut:
  """Applies `fn` to the slices of x; leaves a pending all-reduce pending."""
  if not isinstance(x, mtf.LazyAllreduceSum):
    return fn(x.to_laid_out_tensor())
  return mtf.LazyAllreduceSum(x.mesh_impl, fn(x.laid_out_input), x.mesh_axes)


def find_parts(
  operations: Iterable[mtf.Operation], first: Mapping[mtf.Operation, int]
) -> dict[mtf.Operation, int]:
  """Numbers the parts of a graph that is cut at each `Send`.

  Args:
    operations: operations in the order in which they were made.
    first: {operation: the earliest part that it may be in}, with at least the
      operations that import features.

  Returns:
    {operation: number of its part}. A Send begins the next part. Operations
    that depend on none of `first` (such as casts of weights) are in no part:
    each part that reads them computes them again.
  """
  parts: dict[mtf.Operation, int] = {}
  for operation in operations:
    numbers = [
      parts[x.operation] + isinstance(operation, Send)
      for x in operation.inputs
      if x.operation in parts
    ]
    if operation in first:
      numbers.append(first[operation])
    if numbers:
      parts[operation] = max(numbers)
  return parts


class StagesLowering(CpuGpuLowering):
  """Lowers a graph that is cut into parts.

  An operation that is in no part must not read a part's tensor, because only
  parts take tensors from queues.
  """

  def __init__(
    self,
    placements: Mapping[mtf.Mesh, CpuGpuPlacement],
    parts: Mapping[mtf.Operation, int],
  ):
    """Lowers all operations; `parts` has the part of each (`find_parts`)."""
    self._parts = parts
    # {(tensor, part that reads it): its value from a queue}. The operations of
    # a part share the value, because a queue gives it only once.
    self._taken: dict[tuple[mtf.Tensor, int], LaidOut] = {}
    # _takes[i] has the tensors that part i takes from queues. _keeps[i] has
    # pairs (another part, operation by which part i queues a tensor for it).
    self._takes, self._keeps = (collections.defaultdict(list) for _ in "12")
    super().__init__(placements)

  def run_part(
    self,
    part: int,
    operations: Iterable[mtf.Operation] = (),
    last: float = float("inf"),
  ) -> tf.Operation:
    """Returns the operation that runs a part for a microbatch.

    Args:
      part: number of the part.
      operations: operations to run if they are in the part.
      last: number of the last part that will run, such as the head's if only
        the loss is computed. Nothing is put into the queues of later parts.
    """
    kept = [keep for taker, keep in self._keeps[part] if taker <= last]
    own = [x for x in operations if self._parts[x] == part]
    return tf.group(
      [*self._takes[part], *kept, *map(self.lowered_operation, own)]
    )

  def lower_operation(self, operation: mtf.Operation) -> None:
    """Lowers an operation, whose inputs from other parts come from queues."""
    part = self._parts.get(operation)
    others = {
      x: self.tensors[x]
      for x in operation.inputs
      # Skip an x that C++ operations do not output, such as attention weights.
      if self._parts.get(x.operation, part) != part and x in self.tensors
    }
    with tf.name_scope(f"{operation.name}/take"):
      self.tensors |= {x: self._take(x, part) for x in others}
    super().lower_operation(operation)
    self.tensors |= others

  def _take(self, x: mtf.Tensor, part: int) -> LaidOut:
    if (x, part) not in self._taken:
      keeps, impl = self._keeps[self._parts[x.operation]], self.mesh_impl(x)

      def take(slices: LaidOut) -> LaidOut:
        taken = []
        for device, each in zip(impl.devices, slices.all_slices, strict=True):
          with tf.device(cpu_near(device)):
            value, keep = pass_by_queue(each)
          keeps.append((part, keep))
          taken.append(value)
        self._takes[part] += taken
        return impl.LaidOutTensor(taken)

      self._taken[x, part] = _map_slices(self.tensors[x], take)
    return self._taken[x, part]


def pass_by_queue(x: tf.Tensor) -> tuple[tf.Tensor, tf.Operation]:
  """Returns x as taken from a queue, and the operation that puts x there."""
  # `unique_name` is enough, because all programs of a session are in one graph.
  name, types = tf.get_default_graph().unique_name("queue"), [x.dtype]
  queue = tf.raw_ops.FIFOQueueV2(component_types=types, shared_name=name)
  (value,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=types)
  value.set_shape(x.shape)
  return value, tf.raw_ops.QueueEnqueueV2(handle=queue, components=[x])
