# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What every pod computes of a training step: A before the exchange, B after.

A   forward and backward pass of the pod's share of the batch
B   global clipping and update
"""

import dataclasses

from palm_mtf._tf import mtf, tf
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.mesh.placement import Placement
from palm_mtf.model.loss import divisor
from palm_mtf.optim import schedule
from palm_mtf.optim.adafactor import AdafactorUpdate, adafactor_updates
from palm_mtf.optim.clip import (
  all_finite,
  clip_factor,
  global_norm,
  sums_of_squares,
)
from palm_mtf.programs.features import (
  ReadFeatures,
  import_features,
  placeholders,
)
from palm_mtf.programs.gradient_accumulation import (
  Accumulate,
  Sums,
  accumulated,
  microbatch_sums,
)
from palm_mtf.programs.loss_function import LossFunction, LossSums


@dataclasses.dataclass(frozen=True)
class Pod:
  """A of one pod, as Mesh TensorFlow has it."""

  index: int
  mesh: mtf.Mesh
  placement: Placement
  features: dict[str, tf.Tensor]  # fed with a microbatch's rows
  copies: list[dict[str, tf.Tensor]]  # of other hosts that import them
  numbers: dict[str, tf.Tensor]  # `PodBuilder.numbers` of a microbatch
  losses: LossSums  # of one microbatch
  variables: list[mtf.Variable]  # trained
  sums: Sums  # over the step, read on its last microbatch
  accumulations: list[Accumulate]  # run on each microbatch but the last


@dataclasses.dataclass(frozen=True)
class Update:
  """B of one pod; numbers are [] float32."""

  # All pods compute B from the same sums: so their variables stay the same.

  operations: list[AdafactorUpdate]
  weight: mtf.Tensor  # what the sums and their gradients are divided by
  squares: list[mtf.Tensor]  # sum of squares of each summed gradient
  losses: dict[str, mtf.Tensor]  # terms of the loss, and grad_norm
  is_finite: mtf.Tensor  # whether all losses are, bool

  @property
  def fetched(self) -> dict[str, mtf.Tensor]:
    """What the client reads of a step, [] each, by name."""
    measured = (x for each in self.operations for x in each.sums_of_squares)
    return {
      **self.losses,
      "is_finite": self.is_finite,
      "weight": self.weight,
      **{f"squares/{i}": x for i, x in enumerate(self.squares)},
      **{f"{x.of}_squares/{x.variable}": x.value for x in measured},
    }


class PodBuilder:
  """Builds A and B of each pod.

  Attributes:
    step: number of steps done before, [], int64.
    microbatch: number of the microbatch in the step, [], int32.
  """

  def __init__(
    self,
    loss_function: LossFunction,
    optimizer: AdafactorConfig,
    *,
    pod_batch_size: int,
    num_microbatches: int,
    client: str,
    num_pods: int,
  ):
    self._loss_function, self._optimizer = loss_function, optimizer
    self._num_pods, self._num_microbatches = num_pods, num_microbatches
    self._pod_batch_size = pod_batch_size
    self._graph = mtf.Graph()
    with tf.device(client):
      none = tf.constant(-1, tf.int64)  # the loss of other batches
      self.step = tf.placeholder_with_default(none, [], "step")
      self.microbatch = tf.placeholder_with_default(0, [], "microbatch")

  def pod(
    self,
    index: int,
    placement: Placement,
    read: ReadFeatures | None = None,
  ) -> Pod:
    """Builds A: the sums of pod `index`.

    Args:
      index: number of the pod.
      placement: its devices.
      read: reads what hosts are not fed; None where all is fed.
    """
    mesh = mtf.Mesh(self._graph, f"pod_{index}")
    # What is imported onto the mesh is made beside it: the client sends each
    # pod its own rows alone.
    with tf.device(placement.host):
      fed = self._fed(index, placement, read)
      features_of_host, *copies = fed.values()
      features = self._loss_function.features
      batch = import_features(mesh, placement, fed, features)
      numbers = self.numbers(index, self.step, self.microbatch)
      losses = self._loss_function.sums(mesh, batch, numbers["dropout_state"])
      variables = [v for v in self._graph.trainable_variables if v.mesh is mesh]
      sums = microbatch_sums(losses, variables)
      accumulations = []
      if self._num_microbatches > 1:
        sums, accumulations = accumulated(sums, variables, numbers["is_first"])
    return Pod(
      index,
      mesh,
      placement,
      features_of_host,
      copies,
      numbers,
      losses,
      variables,
      sums,
      accumulations,
    )

  def _fed(
    self,
    index: int,
    placement: Placement,
    read: ReadFeatures | None,
  ) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the placeholders of each host that imports, by its name."""
    features = self._loss_function.features
    if read is None:
      return {placement.host: placeholders(features)}
    # Where nothing is fed, each host reads the rows itself.
    fed = {}
    for host in placement.reading_hosts:
      with tf.device(host):
        part = index * self._num_microbatches + self.microbatch
        values = read(host, self.step, part, self._num_parts)
        fed[host] = placeholders(features, values)
    return fed

  @property
  def _num_parts(self) -> int:
    return self._num_pods * self._num_microbatches

  def numbers(
    self, index: int, step: tf.Tensor, microbatch: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    """Returns the numbers that the devices of a pod need of a microbatch.

    Args:
      index: number of the pod.
      step: number of steps done before, [], int64.
      microbatch: number of the microbatch in the step, [], int32.
    """
    k = tf.cast(step + 1, tf.float32)
    # Dropout is drawn by (SEED, step, row in the whole batch): pods and
    # microbatches do not change it.
    first_row = index * self._pod_batch_size
    first_row += microbatch * (self._pod_batch_size // self._num_microbatches)
    dropout_state = step, first_row, step >= 0  # in step -1 nothing is dropped
    return {
      "learning_rate": schedule.learning_rate(k, self._optimizer),
      "one_minus_beta2": schedule.one_minus_beta2(k, self._optimizer),
      "is_first": tf.equal(microbatch, 0),
      "dropout_state": tf.stack([tf.cast(x, tf.int32) for x in dropout_state]),
    }

  def update(self, pod: Pod, sums: Sums) -> Update:
    """Builds B on one pod, from the sums of all of them."""
    optimizer = self._optimizer
    with tf.device(pod.placement.host):
      weight = divisor(sums.losses.weight)
      squares = sums_of_squares(sums.gradients)
      # Here sums over the step become means over its tokens.
      losses = {name: x / weight for name, x in sums.losses.terms.items()}
      losses["grad_norm"] = global_norm(squares) / weight
      is_finite = all_finite(list(losses.values()))
      # Gradients stay sums, for they are large; their one factor divides them.
      clip = clip_factor(losses["grad_norm"], optimizer.gradient_clip)
      scalars = [
        clip / weight,
        mtf.import_tf_tensor(pod.mesh, pod.numbers["learning_rate"]),
        mtf.import_tf_tensor(pod.mesh, pod.numbers["one_minus_beta2"]),
      ]
      operations = adafactor_updates(
        pod.variables, sums.gradients, scalars, is_finite, optimizer
      )
    return Update(operations, weight, squares, losses, is_finite)
