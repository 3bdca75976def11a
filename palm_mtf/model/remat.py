# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rematerialization: activations computed again instead of kept.

A part of the model that is wrapped in `recomputed` keeps its inputs alone. Its
gradient begins with a second run of its operations, the same on the same
numbers, so that memory changes and no bit of the result does. REMAT chooses the
parts:

  none       keeps everything
  attention  computes attention again from q, k and v, whose weights are the one
             activation that grows with length ** 2; no product with a parameter
             is computed twice (PaLM 8B and 62B; PaLM Appendix B, Table 22)
  layer      computes the whole block again from the residual stream before it,
             the one activation that a layer keeps (PaLM 540B; PaLM 4). Table 22
             counts 75% of the products with parameters as computed twice; here
             it is the 65% that gradients need, for the last product of each
             branch has no use in them.
"""

from collections.abc import Callable, Sequence

from palm_mtf._tf import mtf


class _After(mtf.Operation):
  """Outputs its first input once the second is there.

  Mesh TensorFlow's own recompute_grad ties the two by adding a tiny multiple of
  the second, which may change bits. Without a tie TensorFlow would recompute
  at once, or find that it has the same values already and keep those.
  """

  def __init__(self, x: mtf.Tensor, signal: mtf.Tensor):
    super().__init__([x, signal], name="after")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to an identity of each slice that waits for the signal."""
    x, signal = (lowering.tensors[each] for each in self.inputs)
    value = lowering.mesh_impl(self).after(x, signal)
    lowering.set_tensor_lowering(self.outputs[0], value)


def recomputed(
  fn: Callable[..., mtf.Tensor], inputs: Sequence[mtf.Tensor]
) -> mtf.Tensor:
  """Returns fn(*inputs), whose gradient runs `fn` again.

  Args:
    fn: returns one tensor; may read variables and other tensors, which it
      does not keep.
    inputs: what is kept of it.
  """

  def gradient(
    explicit_inputs, all_inputs, forward_operations, outputs, output_grads
  ):
    (dy,) = output_grads
    mapping = {x: x for x in all_inputs}
    for x in explicit_inputs:
      mapping[x] = _After(x, dy).outputs[0]
    xs = [mapping[x] for x in all_inputs]
    operations, mapping = dy.graph.clone_operations(forward_operations, mapping)
    ys = [mapping[y] for y in outputs]
    return mtf.gradients(ys, xs, grad_ys=[dy], operations=operations)

  return mtf.custom_gradient(fn, gradient, list(inputs))
