# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and its loss, as a training program sees them."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Protocol

from palm_mtf._tf import mtf, tf
from palm_mtf.model.loss import divisor
from palm_mtf.programs.features import Feature

# A mean over the tokens of a step is not the mean of its microbatches' means,
# or of its pods', where their weights differ. So a loss is given as a sum and
# its weight: sums are added up over microbatches (gradient_accumulation.py) and
# over pods (dcn_all_reduce.py), and divided in pod.py.


@dataclasses.dataclass(frozen=True)
class LossSums:
  """Sums over the rows of a microbatch, [] float32 each, on one mesh."""

  # By the names of their metrics; "loss" is first. Training minimizes the sum
  # of all terms.
  terms: Mapping[str, mtf.Tensor]
  weight: mtf.Tensor  # what sums over all rows of a step are divided by

  @property
  def total(self) -> mtf.Tensor:
    """The sum that training minimizes, [] float32."""
    return functools.reduce(operator.add, self.terms.values())

  @property
  def mean_loss(self) -> mtf.Tensor:
    """The first term over the weight, [] float32."""
    return self.terms["loss"] / divisor(self.weight)


class LossFunction(Protocol):
  """A model and its loss.

  Attributes:
    features: features of a microbatch, by name.
  """

  features: Mapping[str, Feature]

  def sums(
    self,
    mesh: mtf.Mesh,
    batch: Mapping[str, mtf.Tensor],
    dropout_state: tf.Tensor,
  ) -> LossSums:
    """Makes the model's variables on a mesh, and its loss.

    Args:
      mesh: mesh of one pod; each pod has one of its own.
      batch: the features of a microbatch, on the mesh.
      dropout_state: number of steps done before, number of the microbatch's
        first row in the batch of all pods, and whether to drop, [3] int32.
    """
