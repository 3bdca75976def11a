# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over pods: what crosses the data-center network in a step.

  pod 0, device i    slice i --------+--> slice i of 0 + slice i of 1
                                      X
  pod 1, device i    slice i --------+--> slice i of 0 + slice i of 1

Each device sends its slice to the device of the same number in every other pod,
and nowhere else; of a slice that several devices have, each its own part of it
(gradient_shards.py). It is an edge of the graph, so TensorFlow begins to send a
gradient as soon as it exists, behind the rest of the backward pass. All pods
add the same numbers in the same order, in float32: their sums are the same to
the bit.
"""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.xla import fused
from palm_mtf.programs.gradient_accumulation import Sums
from palm_mtf.programs.gradient_shards import OwnPart


def sum_in_order(*terms: tf.Tensor) -> tf.Tensor:
  """Returns the sum of all pods' terms, float32."""
  if len(terms) == 2 and terms[0].dtype == tf.float32:
    return terms[0] + terms[1]  # one pass, with nothing to compile
  return _cast_and_added(*terms)


@fused
def _cast_and_added(*terms):
  """Returns the sum of terms, each cast to float32, in one pass."""
  total = tf.cast(terms[0], tf.float32)
  for term in terms[1:]:
    total += tf.cast(term, tf.float32)
  return total


class Exchange(mtf.Operation):
  """Outputs on one pod's mesh, in float32, a sum over all pods."""

  def __init__(
    self,
    terms: Sequence[mtf.Tensor],
    mesh: mtf.Mesh,
    own: OwnPart | None = None,
  ):
    """Adds up `terms`, one from each pod in order, alike in shape and dtype.

    Args:
      terms: to be added up.
      mesh: the pod that the sum is for.
      own: where the terms are own parts, those of this pod.
    """
    super().__init__(list(terms), mesh=mesh, name="exchange")
    self._own = own
    self._outputs = [mtf.Tensor(self, terms[0].shape, tf.float32)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one sum on each device, of slices of as many pods."""
    mesh_impl = lowering.mesh_impl(self)
    # all-reduce within each pod, if its sum is still open
    terms = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
    # device i of every other pod -> device i of this one
    self.lower_sum(lowering, mesh_impl.slicewise(sum_in_order, *terms))

  def lower_sum(self, lowering: mtf.Lowering, total: object) -> None:
    """Lowers where the sum is there, laid out."""
    if self._own:
      total = self._own.whole(lowering.mesh_impl(self), total)
    lowering.set_tensor_lowering(self.outputs[0], total)


def exchanged(terms: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
  """Returns the sum of `terms` on the mesh of each, float32.

  The one term of one pod is returned as it is.

  Args:
    terms: a number on the mesh of each pod, float32.
  """
  if len(terms) == 1:
    return list(terms)
  return [Exchange(terms, x.mesh).outputs[0] for x in terms]


def exchanged_parts(
  terms: Sequence[mtf.Tensor], dtype: tf.DType
) -> list[mtf.Tensor]:
  """Returns what `exchanged` does; no two devices of a pod send the same.

  Args:
    terms: one on the mesh of each pod, of the same shape.
    dtype: dtype of each term, a pod's own too, before it is added.
  """
  if len(terms) == 1:
    return list(terms)
  own = [OwnPart(x, dtype) for x in terms]
  parts = [x.outputs[0] for x in own]
  return [Exchange(parts, x.mesh, x).outputs[0] for x in own]


def exchanged_sums(pods: Sequence[Sums], dtype: tf.DType) -> list[Sums]:
  """Returns for each pod the sums over all pods.

  Args:
    pods: the sums of each.
    dtype: dtype of gradients on their way; the few other numbers are float32.
  """
  token_loss, squares, weights = (
    exchanged(terms)
    for terms in (
      [x.token_loss for x in pods],
      [x.log_z_squares for x in pods],
      [x.weight for x in pods],
    )
  )
  gradients = [
    exchanged_parts(terms, dtype)
    for terms in zip(*(x.gradients for x in pods), strict=True)
  ]
  by_pod = zip(*gradients, strict=True)
  return [
    Sums(*each)
    for each in zip(token_loss, squares, weights, by_pod, strict=True)
  ]
