# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A training step on TPUs: what each pod computes, as programs of XLA.

A program runs on all devices of a pod at once, and ends. One pod does a whole
step in one. Several pods do it in two: what they have to tell each other goes
out of one program, over their hosts, and into the next:

  A       device -> host -> hosts of the other pods
  sum     on the hosts, in the order of the pods, float32
  B       host -> device

The loss of other batches is a program too, and so is a microbatch before the
last. Each lowers what it needs of one Mesh TensorFlow graph, and all of them
have the same variables.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.lowering import Lowered, initialized
from palm_mtf.mesh.tpu_placement import TpuPlacement
from palm_mtf.mesh.tpu_stacked_variables import in_stacks
from palm_mtf.optim.adafactor import AdafactorUpdate
from palm_mtf.programs.dcn_all_reduce import Exchange, sum_in_order
from palm_mtf.programs.pod import Pod, Update


class _Sums(NamedTuple):
  """Sums over pods that are alike in shape and dtype, for one pod.

  Attributes:
    exchanges: whose sums they are.
    stacks: stacks of each device, on its host, [exchanges, slice], float32.
  """

  exchanges: Sequence[Exchange]
  stacks: Sequence[tf.Tensor]


class TpuLowering(mtf.Lowering):
  """Lowers what some tensors and operations of a mesh need, and no more."""

  def __init__(
    self,
    mesh: mtf.Mesh,
    placement: TpuPlacement,
    wanted: Iterable[mtf.Operation],
    sums: Sequence[_Sums] = (),
  ):
    # As in mtf.Lowering, whose constructor lowers all meshes of the graph.
    self.graph, self.mesh_to_impl = mesh.graph, {mesh: placement}
    self.tensors, self.operations = {}, {}
    self.variables = _Variables(placement)
    self._counters = []
    totals = {}
    for each in sums:  # host -> device
      rows = tf.unstack(placement.fed(each.stacks))
      totals |= zip(each.exchanges, rows, strict=True)
    for operation in _needed(mesh, wanted):
      with tf.name_scope(operation.name):
        if isinstance(operation, Exchange):
          total = placement.LaidOutTensor([totals[operation]])
          operation.lower_sum(self, total)
        else:
          operation.lower(self)


class _Variables(dict):
  """The slices of variables, of those too that no tensor leads to."""

  def __init__(self, placement: TpuPlacement):
    super().__init__()
    self._placement = placement

  def __missing__(self, variable: mtf.Variable) -> object:
    return self._placement.LaidOutVariable(variable, self._placement)


def _needed(
  mesh: mtf.Mesh, wanted: Iterable[mtf.Operation]
) -> list[mtf.Operation]:
  """Returns operations and what they need, in order; exchanges need nothing."""
  todo = list(wanted)
  needed = set(todo)
  while todo:
    operation = todo.pop()
    if not isinstance(operation, Exchange):
      before = {x.operation for x in operation.inputs} - needed
      needed |= before
      todo += before
  return [x for x in mesh.graph.operations if x in needed]


def lower_on_tpus(
  pods: Sequence[Pod],
  updates: Sequence[Update],
  tensors: Mapping[str, mtf.Tensor],
  of_forward_pass: Sequence[Mapping[str, mtf.Tensor]],
) -> Lowered:
  """Lowers all pods; see `lower`, which does it for other devices.

  Args:
    pods: A of each.
    updates: B of each.
    tensors: what is fetched of a step, [] float32 each, of the first pod.
    of_forward_pass: what is fetched of the loss of other batches, [] float32
      each, of each pod.
  """
  numbers: dict[str, tf.Tensor] = {}
  accumulations = []
  for pod, asked in zip(pods, of_forward_pass, strict=True):
    numbers |= _run(pod, asked, [])[0]
    accumulations.append(_run(pod, {}, pod.accumulations)[1])
  done = []
  for pod, update, sums in zip(pods, updates, _exchanged(pods), strict=True):
    asked = tensors if pod is pods[0] else {}
    found, operation = _run(pod, asked, update.operations, sums)
    numbers |= found
    done.append(operation)
  with tf.device(pods[0].placement.host):
    losses = tf.stack([numbers[name] for name in updates[0].losses])
    done.append(tf.debugging.check_numerics(losses, "the step").op)
  slices = [pod.placement.slices for pod in pods]
  return Lowered(
    tensors=numbers,
    operations=tf.group(done),
    accumulations=accumulations,
    initialize=initialized(slices),
    slices=slices,
  )


def _run(
  pod: Pod,
  asked: Mapping[str, mtf.Tensor],
  operations: Sequence[mtf.Operation],
  sums: Sequence[_Sums] = (),
) -> tuple[dict[str, tf.Tensor], tf.Operation]:
  """Returns numbers as the first device has them, and what runs all."""
  fetched = Asked(asked, operations)

  def computation():
    lowering = TpuLowering(pod.mesh, pod.placement, fetched.operations, sums)
    done = tf.group([lowering.lowered_operation(x) for x in operations])
    return [fetched.numbers(lowering)] if asked else [], done

  if not fetched.operations:
    return {}, tf.no_op()
  outputs, done = pod.placement.replicate(computation)
  if not asked:
    return {}, done
  with tf.device(pod.placement.host):  # device -> host
    return fetched.named(tf.unstack(tf.identity(outputs[0][0]))), done


class Asked:
  """Numbers that are asked of a program, in one message.

  Where there are any, what the optimizer measures comes with them.

  Attributes:
    operations: what has to be lowered.
  """

  def __init__(
    self,
    tensors: Mapping[str, mtf.Tensor],
    operations: Sequence[mtf.Operation],
  ):
    """Asks for `tensors`, [] float32 each, while `operations` are done."""
    self.operations = [*(x.operation for x in tensors.values()), *operations]
    self._tensors = tensors
    self._measured = [x for x in operations if isinstance(x, AdafactorUpdate)]

  @property
  def num_numbers(self) -> int:
    """How many there are, once the operations have been lowered."""
    measured = sum(len(x.sums_of_squares) for x in self._measured)
    return len(self._tensors) + measured

  def numbers(self, lowering: mtf.Lowering) -> tf.Tensor:
    """Returns what a device has of all of them, [num_numbers]."""
    found = [lowering.export_to_tf_tensor(x) for x in self._tensors.values()]
    found += [x.value for op in self._measured for x in op.sums_of_squares]
    return tf.stack(found)

  def named(self, numbers: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns those of `tensors`; the optimizer is given its own."""
    remaining = iter(numbers)
    found = {name: next(remaining) for name in self._tensors}
    for operation in self._measured:
      operation.sums_of_squares = [
        x._replace(value=next(remaining)) for x in operation.sums_of_squares
      ]
    return found


def _exchanged(pods: Sequence[Pod]) -> list[list[_Sums]]:
  """Runs A of several pods; returns the sums that B of each reads."""
  exchanges = [
    [
      x
      for x in pod.mesh.graph.operations
      if isinstance(x, Exchange) and x.mesh is pod.mesh
    ]
    for pod in pods
  ]
  if not any(exchanges):
    return [[] for _ in pods]
  terms = [
    _terms(pod, [x.inputs[i] for x in exchanges[i]])
    for i, pod in enumerate(pods)
  ]
  sums = []
  for pod, of_pod in zip(pods, exchanges, strict=True):
    sums.append([])
    for alike in terms[0]:
      of_devices = zip(*(x[alike] for x in terms), strict=True)
      stacks = []
      for host, of_pods in zip(pod.placement.hosts, of_devices, strict=True):
        with tf.device(host):  # hosts of the other pods -> host
          stacks.append(sum_in_order(*of_pods))
      sums[-1].append(_Sums([of_pod[i] for i in alike], stacks))
  return sums


def _terms(
  pod: Pod, terms: Sequence[mtf.Tensor]
) -> dict[tuple[int, ...], list[tf.Tensor]]:
  """Runs what terms of exchanges need, on their pod: A of its step.

  Returns:
    Of terms that are alike, by their positions: the stack of their slices on
    each device, on its host. Each message has a price of its own.
  """
  stacks: list[Sequence[int]] = []

  def computation():
    wanted = [x.operation for x in terms]
    lowering = TpuLowering(pod.mesh, pod.placement, wanted)
    parts = [lowering.tensors[x].to_laid_out_tensor().one_slice for x in terms]
    alike = collections.defaultdict(list)
    for i, part in enumerate(parts):
      alike[part.dtype, *part.shape.as_list()].append(i)
    for (dtype, *sizes), positions in alike.items():
      stacks.extend(in_stacks(positions, dtype.size * math.prod(sizes)))
    return [tf.stack([parts[i] for i in x]) for x in stacks], tf.no_op()

  outputs, _ = pod.placement.replicate(computation)
  values = {}
  for positions, of_devices in zip(stacks, outputs, strict=True):
    on_hosts = []
    for host, value in zip(pod.placement.hosts, of_devices, strict=True):
      with tf.device(host):  # device -> host
        on_hosts.append(tf.identity(value))
    values[tuple(positions)] = on_hosts
  return values
