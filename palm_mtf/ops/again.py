# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of the forward pass that the backward pass computes again.

Norms, rotary embedding, SwiGLU, and kernels cast, gathered and joined cost
little beside the products, and are not kept. Their operations have a method
compute_again(x, signal), which returns their output x, computed once more.
"""

import contextlib
import contextvars
from collections.abc import Iterator

from palm_mtf._tf import mtf


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


_is_kept = contextvars.ContextVar("is_kept", default=False)


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
  """Lets `again` return its tensor: the block was computed again already."""
  token = _is_kept.set(True)
  try:
    yield
  finally:
    _is_kept.reset(token)


def again(x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
  """Returns x for the backward pass, computed again if its operation can.

  Args:
    x: tensor of the forward pass.
    signal: gradient, before which x is not read; any shape.
  """
  if _is_kept.get():
    return x
  return getattr(x.operation, "compute_again", after)(x, signal)
