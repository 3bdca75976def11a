# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lowers Mesh TensorFlow graphs for TPUs: each call is an XLA program.

With one pod, a training step is one program. With several pods it is two
programs, with a sum between them:

  gradients    device -> host -> hosts of the other pods
  sum          on the hosts, in the order of the pods, float32
  update       host -> device
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.exchange import Exchange, sum_in_order
from palm_mtf.mesh.slices import Slice, initialize_all
from palm_mtf.mesh.tpu.placement import TpuPlacement
from palm_mtf.mesh.tpu.stacked_variables import cut_stacks


class _Sums(NamedTuple):
  """Sums over all pods of tensors of one shape, on the hosts of one pod."""

  exchanges: Sequence[Exchange]
  # For each device, on its host: a float32 stack of one slice per exchange.
  stacks: Sequence[tf.Tensor]


class TpuLowering:
  """Lowers each `call` separately; all calls share the variables."""

  def __init__(self, placements: Mapping[mtf.Mesh, TpuPlacement]):
    self._placements = placements

  def call(
    self,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation] = (),
  ) -> tuple[dict[str, tf.Tensor], tf.Operation]:
    """Builds the programs that one session.run runs on all pods."""
    # If gradients are summed over pods, `_sum_over_pods` builds the programs
    # that compute the gradients, and the programs below read the sums.
    wanted = [*(x.operation for x in tensors.values()), *operations]
    sums = self._sum_over_pods(wanted)
    values, done = {}, []
    for mesh in self._placements:
      asked = {name: x for name, x in tensors.items() if x.mesh is mesh}
      here = [x for x in operations if x.mesh is mesh]
      if asked or here:
        found, operation = self._run(mesh, asked, here, sums.get(mesh, ()))
        values |= found
        done.append(operation)
    return values, tf.group(done)

  def loop(
    self,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation],
    accumulations: Sequence[mtf.Operation],
    *,
    rounds: Mapping[str, tf.Tensor],
    rounds_per_step: int,
    num_steps: tf.Tensor,
  ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Builds a program that runs several training steps of one pod.

    A round is the forward and backward pass of one microbatch.

    Args:
      tensors: tensors to fetch in each step, by name, [] float32 or bool. The
        loop ends after the first step in which "is_finite" is false.
      operations: operations of the last round of a step.
      accumulations: operations of each earlier round of a step.
      rounds: {name of a tensor that is imported onto the mesh: the tensor's
        values in all rounds of all steps, [rounds, ...]}.
      rounds_per_step: number of rounds in a step.
      num_steps: number of steps to run, [], int32, on the host.

    Returns:
      The number of steps that ran, [] int32; and {name in `tensors`: values in
      all steps, [steps]}. The values of steps that did not run are undefined.
    """
    ((mesh, placement),) = self._placements.items()
    wanted = [*(x.operation for x in tensors.values()), *operations]
    max_steps = next(iter(rounds.values())).shape[0] // rounds_per_step
    last = rounds_per_step - 1

    def step(i: tf.Tensor) -> tf.Tensor:
      def accumulate(j: tf.Tensor) -> list[tf.Tensor]:
        with placement.import_round(rounds, i * rounds_per_step + j):
          _Program(mesh, placement, accumulations)
        return [j + 1]

      if last:
        placement.loop(lambda j: j < last, accumulate, [tf.constant(0)])
      with placement.import_round(rounds, i * rounds_per_step + last):
        return _pack(_Program(mesh, placement, wanted), tensors)

    # During the loop, host and device exchange nothing: the host sends all
    # inputs before the loop and gets the results after the loop.
    def computation() -> tuple[list[tf.Tensor], tf.Operation]:
      steps_here = placement.feed([num_steps] * placement.size)

      def body(i, is_finite, found):
        del is_finite
        here = step(i)
        is_row = tf.equal(tf.range(max_steps), i)[:, None]
        is_finite = _unpack(tensors, tf.unstack(here))["is_finite"]
        return [i + 1, is_finite, tf.where_v2(is_row, here, found)]

      found = tf.zeros([max_steps, len(tensors)])
      num_done, _, found = placement.loop(
        lambda i, is_finite, _: tf.logical_and(i < steps_here, is_finite),
        body,
        [tf.constant(0), tf.constant(True), found],
      )
      return [num_done, found], tf.no_op()

    (num_done, found), _ = placement.replicate(computation)
    with tf.device(placement.cpu):  # device 0 -> its host
      of_steps = tf.unstack(tf.identity(found[0]), axis=1)
      return tf.identity(num_done[0]), _unpack(tensors, of_steps)

  @property
  def slices(self) -> list[dict[str, list[Slice]]]:
    """For each mesh, {name of a stack: the stack's slices, one per device}."""
    return [placement.slices for placement in self._placements.values()]

  @property
  def initialize(self) -> tf.Operation:
    """Operation that sets every slice to its initial value."""
    return initialize_all(self.slices)

  def _run(
    self,
    mesh: mtf.Mesh,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation],
    sums: Sequence[_Sums],
  ) -> tuple[dict[str, tf.Tensor], tf.Operation]:
    # Builds a pod's program; returns the fetched tensors and the program.
    placement = self._placements[mesh]
    wanted = [*(x.operation for x in tensors.values()), *operations]

    def computation():
      lowering = _Program(mesh, placement, wanted, sums)
      done = tf.group([lowering.lowered_operation(x) for x in operations])
      return [_pack(lowering, tensors)] if tensors else [], done

    outputs, done = placement.replicate(computation)
    if not tensors:
      return {}, done
    with tf.device(placement.cpu):  # device 0 -> its host
      of_first = tf.unstack(tf.identity(outputs[0][0]))
      return _unpack(tensors, of_first), done

  def _sum_over_pods(
    self, wanted: Sequence[mtf.Operation]
  ) -> dict[mtf.Mesh, list[_Sums]]:
    # Builds programs that compute the terms of all sums that `wanted` needs.
    # Returns {mesh of a pod: the sums that the pod's program reads}.
    exchanges = collections.defaultdict(list)
    for operation in _find_needed(wanted):
      if isinstance(operation, Exchange):
        exchanges[operation.mesh].append(operation)
    if not exchanges:
      return {}
    # Every mesh has exchanges of the same terms, in the same order.
    of_any, *_ = exchanges.values()
    terms = [
      self._compute_terms(mesh, [x.inputs[pod] for x in of_any])
      for pod, mesh in enumerate(self._placements)
    ]
    sums = {}
    for mesh, of_mesh in exchanges.items():
      sums[mesh] = []
      cpus = self._placements[mesh].cpus
      for alike in terms[0]:
        of_devices = zip(*(x[alike] for x in terms), strict=True)
        stacks = []
        for cpu, of_pods in zip(cpus, of_devices, strict=True):
          with tf.device(cpu):  # hosts of the other pods -> host
            stacks.append(sum_in_order(*of_pods))
        sums[mesh].append(_Sums([of_mesh[i] for i in alike], stacks))
    return sums

  def _compute_terms(
    self, mesh: mtf.Mesh, terms: Sequence[mtf.Tensor]
  ) -> dict[tuple[int, ...], list[tf.Tensor]]:
    # Computes one pod's terms of all sums over pods, such as gradients. Returns
    # {indices of stacked terms: for each device, on its host, the stack of the
    # device's slices of these terms}.
    placement = self._placements[mesh]
    stacks: list[Sequence[int]] = []

    def computation():
      lowering = _Program(mesh, placement, [x.operation for x in terms])
      # A term that is a LazyAllreduceSum is all-reduced within the pod.
      laid_out = [lowering.tensors[x].to_laid_out_tensor() for x in terms]
      parts = [x.one_slice for x in laid_out]
      # Messages have a fixed cost, so terms of equal shape share a message.
      alike = collections.defaultdict(list)
      for i, part in enumerate(parts):
        alike[part.dtype, *part.shape.as_list()].append(i)
      for (dtype, *sizes), positions in alike.items():
        stacks.extend(cut_stacks(positions, dtype.size * math.prod(sizes)))
      return [tf.stack([parts[i] for i in x]) for x in stacks], tf.no_op()

    outputs, _ = placement.replicate(computation)
    values = {}
    for positions, of_devices in zip(stacks, outputs, strict=True):
      on_hosts = []
      for cpu, value in zip(placement.cpus, of_devices, strict=True):
        with tf.device(cpu):  # device -> host
          on_hosts.append(tf.identity(value))
      values[tuple(positions)] = on_hosts
    return values


class _Program(mtf.Lowering):
  """Lowers only those operations of a mesh that `wanted` needs."""

  def __init__(
    self,
    mesh: mtf.Mesh,
    placement: TpuPlacement,
    wanted: Iterable[mtf.Operation],
    sums: Sequence[_Sums] = (),
  ):
    # mtf.Lowering's constructor is not called, because it lowers all meshes.
    self.graph, self.mesh_to_impl = mesh.graph, {mesh: placement}
    self.tensors, self.operations = {}, {}
    self.variables = _Variables(placement)
    self._counters = []
    totals = {}
    for each in sums:  # host -> device
      rows = tf.unstack(placement.feed(each.stacks))
      totals |= zip(each.exchanges, rows, strict=True)
    for operation in _find_needed(wanted):
      with tf.name_scope(operation.name):
        if isinstance(operation, Exchange):
          total = placement.LaidOutTensor([totals[operation]])
          operation.lower_sum(self, total)
        else:
          operation.lower(self)


class _Variables(dict):
  """The slices of each variable, made when the variable is first read."""

  # An update's variables are not among its inputs, so a program may lower the
  # update before the variables.

  def __init__(self, placement: TpuPlacement):
    super().__init__()
    self._placement = placement

  def __missing__(self, variable: mtf.Variable) -> object:
    return self._placement.LaidOutVariable(variable, self._placement)


def _find_needed(wanted: Iterable[mtf.Operation]) -> list[mtf.Operation]:
  """Returns `wanted` and its dependencies, but not the inputs of exchanges."""
  todo = list(wanted)
  needed = set(todo)
  while todo:
    operation = todo.pop()
    if not isinstance(operation, Exchange):
      before = {x.operation for x in operation.inputs} - needed
      needed |= before
      todo += before
  graphs = {x.graph for x in needed}  # one graph; none if nothing is needed
  return [x for graph in graphs for x in graph.operations if x in needed]


# Messages have a fixed cost, so fetched scalars share one, [tensors] float32.


def _pack(
  lowering: mtf.Lowering, tensors: Mapping[str, mtf.Tensor]
) -> tf.Tensor:
  values = [lowering.export_to_tf_tensor(x) for x in tensors.values()]
  return tf.stack([tf.cast(x, tf.float32) for x in values])


def _unpack(
  tensors: Mapping[str, mtf.Tensor], values: Sequence[tf.Tensor]
) -> dict[str, tf.Tensor]:
  return {
    name: tf.cast(value, x.dtype)
    for (name, x), value in zip(tensors.items(), values, strict=True)
  }
