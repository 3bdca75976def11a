# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The check that all pods hold the same bits; a run stops where they do not.

Pods start with the same variables and apply the same updates. If one differs,
its memory, network or processor is at fault.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint, last_good
from palm_mtf.errors import UserError
from palm_mtf.mesh.slices import Slice, names_of
from palm_mtf.ops.xla import fused
from palm_mtf.programs.train_program import TrainProgram


class ReplicaCheck:
  """Compares the variables of a session's pods by their fingerprints."""

  def __init__(
    self,
    session: tf.Session,
    program: TrainProgram,
    newest: Callable[[], Checkpoint | None],
  ):
    # The arguments are those of FiniteCheck.
    self._session = session
    self._newest = newest
    self._variables = names_of(program.slices)
    self._pods = [pod.slices for pod in program.pods]

  def check(self, step: int) -> None:
    """Raises UserError unless all pods are equal after `step` steps."""
    if len(self._pods) == 1:
      return
    numbers = np.stack(self._replica_check())  # [pods, variables]
    differ = np.flatnonzero((numbers != numbers[0]).any(axis=0))
    if not len(differ):
      return
    name = self._variables[differ[0]]
    more = f" (as are {len(differ) - 1} other variables)"
    raise UserError(
      f"{name} is not the same on {_who(numbers[:, differ[0]].tolist())} after "
      f"step {step}{more if len(differ) > 1 else ''}: a pod's memory, network "
      "or processor is at fault. Nothing of it is saved; go on without that "
      f"pod's machine. {last_good(self._newest())}"
    )

  @functools.cached_property
  def _replica_check(self) -> Callable[[], list[np.ndarray]]:
    """Returns the fingerprints of each pod."""
    # Built for the first check, so that the first step does not wait for it.
    with self._session.graph.as_default():
      return self._session.make_callable(
        [build_fingerprints(slices) for slices in self._pods]
      )


def _who(numbers: list[int]) -> str:
  """Returns the pods that differ, those in the minority where there is one."""
  ((most, count),) = collections.Counter(numbers).most_common(1)
  few = [pod for pod, number in enumerate(numbers) if number != most]
  if 2 * count > len(numbers):
    pods = "pods" if len(few) > 1 else "pod"
    return f"{pods} {_listed(few)} as on all others"
  return f"pods {_listed(range(len(numbers)))}"


def _listed(pods) -> str:
  *others, last = map(str, pods)
  return f"{', '.join(others)} and {last}" if others else last


_BITS = {tf.float32: tf.uint32, tf.bfloat16: tf.uint16}


@fused
def _of_slices(x):
  """Returns the fingerprints of the rows of x, [names, elements] -> [names]."""
  # sum over elements i of bits (2 i + 1), mod 2^64
  bits = tf.cast(tf.bitcast(x, _BITS[x.dtype]), tf.int64)
  place = tf.range(x.shape[1], dtype=tf.int64)
  return tf.reduce_sum(bits * (2 * place + 1), axis=1)


def build_fingerprints(slices: Mapping[str, Sequence[Slice]]) -> tf.Tensor:
  """Returns the fingerprint of each variable, [variables], int64.

  Args:
    slices: slices of a pod, in the order of the result.
  """
  # fingerprint = sum over slices s and elements i of
  #                 bits (2 i + 1) (2 s + 1)            mod 2^64
  #
  # Integers have the same sum in any order. Odd factors have inverses: the sum
  # sees any changed element, and two that were exchanged. Each slice is read on
  # the device that holds it, and one integer of each variable leaves it.
  first, *_ = (part for parts in slices.values() for part in parts)
  with tf.device(first.near):
    return tf.concat([_of_variables(x) for x in slices.values()], axis=0)


def _of_variables(parts: Sequence[Slice]) -> tf.Tensor:
  numbers = []
  for index, part in enumerate(parts):
    value = part.read()
    with tf.device(part.near):
      of_names = tf.reshape(value, [len(part.names), -1])
      numbers.append(_of_slices(of_names) * (2 * index + 1))  # index is s
  return tf.add_n(numbers)
