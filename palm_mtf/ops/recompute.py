# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of the forward pass that the backward pass recomputes.

The outputs of norms, rotary embedding and SwiGLU, and kernels that were cast,
gathered and concatenated, are not kept, because recomputing these tensors costs
little compared with the matrix products. The operation of such a tensor x has a
method recompute(x, signal), which recomputes x after `signal` is computed.

REMAT recomputes more:

attention  attention weights from q and k (model/attention.py), but no product
           with a parameter (PaLM 8B and 62B; PaLM Appendix B, Table 22)
layer      the whole block from the residual stream (PaLM 540B)
"""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.xla import set_true


def wait_for(x: tf.Tensor, signal: tf.Tensor | tf.Operation) -> tf.Tensor:
  """Returns a copy of x, of any shape, made only after `signal` is computed."""
  with tf.control_dependencies([signal]):
    return tf.identity(x)


def delay_slices(impl: mtf.MeshImpl, x: Any, signal: Any) -> Any:
  """Delays the slices of x, so that nothing reads them before `signal`."""
  # Mesh TensorFlow's own mesh implementations lack the method `delay`.
  if not hasattr(impl, "delay"):
    return impl.slicewise(wait_for, x, signal)
  return impl.delay(x, signal)


class _Delay(mtf.Operation):
  """Outputs its first input, but only after its second is computed."""

  # Without a dependency, TensorFlow would recompute too early, or would merge
  # the recomputation with the forward pass and keep the values in memory. Mesh
  # TensorFlow's recompute_grad adds a tiny multiple of the second input to the
  # first input, which may change bits.

  def __init__(self, x: mtf.Tensor, signal: mtf.Tensor):
    super().__init__([x, signal], name="after")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    x, signal = (lowering.tensors[each] for each in self.inputs)
    value = delay_slices(lowering.mesh_impl(self), x, signal)
    lowering.set_tensor_lowering(self.outputs[0], value)


def delay(x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
  """Returns x; each device reads it only after `signal`, of any shape."""
  return _Delay(x, signal).outputs[0]


# True while `recomputed` builds gradients of fn's second run. The tensors of
# the second run are already recomputed, so `recompute` returns x itself.
_is_kept = contextvars.ContextVar("is_kept", default=False)


def recompute(x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
  """Returns x for the backward pass; recomputes x if its operation can.

  Args:
    x: tensor of the forward pass.
    signal: gradient of any shape; x is not recomputed or read before `signal`.
  """
  if _is_kept.get():
    return x
  return getattr(x.operation, "recompute", delay)(x, signal)


# Of all activations, only attention weights grow with length ** 2, so REMAT =
# "attention" recomputes these. With "layer", 65% of the products with
# parameters are recomputed, not 75% as in Table 22 of the PaLM paper: no
# gradient reads a branch's last product, and TensorFlow omits what nothing
# reads.


def recomputed(
  fn: Callable[..., mtf.Tensor], inputs: Sequence[mtf.Tensor]
) -> mtf.Tensor:
  """Returns fn(*inputs); only `inputs` are kept for the backward pass.

  Args:
    fn: returns one tensor; may also read variables and other tensors.
  """

  def gradient(all_inputs, forward_operations, outputs, output_grads, **unused):
    (dy,) = output_grads
    # The second run of fn begins once the gradient dy is computed. Both runs
    # have the same operations and inputs, so the results have the same bits.
    mapping = {x: recompute(x, dy) for x in all_inputs}
    xs = [mapping[x] for x in all_inputs]
    operations, mapping = dy.graph.clone_operations(forward_operations, mapping)
    ys = [mapping[y] for y in outputs]
    with set_true(_is_kept):
      return mtf.gradients(ys, xs, grad_ys=[dy], operations=operations)

  inputs = list(inputs)
  output, operations = inputs[0].graph.capture_operations(lambda: fn(*inputs))
  made = {
    y for x in operations if not isinstance(x, mtf.Variable) for y in x.outputs
  }
  read = [
    y
    for x in operations
    for y in x.inputs
    if y not in made and y.dtype.is_floating
  ]
  # mtf.custom_gradient is not used, because it orders the tensors that fn reads
  # by their addresses: each process would have another program, which JAX would
  # not find in its cache of compiled programs.
  all_inputs = list(dict.fromkeys([*inputs, *read]))
  operation = mtf.ops.CustomGradientOperation(
    inputs, all_inputs, [output], gradient, operations
  )
  return operation.outputs[0]
