# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rematerialization: activations computed again instead of kept (REMAT).

none       keeps everything
attention  recomputes attention's weights from q and k, in attention.py; no
           product with a parameter (PaLM 8B and 62B; PaLM Appendix B, Table 22)
layer      recomputes the whole block from the residual stream (PaLM 540B)
"""

from collections.abc import Callable, Sequence

from palm_mtf._tf import mtf

# Attention weights are the one activation that grows with length ** 2. Of a
# layer, Table 22 counts 75% of the products with parameters as recomputed; here
# it is the 65% that gradients need: the last product of a branch has no use in
# them, and TensorFlow leaves out what nothing reads.


class _After(mtf.Operation):
  """Outputs its first input once the second is there."""

  # Mesh TensorFlow's own recompute_grad ties the two by adding a tiny multiple
  # of the second, which may change bits. Without a tie TensorFlow would
  # recompute at once, or find that it has the values already and keep those.

  def __init__(self, x: mtf.Tensor, signal: mtf.Tensor):
    super().__init__([x, signal], name="after")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to an identity of each slice that waits for the signal."""
    x, signal = (lowering.tensors[each] for each in self.inputs)
    value = lowering.mesh_impl(self).after(x, signal)
    lowering.set_tensor_lowering(self.outputs[0], value)


def after(x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
  """Returns x once `signal` is there; both of any shapes."""
  return _After(x, signal).outputs[0]


def recomputed(
  fn: Callable[..., mtf.Tensor], inputs: Sequence[mtf.Tensor]
) -> mtf.Tensor:
  """Returns fn(*inputs), of which only the inputs are kept.

  Args:
    fn: returns one tensor; may read variables and other tensors besides.
    inputs: tensors of any shapes.
  """

  def gradient(
    explicit_inputs, all_inputs, forward_operations, outputs, output_grads
  ):
    (dy,) = output_grads
    mapping = {x: x for x in all_inputs}
    # The second run begins when the gradient arrives, not before. It is of the
    # same operations on the same numbers: no bit of the result changes.
    for x in explicit_inputs:
      mapping[x] = after(x, dy)
    xs = [mapping[x] for x in all_inputs]
    operations, mapping = dy.graph.clone_operations(forward_operations, mapping)
    ys = [mapping[y] for y in outputs]
    return mtf.gradients(ys, xs, grad_ys=[dy], operations=operations)

  return mtf.custom_gradient(fn, gradient, list(inputs))
