# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One matrix product for all kernels that read one norm.

The kernels q, k, v, wi_gate and wi of a parallel block read the same norm, so
they share one product, x [q | k | v | wi_gate | wi]. This makes the block
faster than a serial block (PaLM, section 2). The backward pass has one product
for the gradients of all kernels, and one for the gradient of x, or several if
different mesh axes split the kernels.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import Mlp, Read
from palm_mtf.model.activations import activate
from palm_mtf.model.layers import normalize
from palm_mtf.model.low_rank import LowRanks, join_firsts
from palm_mtf.model.matmul import (
  joined_input_gradient,
  joined_kernel_gradients,
  matmul_joined,
)
from palm_mtf.model.positions import Angles, rotate_pairs
from palm_mtf.native import layers as native
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.recompute import delay_slices, recompute
from palm_mtf.ops.slicewise import native_threads, split_axes
from palm_mtf.ops.xla import fused, in_xla_computation

# One pass over memory splits the product, adds biases, normalizes and rotates q
# and k, and applies the MLP's activation; another computes the gradient of the
# product. Both run in C++ (native/projection.h) for PaLM's block, on devices
# that have the C++ operations; otherwise XLA compiles them.


def _split_columns(joined, rows, shapes):
  # This is not `fused`: TensorFlow copies faster than XLA.
  parts = tf.split(joined, [math.prod(shape) for shape in shapes], 1)
  return [
    tf.reshape(part, [*rows, *shape])
    for part, shape in zip(parts, shapes, strict=True)
  ]


def _broadcast_angles(
  angles: Angles, num_rows: int, num_heads: int
) -> list[tf.Tensor]:
  # Returns angles that broadcast to [*rows, *heads, size / 2]. `rows` stands
  # for `num_rows` dimensions, such as [batch, length]; `heads` stands for
  # `num_heads` dimensions. Angles that all sequences share lack `batch`.
  found = []
  for x in angles:
    for _ in range(num_rows + 1 - x.shape.rank):
      x = x[tf.newaxis]
    for _ in range(num_heads):
      x = x[..., tf.newaxis, :]
    found.append(x)
  return found


def read_product(
  wide: tf.Tensor,
  rows: Sequence[int],
  shapes: Sequence[Sequence[int]],
  read: Read,
  epsilon: float,
  angles: Angles,
  vectors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
  """Splits a joined product; computes q, k, v and an MLP's hidden layer.

  Args:
    wide: product of x with joined kernels, [rows, columns].
    rows: sizes of the dimensions that make up the rows: [batch, length].
    shapes: shape of one row of each part, such as [heads, d_kv] for q.
    read: the branches that read the norm.
    epsilon: NORM_EPSILON, for norms of q and k.
    angles: sin and cos, float32 each: [length, size / 2] or [*rows, size / 2].
    vectors: of each part, the factors of its columns (an adapter's), its bias
      and the scale of its norm, if any, float32.

  Returns:
    q, k and v for an attention branch, and the hidden layer for an MLP.
  """
  parts, given = _split_columns(wide, rows, shapes), iter(vectors)
  read_parts = []
  for x, shape, each in zip(parts, shapes, read.projections, strict=True):
    if each.magnitude in each.vectors:
      x = tf.cast(tf.cast(x, tf.float32) * next(given), x.dtype)
    if each.has_bias:
      x = tf.cast(tf.cast(x, tf.float32) + next(given), x.dtype)
    if form := each.head_norm:
      # `normalize` takes the mean along the last dimension.
      y = tf.reshape(x, [*rows, *([-1] if form.joins_heads else shape)])
      y, scale = normalize(y, form.statistic, epsilon), next(given)
      y = tf.reshape(y, [*rows, *shape])
      if form.scale_offset:
        scale = scale + form.scale_offset
      x = tf.cast(y * scale, x.dtype)
    if each.rotary:
      num_heads = x.shape.rank - len(rows) - 1
      turn = _broadcast_angles(angles, len(rows), num_heads)
      x = rotate_pairs(x, *turn, each.rotary)
    read_parts.append(x)
  found = []
  for branch in read.joined:
    own = [read_parts.pop(0) for _ in branch.inputs]
    is_mlp = isinstance(branch.mixer, Mlp)
    found += [activate(own, branch.mixer.activation)] if is_mlp else own
  return found


def vectors_of(read: Read) -> list[str]:
  """Returns the names of the vectors by which a layer's products change."""
  return [name for each in read.projections for name in each.vectors]


def result_indices(read: Read) -> list[int]:
  """Returns, for each kernel, the index of its result from `read_product`.

  wi_gate and wi have the same index, because both make the hidden layer.
  """
  found, count = [], 0
  for branch in read.joined:
    is_mlp = isinstance(branch.mixer, Mlp)
    found += [count + (0 if is_mlp else i) for i in range(len(branch.inputs))]
    count = found[-1] + 1
  return found


@functools.cache  # so that all layers share the compiled code
def _fused_read(*how):
  # `how` is (rows, shapes, read, epsilon), arguments of `read_product`.
  def read_parts(wide, angles, vectors):
    return read_product(wide, *how, angles, vectors)

  def read_parts_gradient(wide, angles, vectors, gradients):
    # Returns the gradients of `wide` and of the vectors.
    parts = read_parts(wide, angles, vectors)
    return tf.gradients(parts, [wide, *vectors], gradients)

  return fused(read_parts), fused(read_parts_gradient)


@dataclasses.dataclass(frozen=True)
class JoinedColumns:
  """Splits a device's product of x with joined kernels; joins the gradients."""

  shapes: Sequence[Sequence[int]]  # of the kernels' slices, without d_model
  read: Read  # the branches that read the product
  epsilon: float  # NORM_EPSILON
  threads: int  # per C++ operation; 0 if the device has no C++ operations

  @property
  def low_ranks(self) -> LowRanks:
    """The products with the factors of adapted kernels."""
    adapters = [x.low_rank for x in self.read.projections]
    scale = next((x.scale for x in adapters if x), 1.0)
    return LowRanks(self.shapes, [x.rank if x else 0 for x in adapters], scale)

  @property
  def _sizes(self):
    return [math.prod(shape) for shape in self.shapes]

  def split(
    self,
    wide: tf.Tensor,
    rows: Sequence[int],
    angles: Angles,
    vectors: Sequence[tf.Tensor],
  ) -> list[tf.Tensor]:
    """Returns what `read_product` does, computed by C++ if possible."""
    if not self._is_native:
      split, _ = self._fused(rows)
      return list(split(wide, list(angles), list(vectors)))
    parts = native.read_product(
      wide, self._sizes, angles, is_gated=self._is_gated, threads=self.threads
    )
    return [
      tf.reshape(part, [*rows, *shape])
      # C++ returns one part for wi_gate and wi; the last shape is then unused.
      for part, shape in zip(parts, self.shapes, strict=False)
    ]

  def gradient(
    self,
    wide: tf.Tensor,
    rows: Sequence[int],
    gradients: Sequence[tf.Tensor],
    angles: Angles,
    vectors: Sequence[tf.Tensor],
  ) -> list[tf.Tensor]:
    """Returns gradients of `wide` and `vectors` from those of the results."""
    if self._is_native:
      gradient = native.read_product_gradient(
        wide,
        [tf.reshape(dy, [wide.shape[0], -1]) for dy in gradients],
        self._sizes,
        angles,
        is_gated=self._is_gated,
        threads=self.threads,
      )
      return [gradient]
    _, gradient = self._fused(rows)
    return gradient(wide, list(angles), list(vectors), list(gradients))

  def _fused(self, rows: Sequence[int]) -> tuple[Callable, Callable]:
    shapes = tuple(map(tuple, self.shapes))
    return _fused_read(tuple(rows), shapes, self.read, self.epsilon)

  @property
  def _is_gated(self) -> bool:
    mixer = self.read.joined[-1].mixer
    return isinstance(mixer, Mlp) and mixer.is_gated

  @property
  def _is_native(self) -> bool:
    return bool(self.threads) and native.reads(self.read, self.shapes)


class ReadWeights(NamedTuple):
  """The weights that multiply the result of a norm, or values of them."""

  vectors: Sequence[Any]  # see `read_product`
  kernels: Sequence[Any]  # [d_model, ...] each, dtype of x
  # The factors A [d_model, rank] and B [rank, ...] of adapted kernels.
  firsts: Sequence[Any]
  seconds: Sequence[Any]


class _Projection(mtf.Operation):
  """Outputs q, k, v, the hidden layer and, for the gradient, the product.

  If kernels are adapted, the last output is the product with their factors A.
  """

  def __init__(self, x, read, weights, angles, is_trained, epsilon, dtype):
    super().__init__(
      [x, *angles, *itertools.chain(*weights)], name="projection"
    )
    self.is_trained = is_trained  # a bool per kernel
    self.num_angles, self._counts = len(angles), [*map(len, weights)]
    self.weights, self.read = weights, read
    kernels = weights.kernels
    self.epsilon, self.gradient_dtype = epsilon, dtype
    batch, length, _ = x.shape.dims
    # Counts columns of whole kernels; on a device a split kernel has fewer.
    sizes = (x.shape.to_integer_list[1:] for x in kernels)
    columns = mtf.Dimension("columns", sum(map(math.prod, sizes)))
    self.result_of = result_indices(read)
    shapes = {
      part: [
        batch,
        mtf.Dimension(each.positions, length.size),
        *kernel.shape.dims[1:],
      ]
      for part, each, kernel in zip(
        self.result_of, read.projections, kernels, strict=True
      )
    }
    self.num_read = len(shapes)
    self._read_again = None
    kept = [[batch, length, columns]]
    ranks = [x.low_rank.rank if x.low_rank else 0 for x in read.projections]
    if any(ranks):
      kept.append([batch, length, mtf.Dimension("ranks", sum(ranks))])
    self._outputs = [
      mtf.Tensor(self, mtf.Shape(dims), x.dtype, index=i)
      for i, dims in enumerate([*shapes.values(), *kept])
    ]

  @property
  def kept(self) -> list[mtf.Tensor]:
    """The products that the gradient takes."""
    return self.outputs[self.num_read :]

  def cut_inputs(self, values: Sequence) -> tuple:
    """Splits the inputs' values into (x, angles, weights)."""
    x, *others = values
    given = iter(others)
    angles, *weights = (
      list(itertools.islice(given, n)) for n in (self.num_angles, *self._counts)
    )
    return x, angles, ReadWeights(*weights)

  def gradient(self, grad_ys: Sequence[mtf.Tensor | None]) -> list:
    gradients = grad_ys[: self.num_read]
    # Read weights from self.inputs, not self.weights. If REMAT recomputes a
    # layer, this operation is a copy: its inputs are new, its self.weights old.
    x, angles, (vectors, *others) = self.cut_inputs(self.inputs)
    x, *others = (
      recompute(each, gradients[0]) for each in (x, *itertools.chain(*others))
    )
    dx, *others = _ProjectionGradient(
      self, [x, *angles, *vectors, *others], gradients
    ).outputs
    return [dx, *(None for _ in angles), *others]

  def recompute(self, x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
    """Computes the output x, such as q, from the product again."""
    # The first call recomputes all outputs after its `signal`. Later calls are
    # of the same backward pass, so they need not wait for their own `signal`.
    if self._read_again is None:
      self._read_again = _ReadAgain(self, signal)
    return self._read_again.outputs[self.outputs.index(x)]

  def columns(self, impl: mtf.MeshImpl) -> JoinedColumns:
    """Returns which columns of a device's product are q, k, v and so on."""
    shapes = [impl.slice_shape(x.shape)[1:] for x in self.weights.kernels]
    threads = native_threads(impl)
    return JoinedColumns(shapes, self.read, self.epsilon, threads)

  def lower(self, lowering: mtf.Lowering) -> None:
    impl = lowering.mesh_impl(self)
    columns = self.columns(impl)

    def apply(*inputs):
      x, angles, weights = self.cut_inputs(inputs)
      *rows, d_model = x.shape.as_list()
      x = tf.reshape(x, [-1, d_model])
      threads = columns.threads
      kept = [matmul_joined(x, weights.kernels, threads=threads)]
      if weights.firsts:
        kept.append(columns.low_ranks.down(x, weights.firsts))
        kept[0] += columns.low_ranks.up(kept[1], weights.seconds)
      return (*columns.split(kept[0], rows, angles, weights.vectors), *kept)

    values = impl.slicewise(apply, *(lowering.tensors[x] for x in self.inputs))
    for output, value in zip(self.outputs, values, strict=True):
      # `set_tensor_lowering` would refuse the product: a device has only some
      # of the columns, although no layout rule splits `columns`.
      lowering.tensors[output] = value


class _ReadAgain(mtf.Operation):
  """Outputs q, k, v and the hidden layer, computed from the product again."""

  def __init__(self, forward, signal):
    read, wide = forward.outputs[: forward.num_read], forward.kept[0]
    _, angles, (vectors, *_) = forward.cut_inputs(forward.inputs)
    super().__init__([wide, signal, *angles, *vectors], name="read_again")
    self._forward = forward
    self._outputs = [
      mtf.Tensor(self, y.shape, y.dtype, index=i) for i, y in enumerate(read)
    ]

  def lower(self, lowering: mtf.Lowering) -> None:
    forward, impl = self._forward, lowering.mesh_impl(self)
    wide, signal, *others = (lowering.tensors[x] for x in self.inputs)
    rows = impl.slice_shape(self.outputs[0].shape)[:2]
    columns, n = forward.columns(impl), forward.num_angles

    def split(wide, *others):
      return tuple(columns.split(wide, rows, others[:n], others[n:]))

    wide = delay_slices(impl, wide, signal)
    values = impl.slicewise(split, wide, *others)
    for output, value in zip(self.outputs, values, strict=True):
      lowering.set_tensor_lowering(output, value)


class _ProjectionGradient(mtf.Operation):
  """Outputs the gradients of x and of all weights."""

  def __init__(self, forward, inputs, gradients):
    super().__init__(
      [*inputs, *forward.kept, *gradients], name="projection_gradient"
    )
    self._forward = forward
    x, _, (vectors, *others) = forward.cut_inputs(inputs)
    outputs = [
      (x.shape, x.dtype),
      *((each.shape, each.dtype) for each in vectors),
      *((y.shape, forward.gradient_dtype) for y in itertools.chain(*others)),
    ]
    self._outputs = [
      mtf.Tensor(self, shape, dtype, index=i)
      for i, (shape, dtype) in enumerate(outputs)
    ]

  def lower(self, lowering: mtf.Lowering) -> None:
    # One matrix product gives the gradients of all kernels. For dx, adjacent
    # kernels that the same mesh axes split share a product.
    forward, impl = self._forward, lowering.mesh_impl(self)
    n = len(forward.inputs)
    m = n + len(forward.kept)
    values = [lowering.tensors[each] for each in self.inputs]
    inputs, gradients = values[:m], values[m:]
    is_open = [isinstance(dy, mtf.LazyAllreduceSum) for dy in gradients]
    # `axes` has, for each kernel, the mesh axes over which its part of dx must
    # be summed. In multi-query attention dk and dv may be sums that are not yet
    # all-reduced (LazyAllreduceSum). The results (dx, gradients of kernels and
    # vectors) are linear in dk and dv, so all-reduce only the results.
    axes = []
    kernels = forward.weights.kernels
    for of, kernel in zip(forward.result_of, kernels, strict=True):
      over = split_axes(impl, kernel.shape.dims[1:])
      over += gradients[of].mesh_axes if is_open[of] else []
      axes.append(tuple(sorted(over)))
    columns = forward.columns(impl)
    groups = _columns_by_axes(axes, columns.shapes)

    def apply(*values):
      return self._compute(columns, axes, values[:n], values[n:m], values[m:])

    values = impl.slicewise(
      apply,
      *inputs,
      *(
        dy.laid_out_input if opened else dy
        for dy, opened in zip(gradients, is_open, strict=True)
      ),
    )
    dxs = [
      _open_sum(impl, dx, over)
      for dx, (over, *_) in zip(values, groups, strict=False)
    ]
    # Parts of dx with different mesh axes are all-reduced before the addition.
    dx = functools.reduce(
      lambda x, y: impl.slicewise_delay_allreduce(tf.add, x, y), dxs
    )
    lowering.set_tensor_lowering(self.outputs[0], dx)
    of_rows = split_axes(impl, self.inputs[0].shape.dims[:2])
    of_vectors = [
      axes[i]
      for i, each in enumerate(forward.read.projections)
      for _ in each.vectors
    ]
    ranks = columns.low_ranks.ranks
    adapted = [x for x, rank in zip(axes, ranks, strict=True) if rank]
    over_axes = [*of_vectors, *axes, *adapted, *adapted]
    for output, value, over in zip(
      self.outputs[1:], values[len(groups) :], over_axes, strict=True
    ):
      own = split_axes(impl, output.shape.dims)
      over = sorted({*of_rows, *over}.difference(own))
      lowering.set_tensor_lowering(output, _open_sum(impl, value, over))

  def _compute(self, columns, axes, inputs, kept, gradients):
    # Returns the parts of dx, by groups of axes, and the gradients of weights.
    forward, (wide, *low) = self._forward, kept
    x, angles, weights = forward.cut_inputs(inputs)
    gradient, *dvectors = columns.gradient(
      wide, x.shape[:2], gradients, angles, weights.vectors
    )
    rows = tf.reshape(x, [-1, x.shape[2]])
    groups = _columns_by_axes(axes, columns.shapes)
    given, dxs, threads = iter(weights.kernels), [], columns.threads
    for _, own, count in groups:
      dy = gradient if len(groups) == 1 else gradient[:, own]
      kernels = itertools.islice(given, count)
      dxs.append(joined_input_gradient(dy, [*kernels], threads=threads))
    dweights = _kernel_gradients(rows, gradient, columns, forward.is_trained)
    if low:
      low_ranks = columns.low_ranks
      dlow = low_ranks.down_gradient(gradient, weights.seconds)
      firsts = join_firsts(weights.firsts)
      # The same groups, as columns of the joined factors A.
      parts = _columns_by_axes(axes, [[rank] for rank in low_ranks.ranks])
      for i, (_, own, _) in enumerate(parts):
        if own.start < own.stop:
          dxs[i] += matmul(dlow[:, own], firsts[:, own], transpose_b=True)
      ranks = [[rank] for rank in low_ranks.ranks if rank]
      dweights += joined_kernel_gradients(rows, dlow, ranks, threads=threads)
      dweights += low_ranks.up_gradients(*low, gradient)
    dxs = [tf.reshape(dx, x.shape) for dx in dxs]
    dtype = forward.gradient_dtype
    return (*dxs, *dvectors, *(tf.cast(x, dtype) for x in dweights))


def _kernel_gradients(
  rows: tf.Tensor,
  gradient: tf.Tensor,
  columns: JoinedColumns,
  is_trained: Sequence[bool],
) -> list[tf.Tensor]:
  # Returns the gradient of each kernel, given x and the product's gradient.
  if not in_xla_computation():
    # Adjacent kernels share a product if all are trained, or if all are frozen:
    # nothing reads a frozen kernel's gradient, so TensorFlow omits its product.
    found, end, threads = [], 0, columns.threads
    for _, run in itertools.groupby(
      zip(is_trained, columns.shapes, strict=True), key=lambda pair: pair[0]
    ):
      shapes = [shape for _, shape in run]
      begin, end = end, end + sum(map(math.prod, shapes))
      own = (
        gradient if len(shapes) == len(is_trained) else gradient[:, begin:end]
      )
      found += joined_kernel_gradients(rows, own, shapes, threads=threads)
    return found
  # For XLA, compute one product per kernel. XLA would give the columns of a
  # joined product a layout in which it cannot reduce-scatter rows, and would
  # all-reduce whole gradients instead.
  parts = tf.split(gradient, [*map(math.prod, columns.shapes)], 1)
  return [
    tf.reshape(matmul(rows, part, transpose_a=True), [-1, *shape])
    for part, shape in zip(parts, columns.shapes, strict=True)
  ]


def _columns_by_axes(
  axes: Sequence[tuple[int, ...]], shapes: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], slice, int]]:
  # Groups adjacent kernels whose parts of dx are summed over equal mesh axes.
  # Returns each group's axes, its columns in a device's product, and its number
  # of kernels.
  groups, end = [], 0
  for over, run in itertools.groupby(
    zip(axes, shapes, strict=True), key=lambda pair: pair[0]
  ):
    sizes = [math.prod(shape) for _, shape in run]
    begin, end = end, end + sum(sizes)
    groups.append((over, slice(begin, end), len(sizes)))
  return groups


def _open_sum(impl, x, axes):
  return mtf.LazyAllreduceSum(impl, x, list(axes)) if axes else x


def project(
  x: mtf.Tensor,
  read: Read,
  weights: ReadWeights,
  angles: Sequence[mtf.Tensor],
  *,
  is_trained: Sequence[bool],
  epsilon: float,
  gradient_dtype: tf.DType | None = None,
) -> list[mtf.Tensor]:
  """Multiplies x by all kernels of `read` at once; see `read_product`.

  Args:
    x: [batch, length, d_model].
    read: the branches that read x.
    weights: of the kernels of `read`, and of their adapters.
    angles, epsilon: see `read_product`.
    is_trained: for each kernel, whether its gradient is needed.
    gradient_dtype: dtype of gradients, but of vectors'; None is the dtype of x.

  Returns:
    The results of `read_product`, [batch, position, ...] each, dtype of x.
  """
  dtype = gradient_dtype or x.dtype
  if not any(each.rotary for each in read.projections):
    angles = ()
  projection = _Projection(x, read, weights, angles, is_trained, epsilon, dtype)
  return projection.outputs[: projection.num_read]
