# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What every pod computes in a training step, before and after the exchange.

gradients   forward and backward pass of the pod's share of the batch
update      global clipping and Adafactor; the same on all pods
"""

import dataclasses

from palm_mtf._tf import mtf, tf
from palm_mtf.config import AdafactorConfig
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
from palm_mtf.programs.gradient_sums import (
  Accumulate,
  Sums,
  accumulate_sums,
  sum_microbatch,
)
from palm_mtf.programs.loss_function import LossFunction, LossSums


@dataclasses.dataclass(frozen=True)
class Gradients:
  """The gradients of one pod, before the exchange."""

  pod: int
  mesh: mtf.Mesh
  placement: Placement
  features: dict[str, tf.Tensor]  # fed with a microbatch's rows
  copies: list[dict[str, tf.Tensor]]  # of other hosts that import them
  numbers: dict[str, tf.Tensor]  # `PodBuilder.build_numbers` of a microbatch
  losses: LossSums  # of one microbatch
  variables: list[mtf.Variable]  # trained
  sums: Sums  # over the step, read on its last microbatch
  accumulations: list[Accumulate]  # run on each microbatch but the last


@dataclasses.dataclass(frozen=True)
class Update:
  """The update of one pod, after the exchange; numbers are [] float32.

  All pods compute it from the same sums, so that their variables stay equal.
  """

  operations: list[AdafactorUpdate]
  weight: mtf.Tensor  # what the sums and their gradients are divided by
  squares: list[mtf.Tensor]  # sum of squares of each summed gradient
  losses: dict[str, mtf.Tensor]  # terms of the loss, and grad_norm
  is_finite: mtf.Tensor  # whether all losses are finite, bool

  @property
  def fetched(self) -> dict[str, mtf.Tensor]:
    """The numbers of a step that the client fetches, [] each, by name."""
    measured = (x for each in self.operations for x in each.sums_of_squares)
    return {
      **self.losses,
      "is_finite": self.is_finite,
      "weight": self.weight,
      **{f"squares/{i}": x for i, x in enumerate(self.squares)},
      **{f"{x.of}_squares/{x.variable}": x.value for x in measured},
    }


class PodBuilder:
  """Builds gradients and update of each pod in one graph.

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
      no_step = tf.constant(-1, tf.int64)  # if only the loss is fetched
      self.step = tf.placeholder_with_default(no_step, [], "step")
      self.microbatch = tf.placeholder_with_default(0, [], "microbatch")

  def build_gradients(
    self, pod: int, placement: Placement, read: ReadFeatures | None
  ) -> Gradients:
    """Builds forward and backward pass of a pod.

    Args:
      pod: number of the pod.
      placement: its devices.
      read: reads features on hosts where they are not fed; None where all are
        fed.
    """
    mesh = mtf.Mesh(self._graph, f"pod_{pod}")
    # Imported tensors are made on the pod's host, so that the client sends each
    # pod only its own rows.
    with tf.device(placement.cpu):
      by_host = self._make_placeholders(pod, placement, read)
      features_of_host, *copies = by_host.values()
      features = self._loss_function.features
      batch = import_features(mesh, placement, by_host, features)
      numbers = self.build_numbers(pod, self.step, self.microbatch)
      losses = self._loss_function.sums(mesh, batch, numbers["dropout_state"])
      variables = [v for v in self._graph.trainable_variables if v.mesh is mesh]
      sums = sum_microbatch(losses, variables)
      accumulations = []
      if self._num_microbatches > 1:
        sums, accumulations = accumulate_sums(
          sums, variables, numbers["is_first"]
        )
    return Gradients(
      pod,
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

  def _make_placeholders(
    self, pod: int, placement: Placement, read: ReadFeatures | None
  ) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the placeholders of each host that imports, by its name."""
    features = self._loss_function.features
    if read is None:
      return {placement.cpu: placeholders(features)}
    by_host = {}
    for host in placement.reading_cpus:
      with tf.device(host):
        part = pod * self._num_microbatches + self.microbatch
        num_parts = self._num_pods * self._num_microbatches
        values = read(host, self.step, part, num_parts)
        by_host[host] = placeholders(features, values)
    return by_host

  def build_numbers(
    self, pod: int, step: tf.Tensor, microbatch: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    """Returns the numbers that the devices of a pod need for a microbatch.

    Args:
      pod: number of the pod.
      step: number of steps done before, [], int64.
      microbatch: number of the microbatch in the step, [], int32.
    """
    k = tf.cast(step + 1, tf.float32)
    # Dropout is drawn by (SEED, step, row in the whole batch): pods and
    # microbatches do not change it.
    first_row = pod * self._pod_batch_size
    first_row += microbatch * (self._pod_batch_size // self._num_microbatches)
    dropout_state = step, first_row, step >= 0  # in step -1 nothing is dropped
    return {
      "learning_rate": schedule.learning_rate(k, self._optimizer),
      "one_minus_beta2": schedule.one_minus_beta2(k, self._optimizer),
      "is_first": tf.equal(microbatch, 0),
      "dropout_state": tf.stack([tf.cast(x, tf.int32) for x in dropout_state]),
    }

  def build_update(self, gradients: Gradients, sums: Sums) -> Update:
    """Builds the update of a pod from the sums over all pods."""
    optimizer, numbers = self._optimizer, gradients.numbers
    with tf.device(gradients.placement.cpu):
      weight = divisor(sums.losses.weight)
      squares = sums_of_squares(sums.gradients)
      # Sums over the step become means over its tokens.
      losses = {name: x / weight for name, x in sums.losses.terms.items()}
      losses["grad_norm"] = global_norm(squares) / weight
      is_finite = all_finite(list(losses.values()))
      # Gradients stay sums, because they are large: the factor that clips them
      # divides them too.
      clip = clip_factor(losses["grad_norm"], optimizer.gradient_clip)
      scalars = [
        clip / weight,
        mtf.import_tf_tensor(gradients.mesh, numbers["learning_rate"]),
        mtf.import_tf_tensor(gradients.mesh, numbers["one_minus_beta2"]),
      ]
      operations = adafactor_updates(
        gradients.variables, sums.gradients, scalars, is_finite, optimizer
      )
    return Update(operations, weight, squares, losses, is_finite)
