# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The exchange of a step: each pod's sums become the sums over all pods."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.exchange import Exchange, OwnPart
from palm_mtf.programs.gradient_accumulation import Sums
from palm_mtf.programs.loss_function import LossSums


def exchanged_sums(pods: Sequence[Sums], dtype: tf.DType) -> list[Sums]:
  """Returns for each pod the sums over all pods.

  Args:
    pods: sums of each pod, on its mesh.
    dtype: dtype of gradients on their way.
  """
  if len(pods) == 1:
    return list(pods)
  # Every device sends its copy of the few other numbers, as float32.
  names = list(pods[0].losses.terms)
  numbers = zip(
    *([*x.losses.terms.values(), x.losses.weight] for x in pods), strict=True
  )
  numbers = [[Exchange(x, y.mesh).outputs[0] for y in x] for x in numbers]
  gradients = zip(*(x.gradients for x in pods), strict=True)
  gradients = [_exchanged_parts(terms, dtype) for terms in gradients]
  *terms, weights = numbers
  return [
    Sums(
      LossSums(dict(zip(names, of_pod, strict=True)), weight),
      list(of_variables),
    )
    for *of_pod, weight, of_variables in zip(
      *terms, weights, zip(*gradients, strict=True), strict=True
    )
  ]


def _exchanged_parts(
  terms: Sequence[mtf.Tensor], dtype: tf.DType
) -> list[mtf.Tensor]:
  """Returns the sum of `terms` on the mesh of each."""
  # No two devices of a pod send the same numbers. A pod's own term is rounded
  # to `dtype` too: all pods add the same numbers.
  own = [OwnPart(x, dtype) for x in terms]
  parts = [x.outputs[0] for x in own]
  return [Exchange(parts, x.mesh, x).outputs[0] for x in own]
