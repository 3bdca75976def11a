# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Several training steps of one pod of TPUs, in one call.

  host -> device    the batches of all steps, and the numbers that go with them
  device            step after step, microbatch after microbatch
  device -> host    the metrics of all steps

A small model's step takes as long as it takes to call it. Several pods hear of
each other between two steps, over their hosts: they have no loop.
"""

import dataclasses
from collections.abc import Callable, Mapping

from palm_mtf._tf import mtf, tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.programs.pod import Pod, PodBuilder, Update
from palm_mtf.programs.tpu_program import Asked, TpuLowering


@dataclasses.dataclass(frozen=True)
class LoopProgram:
  """Several training steps in one call; the step is fed as for one of them.

  Attributes:
    features: what to feed, by name, [steps x microbatches, batch, length]; of
      the steps that are not run, anything.
    max_steps: how many there can be.
    num_steps: [], int32: feed how many to run.
    num_done: [], int32: how many were. A step whose losses are infinite or no
      number is the last one, and changes nothing.
    metrics: metrics of each step, [steps] float32 each, named by TrainProgram;
      of those that were not run, anything.
  """

  features: dict[str, tf.Tensor]
  max_steps: int
  num_steps: tf.Tensor
  num_done: tf.Tensor
  metrics: dict[str, tf.Tensor]


def lower_loop(
  builder: PodBuilder,
  pod: Pod,
  update: Update,
  tensors: Mapping[str, mtf.Tensor],
  metrics_of: Callable[..., dict[str, tf.Tensor]],
  mesh_layout: MeshLayout,
) -> LoopProgram:
  """Lowers the steps of a pod, of which one step was lowered before.

  Args:
    builder: builder of the pod.
    pod: its A.
    update: its B.
    tensors: what is fetched of a step, [] float32 each; losses first.
    metrics_of: returns metrics of the values of `tensors`, by name, and of the
      learning rate, [steps] each.
    mesh_layout: how many steps, and microbatches.
  """
  placement, num_steps = pod.placement, mesh_layout.steps_per_loop
  asked = Asked(tensors, update.operations)
  with tf.device(placement.host):
    steps_here = tf.placeholder(tf.int32, [], "num_steps")
    features, numbers = _fed(builder, pod, mesh_layout)
  rounds = {x.name: features[name] for name, x in pod.features.items()}
  rounds |= {x.name: numbers[name] for name, x in pod.numbers.items()}

  def computation() -> tuple[list[tf.Tensor], tf.Operation]:
    steps = placement.fed([steps_here] * placement.size)

    def body(i, is_finite, found):
      del is_finite
      here = _step(pod, asked, rounds, mesh_layout.num_microbatches, i)
      is_row = tf.equal(tf.range(num_steps), i)[:, None]
      return [
        i + 1,
        tf.reduce_all(tf.math.is_finite(here[: len(update.losses)])),
        tf.where_v2(is_row, here, found),
      ]

    num_done, _, found = placement.loop(
      lambda i, is_finite, _: tf.logical_and(i < steps, is_finite),
      body,
      [
        tf.constant(0),
        tf.constant(True),
        tf.zeros([num_steps, asked.num_numbers]),
      ],
    )
    return [num_done, found], tf.no_op()

  (num_done, found), _ = placement.replicate(computation)
  with tf.device(placement.host):  # device -> host
    of_steps = tf.unstack(tf.identity(found[0]), axis=1)
    every = mesh_layout.num_microbatches
    learning_rates = numbers["learning_rate"][every - 1 :: every]
    return LoopProgram(
      features=features,
      max_steps=num_steps,
      num_steps=steps_here,
      num_done=tf.identity(num_done[0]),
      metrics=metrics_of(asked.named(of_steps), learning_rates),
    )


def _fed(
  builder: PodBuilder, pod: Pod, mesh_layout: MeshLayout
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
  """Returns, of all rounds, what to feed, and the numbers that go with it.

  A round is a microbatch of a step.
  """
  num_microbatches = mesh_layout.num_microbatches
  num_rounds = mesh_layout.steps_per_loop * num_microbatches
  features = {
    name: tf.placeholder(x.dtype, [num_rounds, *x.shape])
    for name, x in pod.features.items()
  }
  of_rounds = []
  for number in range(num_rounds):
    i, j = divmod(number, num_microbatches)
    of_rounds.append(
      builder.numbers(pod.index, builder.step + i, tf.constant(j))
    )
  numbers = {
    name: tf.stack([each[name] for each in of_rounds]) for name in pod.numbers
  }
  return features, numbers


def _step(
  pod: Pod,
  asked: Asked,
  rounds: Mapping[str, tf.Tensor],
  num_microbatches: int,
  i: tf.Tensor,
) -> tf.Tensor:
  """Lowers step i of the loop; returns its numbers."""
  placement, last = pod.placement, num_microbatches - 1

  def accumulate(j: tf.Tensor) -> list[tf.Tensor]:
    with placement.in_round(rounds, i * num_microbatches + j):
      TpuLowering(pod.mesh, placement, pod.accumulations)
    return [j + 1]

  if last:
    placement.loop(lambda j: j < last, accumulate, [tf.constant(0)])
  with placement.in_round(rounds, i * num_microbatches + last):
    return asked.numbers(TpuLowering(pod.mesh, placement, asked.operations))
