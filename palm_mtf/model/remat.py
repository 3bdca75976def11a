# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rematerialization: activations are recomputed instead of kept (REMAT).

none       keeps all but norms, rotary embedding, SwiGLU and copies of kernels
           (ops/recompute.py)
attention  recomputes attention weights from q and k (attention.py), but no
           product with a parameter (PaLM 8B and 62B; PaLM Appendix B, Table 22)
layer      recomputes the whole block from the residual stream (PaLM 540B)
"""

from collections.abc import Callable, Sequence

from palm_mtf._tf import mtf
from palm_mtf.ops.recompute import keep_all, recompute

# Of all activations, only attention weights grow with length ** 2. If REMAT is
# "layer", Table 22 of the PaLM paper counts 75% of the products with parameters
# as recomputed. Here 65% are, because no gradient reads the last product of a
# branch, and TensorFlow omits operations that nothing reads.


def recomputed(
  fn: Callable[..., mtf.Tensor], inputs: Sequence[mtf.Tensor]
) -> mtf.Tensor:
  """Returns fn(*inputs); only `inputs` are kept for the backward pass.

  Args:
    fn: returns one tensor; may also read variables and other tensors.
    inputs: tensors of any shapes.
  """

  def gradient(all_inputs, forward_operations, outputs, output_grads, **unused):
    (dy,) = output_grads
    # The second run of fn begins once the gradient dy is computed. Both runs
    # have the same operations and inputs, so the results have the same bits.
    mapping = {x: recompute(x, dy) for x in all_inputs}
    xs = [mapping[x] for x in all_inputs]
    operations, mapping = dy.graph.clone_operations(forward_operations, mapping)
    ys = [mapping[y] for y in outputs]
    with keep_all():
      return mtf.gradients(ys, xs, grad_ys=[dy], operations=operations)

  return mtf.custom_gradient(fn, gradient, list(inputs))
