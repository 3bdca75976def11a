# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The update of a pod's variables, before JAX runs its graph."""

from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.config import OptimizerConfig
from palm_mtf.executors.xla.parts import Given
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.optim.optimizer import rule_of
from palm_mtf.programs.loss_function import LossSums
from palm_mtf.programs.pod import Sums, Update, build_update


class DeviceUpdate:
  """The update of a pod's variables by the optimizer.

  Subclasses have `num_periods` and `apply`.

  Attributes:
    rates: names of the numbers that the optimizer needs for a step.
    variables: all variables of the trained variables' graph and their optimizer
      slots, by name.
    fetched: the metrics that `apply` returns, by name.
    losses: names of the losses in `fetched`.
    sums_of_squares: a SumOfSquares of each variable and of each update, for RMS
      metrics; the tensors are in `fetched`.
  """

  def __init__(
    self,
    placement: XlaPlacement,
    trained: Sequence[mtf.Variable],
    loss_names: Sequence[str],
    optimizer: OptimizerConfig,
    periods: Mapping[int, int] | None = None,
  ):
    """Adds the update of `trained` to their graph.

    Args:
      loss_names: names of the terms of the loss.
      periods: {layer in the graph: number of layers for which it stands}; None
        if each stands for itself.
    """
    mesh = trained[0].mesh
    self._placement, self.rates = placement, rule_of(optimizer).RATES

    def give(name: str, shape: mtf.Shape) -> mtf.Tensor:
      return Given(mesh, name, shape, tf.float32).outputs[0]

    self._gradients = {
      x.name: give(f"{x.name}/gradient", x.shape) for x in trained
    }
    scalar = mtf.Shape([])
    self._given = {
      name: give(name, scalar) for name in (*loss_names, "weight", *self.rates)
    }
    losses = LossSums(
      {name: self._given[name] for name in loss_names}, self._given["weight"]
    )
    with tf.Graph().as_default():
      update = build_update(
        trained,
        Sums(losses, [*self._gradients.values()]),
        [self._given[x] for x in self.rates],
        optimizer,
        meshes=[mesh],
        periods=periods,
      )
    self.variables = {x.name: x for x in mesh.graph.all_variables}
    self.fetched, self.losses = update.fetched, [*update.losses]
    self.sums_of_squares = [
      y for x in update.operations for y in x.sums_of_squares
    ]
    self._build_functions(update)

  def _build_functions(self, update: Update) -> None:
    """Makes the functions that `apply` calls."""
    raise NotImplementedError
