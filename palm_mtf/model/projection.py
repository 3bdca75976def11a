# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One matrix product for all kernels that read one tensor.

The kernels q, k, v, wi_gate and wi of a parallel block read the same norm, so
they share one product, x [q | k | v | wi_gate | wi]. This makes the block
faster than a serial block (PaLM, section 2). The backward pass has one product
for the gradients of all kernels, and usually one for the gradient of x.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.model.layers import apply_gate, differentiate_gate, rotate_pairs
from palm_mtf.native import layers as native
from palm_mtf.ops.matmul import is_emulated, matmul
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import native_threads, split_axes
from palm_mtf.ops.xla import fused, in_xla_computation

# The forward pass splits the product, rotates q and k and applies SwiGLU in one
# pass over memory; another such pass computes the product's gradient. Both are
# in C++ (native/projection.h) or, on devices without the C++ operations,
# compiled by XLA.

Angles = tuple[tf.Tensor, tf.Tensor]


# Except in `read_product`, XLA does not compile the two functions below, as its
# copies are slower than TensorFlow's.


def _join_columns(rows, parts):
  return tf.concat([tf.reshape(x, [rows, -1]) for x in parts], 1)


def _split_columns(joined, rows, shapes):
  parts = tf.split(joined, [math.prod(shape) for shape in shapes], 1)
  return [
    tf.reshape(part, [*rows, *shape])
    for part, shape in zip(parts, shapes, strict=True)
  ]


def _rotate(x: tf.Tensor, angles: Angles, num_rows: int) -> tf.Tensor:
  # The first `num_rows` dimensions of x, such as [batch, length], index a row.
  # The last one of these is the position, which selects the angle.
  heads = [1] * (x.shape.rank - num_rows - 1)  # [1] if x has heads, else []

  def broadcast(t):
    return tf.reshape(t, [*[1] * (num_rows - 1), t.shape[0], *heads, -1])

  return rotate_pairs(x, *map(broadcast, angles))


def read_product(
  wide: tf.Tensor,
  rows: Sequence[int],
  shapes: Sequence[Sequence[int]],
  angles: Angles,
  is_gated: bool,
) -> tuple[tf.Tensor, ...]:
  """Splits a product into rotated q, rotated k, v and the hidden layer.

  Args:
    wide: product of x with joined kernels, [rows, columns].
    rows: sizes of the dimensions that make up the rows: [batch, length].
    shapes: shape of one row of each part, such as [heads, d_kv] for q.
    angles: sin and cos by which the first two parts, q and k, are rotated,
      [length, d_kv / 2] float32 each; () if no part is rotated.
    is_gated: whether the last two parts are products with wi_gate and wi, which
      become one tensor, swish(x wi_gate) * (x wi).
  """
  parts = _split_columns(wide, rows, shapes)
  if angles:
    parts[:2] = [_rotate(x, angles, len(rows)) for x in parts[:2]]
  return (*parts[:-2], apply_gate(*parts[-2:])) if is_gated else tuple(parts)


_fused_read = fused(read_product)


def kernel_gradient(
  x: tf.Tensor, gradient: tf.Tensor, *, on_cpu: bool
) -> tf.Tensor:
  """Returns x^T gradient, the gradient of joined kernels.

  Args:
    x: [rows, d_model].
    gradient: gradient of x's product, [rows, columns], dtype of x.
    on_cpu: whether the device is a CPU that runs the operations of `native`.
  """
  if on_cpu and x.dtype == tf.bfloat16 and not is_emulated(x):
    # In bfloat16, oneDNN's product is 3% to 16% faster with a transposed copy
    # of x (cheap, because x has few columns); in float32 a copy is slower.
    return matmul(tf.transpose(x), gradient)
  return matmul(x, gradient, transpose_a=True)


@fused
def _rotate_back(xs, angles):
  sin, cos = angles
  return [_rotate(x, (-sin, cos), 2) for x in xs]


@fused
def _gates_gradient(wide, dy):
  columns = dy.shape[-1]
  gate, linear = tf.split(wide[:, -2 * columns :], 2, 1)
  return differentiate_gate(gate, linear, tf.reshape(dy, [-1, columns]))


@dataclasses.dataclass(frozen=True)
class JoinedColumns:
  """Splits a device's product of x with joined kernels; joins gradients."""

  # Shape of each kernel's slice, without d_model.
  shapes: Sequence[Sequence[int]]
  is_gated: bool  # whether the last two kernels are wi_gate and wi
  # Threads per C++ operation; 0 if the device has no C++ operations.
  threads: int

  @property
  def _sizes(self):
    return [math.prod(shape) for shape in self.shapes]

  def read(
    self,
    wide: tf.Tensor,
    rows: Sequence[int],
    angles: Sequence[tf.Tensor],
  ) -> tuple[tf.Tensor, ...]:
    """Splits a product; see `read_product`."""
    if not self.threads:
      return _fused_read(wide, rows, self.shapes, angles, self.is_gated)
    parts = native.read_product(
      wide, self._sizes, angles, is_gated=self.is_gated, threads=self.threads
    )
    return tuple(
      tf.reshape(part, [*rows, *shape])
      # wi_gate and wi have two shapes, but one part, the last.
      for part, shape in zip(parts, self.shapes, strict=False)
    )

  def gradient(
    self,
    wide: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    angles: Sequence[tf.Tensor],
  ) -> tf.Tensor:
    """Returns the gradient of a product from gradients of its parts."""
    rows = wide.shape[0]
    if self.threads:
      return native.read_product_gradient(
        wide,
        [tf.reshape(dy, [rows, -1]) for dy in gradients],
        self._sizes,
        angles,
        is_gated=self.is_gated,
        threads=self.threads,
      )
    gradients = list(gradients)
    if angles:
      gradients[:2] = _rotate_back(gradients[:2], angles)
    if self.is_gated:
      gradients += _gates_gradient(wide, gradients.pop())
    return _join_columns(rows, gradients)


class _Projection(mtf.Operation):
  """Outputs q, k, v, the hidden layer, and the product that gives all these."""

  def __init__(self, x, kernels, positions, angles, is_gated, dtype):
    super().__init__([x, *angles, *kernels], name="projection")
    self.angles, self.kernels = list(angles), list(kernels)
    self.is_gated, self.gradient_dtype = is_gated, dtype
    batch, length, _ = x.shape.dims
    shapes = [
      [batch, place, *kernel.shape.dims[1:]]
      for place, kernel in zip(positions, kernels, strict=True)
    ]
    # `columns` has the columns of whole kernels, although a device's product
    # has only the columns of its slices of the kernels.
    sizes = (x.shape.to_integer_list[1:] for x in kernels)
    columns = mtf.Dimension("columns", sum(map(math.prod, sizes)))
    self.num_read = len(kernels) - is_gated
    self._read_again = None
    self._outputs = [
      mtf.Tensor(self, mtf.Shape(dims), x.dtype, index=i)
      for i, dims in enumerate(
        [*shapes[: self.num_read], [batch, length, columns]]
      )
    ]

  def gradient(self, grad_ys: Sequence[mtf.Tensor | None]) -> list:
    num_angles = len(self.angles)
    gradients = grad_ys[: self.num_read]
    # The kernels are read from self.inputs, because `recomputed` copies this
    # operation with other inputs, but with the same self.kernels.
    x, *kernels = (
      recompute(each, gradients[0])
      for each in (self.inputs[0], *self.inputs[1 + num_angles :])
    )
    dx, *dkernels = _ProjectionGradient(self, x, kernels, gradients).outputs
    return [dx, *[None] * num_angles, *dkernels]

  def recompute(self, x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
    """Returns x (q, k, v or the hidden layer), read from the product again."""
    # The first signal serves all calls, which are in one backward pass.
    if self._read_again is None:
      self._read_again = _ReadAgain(self, signal)
    return self._read_again.outputs[self.outputs.index(x)]

  def columns(self, impl: mtf.MeshImpl) -> JoinedColumns:
    """Returns the columns of a device's product."""
    shapes = [impl.slice_shape(kernel.shape)[1:] for kernel in self.kernels]
    return JoinedColumns(shapes, self.is_gated, native_threads(impl))

  def lower(self, lowering: mtf.Lowering) -> None:
    num_angles = len(self.angles)
    impl = lowering.mesh_impl(self)
    columns = self.columns(impl)

    def apply(x, *others):
      angles, kernels = others[:num_angles], others[num_angles:]
      *rows, d_model = x.shape.as_list()
      x = tf.reshape(x, [-1, d_model])
      wide = matmul(x, _join_columns(d_model, kernels))
      return (*columns.read(wide, rows, angles), wide)

    values = impl.slicewise(apply, *(lowering.tensors[x] for x in self.inputs))
    for output, value in zip(self.outputs, values, strict=True):
      # `set_tensor_lowering` would refuse the product, because its slices do
      # not have the shape of the output's slices.
      lowering.tensors[output] = value


class _ReadAgain(mtf.Operation):
  """Outputs q, k, v and the hidden layer, read from the product again."""

  def __init__(self, forward, signal):
    *read, wide = forward.outputs
    super().__init__([wide, signal, *forward.angles], name="read_again")
    self._forward = forward
    self._outputs = [
      mtf.Tensor(self, y.shape, y.dtype, index=i) for i, y in enumerate(read)
    ]

  def lower(self, lowering: mtf.Lowering) -> None:
    forward, impl = self._forward, lowering.mesh_impl(self)
    wide, signal, *angles = (lowering.tensors[x] for x in self.inputs)
    rows = impl.slice_shape(self.outputs[0].shape)[:2]
    columns = forward.columns(impl)

    def read(wide, *angles):
      return columns.read(wide, rows, angles)

    values = impl.slicewise(read, impl.delay(wide, signal), *angles)
    for output, value in zip(self.outputs, values, strict=True):
      lowering.set_tensor_lowering(output, value)


class _ProjectionGradient(mtf.Operation):
  """Outputs the gradients of x and of each kernel of a projection."""

  def __init__(self, forward, x, kernels, gradients):
    *_, wide = forward.outputs
    super().__init__(
      [x, wide, *forward.angles, *kernels, *gradients],
      name="projection_gradient",
    )
    self._forward = forward
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)] + [
      mtf.Tensor(self, kernel.shape, forward.gradient_dtype, index=i)
      for i, kernel in enumerate(forward.kernels, start=1)
    ]

  def lower(self, lowering: mtf.Lowering) -> None:
    # One matrix product gives the gradients of all kernels. For dx, adjacent
    # kernels that the same mesh axes split share a product.
    forward, impl = self._forward, lowering.mesh_impl(self)
    x, wide, *others = (lowering.tensors[each] for each in self.inputs)
    n, m = len(forward.angles), len(forward.angles) + len(forward.kernels)
    angles, kernels, gradients = others[:n], others[n:m], others[m:]
    is_open = [isinstance(dy, mtf.LazyAllreduceSum) for dy in gradients]
    # `axes` has, for each kernel, the mesh axes over which the kernel's part of
    # dx must be summed. In multi-query attention dk and dv are sums over slices
    # of `heads`, each a LazyAllreduceSum. Instead of dk and dv, their linear
    # functions dx and the kernels' gradients are all-reduced.
    axes = []
    for i, kernel in enumerate(forward.kernels):
      of = min(i, len(gradients) - 1)  # wi_gate and wi share the last gradient
      over = split_axes(impl, kernel.shape.dims[1:])
      over += gradients[of].mesh_axes if is_open[of] else []
      axes.append(tuple(sorted(over)))
    read = forward.columns(impl)
    groups = _columns_by_axes(axes, read.shapes)

    def apply(x, wide, *others):
      angles, kernels, gradients = others[:n], others[n:m], others[m:]
      joined = _join_columns(x.shape[2], kernels)
      gradient = read.gradient(wide, gradients, angles)
      dxs = [
        tf.reshape(
          matmul(gradient[:, columns], joined[:, columns], transpose_b=True),
          x.shape,
        )
        for _, columns in groups
      ]
      rows = tf.reshape(x, [-1, x.shape[2]])
      if in_xla_computation():
        # XLA would give the columns of one product a layout in which it cannot
        # reduce-scatter rows, and would all-reduce whole gradients instead.
        parts = tf.split(gradient, [*map(math.prod, read.shapes)], 1)
        dkernels = [
          tf.reshape(matmul(rows, part, transpose_a=True), [-1, *shape])
          for part, shape in zip(parts, read.shapes, strict=True)
        ]
        return (*dxs, *(tf.cast(x, forward.gradient_dtype) for x in dkernels))
      dkernels = _split_columns(
        kernel_gradient(rows, gradient, on_cpu=bool(read.threads)),
        [x.shape[2]],
        read.shapes,
      )
      return (*dxs, *(tf.cast(x, forward.gradient_dtype) for x in dkernels))

    values = impl.slicewise(
      apply,
      *(x, wide, *angles, *kernels),
      *(
        dy.laid_out_input if opened else dy
        for dy, opened in zip(gradients, is_open, strict=True)
      ),
    )
    dxs, dkernels = values[: len(groups)], values[len(groups) :]
    dxs = [
      _open_sum(impl, dx, over)
      for dx, (over, _) in zip(dxs, groups, strict=True)
    ]
    # Parts of dx with different mesh axes are all-reduced before the addition.
    dx = functools.reduce(
      lambda x, y: impl.slicewise_delay_allreduce(tf.add, x, y), dxs
    )
    lowering.set_tensor_lowering(self.outputs[0], dx)
    of_batch = split_axes(impl, self.inputs[0].shape.dims[:1])
    for output, value, over in zip(
      self.outputs[1:], dkernels, axes, strict=True
    ):
      own = split_axes(impl, output.shape.dims)
      over = sorted({*of_batch, *over}.difference(own))
      lowering.set_tensor_lowering(output, _open_sum(impl, value, over))


def _columns_by_axes(
  axes: Sequence[tuple[int, ...]], shapes: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], slice]]:
  # Groups adjacent kernels that have equal axes. Returns the axes of each
  # group, and the group's columns in a device's product.
  groups, end = [], 0
  for over, run in itertools.groupby(
    zip(axes, shapes, strict=True), key=lambda pair: pair[0]
  ):
    begin, end = end, end + sum(math.prod(shape) for _, shape in run)
    groups.append((over, slice(begin, end)))
  return groups


def _open_sum(impl, x, axes):
  return mtf.LazyAllreduceSum(impl, x, list(axes)) if axes else x


def project(
  x: mtf.Tensor,
  kernels: Sequence[mtf.Tensor],
  positions: Sequence[mtf.Dimension],
  angles: Sequence[mtf.Tensor],
  *,
  is_gated: bool,
  gradient_dtype: tf.DType | None = None,
) -> list[mtf.Tensor]:
  """Multiplies x by several kernels at once; rotates q and k; applies SwiGLU.

  Args:
    x: [batch, length, d_model].
    kernels: [d_model, ...] each, dtype of x.
    positions: dimension of each product's positions, length or memory_length.
    angles, is_gated: see `read_product`.
    gradient_dtype: dtype in which devices add up gradients of kernels; None is
      the dtype of x.

  Returns:
    [batch, position, ...] for each product, dtype of x.
  """
  projection = _Projection(
    x, kernels, positions, angles, is_gated, gradient_dtype or x.dtype
  )
  return projection.outputs[: projection.num_read]
