# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Several training steps of one pod of TPUs, in one call into the session.

host -> device    batches of all steps, and the numbers that go with them
device            step after step, microbatch after microbatch
device -> host    metrics of all steps
"""

import dataclasses
from collections.abc import Callable

from palm_mtf._tf import tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.mesh.tpu.lowering import TpuLowering
from palm_mtf.programs.pod import Pod, PodBuilder, Update

# A small model's step takes as long as it takes to call it. Several pods hear
# of each other between two steps, over their hosts: they have no loop.


@dataclasses.dataclass(frozen=True)
class LoopProgram:
  """Several training steps in one call; the step is fed as for one of them."""

  # Feed the rows of each round, a microbatch of a step, by name: [rounds,
  # batch, length]. Steps that are not run are fed anything, and give anything.
  features: dict[str, tf.Tensor]
  max_steps: int
  num_steps: tf.Tensor  # feed how many to run, [] int32
  # Number of steps that were run, [] int32. A step that is not finite is the
  # last one, and changes nothing; is_finite, [] bool, is of that last one.
  num_done: tf.Tensor
  is_finite: tf.Tensor
  metrics: dict[str, tf.Tensor]  # as in TrainProgram, [steps] float32 each


def lower_loop(
  lowering: TpuLowering,
  builder: PodBuilder,
  pod: Pod,
  update: Update,
  metrics_of: Callable[..., dict[str, tf.Tensor]],
  mesh_layout: MeshLayout,
) -> LoopProgram:
  """Lowers the steps of a pod, of which one step was lowered before.

  Args:
    lowering: lowering of the pod's graph.
    builder: builder of the pod.
    pod: A of the pod.
    update: B of the pod.
    metrics_of: returns metrics by name, [steps] each, of the values of
      `update.fetched` and of the learning rate, [steps] each.
    mesh_layout: says how many steps and microbatches there are.
  """
  every = mesh_layout.num_microbatches
  with tf.device(pod.placement.host):
    num_steps = tf.placeholder(tf.int32, [], "num_steps")
    features, numbers = _fed(builder, pod, mesh_layout)
  # A round is a microbatch of a step.
  rounds = {x.name: features[name] for name, x in pod.features.items()}
  rounds |= {x.name: numbers[name] for name, x in pod.numbers.items()}
  num_done, found = lowering.loop(
    update.fetched,
    update.operations,
    pod.accumulations,
    rounds=rounds,
    rounds_per_step=every,
    num_steps=num_steps,
  )
  with tf.device(pod.placement.host):
    # The learning rate is that of a step's last microbatch.
    learning_rates = numbers["learning_rate"][every - 1 :: every]
    return LoopProgram(
      features=features,
      max_steps=mesh_layout.steps_per_loop,
      num_steps=num_steps,
      num_done=num_done,
      is_finite=found["is_finite"][num_done - 1],
      metrics=metrics_of(found, learning_rates),
    )


def _fed(
  builder: PodBuilder, pod: Pod, mesh_layout: MeshLayout
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
  """Returns features to feed, and numbers that go with them, of all rounds."""
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
