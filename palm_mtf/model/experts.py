# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The MLPs that the router chooses for each token (Shazeer et al. 2017).

  y = sum over a token's experts e of gate_e MLP_e(x)

Each choice of an expert by a token makes one row, a copy of the token's x. The
rows of an expert are adjacent, so that one matrix product multiplies all rows
of an expert by its kernel. No row is computed for an expert that is full.

On CPUs, rows are sorted by their experts, and there are as many rows as
choices. XLA needs static shapes, so for accelerators each expert gets whole
blocks of rows, the last one filled up with zeros: with blocks of
rows / experts, at most twice as many rows as choices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import Mlp
from palm_mtf.model.activations import activate
from palm_mtf.model.layers import to_rows
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import slice_offset, split_axes
from palm_mtf.ops.xla import fused, in_xla_computation


class Rows(NamedTuple):
  """Where the rows of a device's experts are.

  Attributes:
    token: number of each row's token; of a row without a token, any.
    choice: number of each row's choice, counted over all tokens; -1 for a row
      without a token. Both are [rows], int32.
    place: row of each choice, [tokens, chosen] int32; -1 for a choice without a
      row: of a full expert, or of an expert of another device.
    count: number of experts.
    sizes: number of rows of each expert, then of choices without a row; [count
      + 1] int32. None if rows are in blocks.
    experts: the expert of each block of rows, [blocks] int32; None otherwise.
  """

  token: tf.Tensor
  choice: tf.Tensor
  place: tf.Tensor
  count: int
  sizes: tf.Tensor | None = None
  experts: tf.Tensor | None = None


def find_rows(choice: tf.Tensor, first: tf.Tensor, count: int) -> Rows:
  """Returns the rows of `count` experts, of which `first` is the first.

  `choice` are numbers of experts, or -1, [tokens, chosen] int32; `first` is []
  int32.
  """
  chosen = choice.shape[1]
  expert = tf.reshape(choice, [-1]) - first
  here = (expert >= 0) & (expert < count)
  expert = tf.where_v2(here, expert, count)  # choices without a row come last
  order = tf.argsort(expert, stable=True)
  sizes = tf.math.unsorted_segment_sum(tf.ones_like(expert), expert, count + 1)
  sorted_place = tf.argsort(order)  # of each choice in `order`
  if not in_xla_computation():
    place = tf.where_v2(here, sorted_place, -1)
    place = tf.reshape(place, [-1, chosen])
    return Rows(order // chosen, order, place, count, sizes=sizes)
  num = choice.shape.num_elements()
  size = max(1, num // count)  # of a block
  num_blocks = num // size + count
  blocks = -(-sizes[:count] // size)  # of each expert
  ends = tf.cumsum(blocks)
  begins = tf.concat([(ends - blocks) * size, [0]], 0)
  before = tf.cumsum(sizes, exclusive=True)
  place = tf.gather(begins - before, expert) + sorted_place
  rows = num_blocks * size
  # Choices without a row are written to one more place, which is cut off.
  taken = tf.tensor_scatter_nd_update(
    tf.fill([rows + 1], -1),
    tf.where_v2(here, place, rows)[:, tf.newaxis],
    tf.range(num),
  )[:rows]
  experts = tf.reduce_sum(
    tf.cast(tf.range(num_blocks)[:, tf.newaxis] >= ends, tf.int32), 1
  )
  place = tf.reshape(tf.where_v2(here, place, -1), choice.shape)
  experts = tf.minimum(experts, count - 1)  # blocks at the end may be unused
  token = tf.maximum(taken, 0) // chosen
  return Rows(token, taken, place, count, experts=experts)


def _gather(x: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
  """Returns rows of x, or zeros where `place` is -1, in the dtype of x."""
  found = tf.gather(x, tf.maximum(place, 0))
  return tf.where_v2((place >= 0)[..., tf.newaxis], found, tf.zeros_like(found))


def take_rows(x: tf.Tensor, rows: Rows) -> tf.Tensor:
  """Returns the rows, [rows, size], of tokens x, [tokens, size]."""
  if rows.experts is None:  # every row has a token
    return tf.gather(x, rows.token)
  return _gather(x, tf.where_v2(rows.choice >= 0, rows.token, -1))


def multiply(
  x: tf.Tensor, kernels: tf.Tensor, rows: Rows, *, transpose: bool = False
) -> tf.Tensor:
  """Multiplies each row by its expert's kernel; returns [rows, columns].

  Args:
    x: [rows, inner].
    kernels: [experts, inner, columns], or [experts, columns, inner] if
      `transpose`.
  """
  if rows.experts is not None:
    blocks = tf.reshape(x, [rows.experts.shape[0], -1, x.shape[-1]])
    chosen = tf.gather(kernels, rows.experts)
    y = tf.matmul(blocks, chosen, transpose_b=transpose)
    return tf.reshape(y, [x.shape[0], y.shape[-1]])
  *parts, others = tf.split(x, rows.sizes, num=rows.count + 1)
  columns = kernels.shape[1 if transpose else 2]
  found = [
    matmul(part, kernel, transpose_b=transpose)
    for part, kernel in zip(parts, tf.unstack(kernels), strict=True)
  ]
  # Choices without a row have rows of zeros at the end, so that the number of
  # rows is static.
  found.append(tf.zeros([tf.shape(others)[0], columns], x.dtype))
  y = tf.concat(found, 0)
  y.set_shape([x.shape[0], columns])
  return y


def kernel_gradients(x: tf.Tensor, dy: tf.Tensor, rows: Rows) -> tf.Tensor:
  """Returns the sum over each expert's rows of x^T dy.

  x is [rows, inner] and dy is [rows, columns]; rows without a token are zeros
  in one of them. The result is [experts, inner, columns].
  """
  if rows.experts is not None:
    blocks = [
      tf.reshape(z, [rows.experts.shape[0], -1, z.shape[-1]]) for z in (x, dy)
    ]
    found = tf.cast(tf.matmul(*blocks, transpose_a=True), tf.float32)
    return tf.math.unsorted_segment_sum(found, rows.experts, rows.count)
  parts = [tf.split(z, rows.sizes, num=rows.count + 1)[:-1] for z in (x, dy)]
  return tf.stack(
    [matmul(a, b, transpose_a=True) for a, b in zip(*parts, strict=True)]
  )


@fused
def _add_choices(found, gates):
  # Returns the sum over a token's choices, in their order, [tokens, size]
  # float32. `found` is [tokens, chosen, size], and `gates` [tokens, chosen].
  terms = zip(tf.unstack(found, axis=1), tf.unstack(gates, axis=1), strict=True)
  return sum(tf.cast(y, tf.float32) * gate[:, tf.newaxis] for y, gate in terms)


@fused
def _hidden(wide, mlp):
  return activate(_products(wide, mlp), mlp.activation)


def _products(wide, mlp):
  return tf.split(wide, 2, 1) if mlp.is_gated else [wide]


@fused
def _hidden_gradient(wide, unscaled, gates, mlp):
  # Returns the hidden layer times the gates, the gradient of `wide`, and the
  # gradient of the gates. `unscaled` is the gradient of an expert's result
  # times its kernel wo, for each row; `gates` are [rows] float32.
  products = _products(wide, mlp)
  hidden = activate(products, mlp.activation)
  gates = gates[:, tf.newaxis]
  dgates = tf.reduce_sum(
    tf.cast(hidden, tf.float32) * tf.cast(unscaled, tf.float32), -1
  )
  dhidden = tf.cast(tf.cast(unscaled, tf.float32) * gates, wide.dtype)
  dwide = tf.concat(tf.gradients(hidden, products, dhidden), 1)
  scaled = tf.cast(tf.cast(hidden, tf.float32) * gates, wide.dtype)
  return scaled, dwide, dgates


def sum_experts(
  x: tf.Tensor,
  gates: tf.Tensor,
  choice: tf.Tensor,
  first: tf.Tensor,
  kernels: Sequence[tf.Tensor],
  mlp: Mlp,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the sum of the results of each token's experts on a device.

  Args:
    x: [tokens, d_model], activation dtype.
    gates, choice: factor and number of each token's experts, [tokens, chosen].
    first: number of the device's first expert, [] int32.
    kernels: slices of wi_gate if the MLP has a gate, of wi and of wo; the first
      dimension is that of the device's experts.
    mlp: what an expert computes.

  Returns:
    The sum, [tokens, d_model] in the dtype of x; and the rows' products with
    the first kernels, [rows, columns].
  """
  *inputs, output = kernels
  rows = find_rows(choice, first, output.shape[0])
  wide = multiply(take_rows(x, rows), tf.concat(inputs, 2), rows)
  found = multiply(_hidden(wide, mlp), output, rows)
  y = _add_choices(_gather(found, rows.place), gates)
  return tf.cast(y, x.dtype), wide


class _Experts(mtf.Operation):
  """Outputs y and, for the gradient, the rows' products with the first kernels.

  The second output is [rows, columns] on each device.
  """

  def __init__(
    self,
    x: mtf.Tensor,
    gates: mtf.Tensor,
    choice: mtf.Tensor,
    kernels: Sequence[mtf.Tensor],
    mlp: Mlp,
    gradient_dtype: tf.DType,
  ):
    super().__init__([x, gates, choice, *kernels], name="experts")
    self.mlp, self.gradient_dtype = mlp, gradient_dtype
    self.experts_dim, _, hidden = kernels[0].shape.dims
    columns = mtf.Dimension("columns", hidden.size * (len(kernels) - 1))
    self._outputs = [
      mtf.Tensor(self, x.shape, x.dtype),
      mtf.Tensor(self, mtf.Shape([*choice.shape.dims, columns]), x.dtype, 1),
    ]

  def gradient(self, grad_ys: Sequence[mtf.Tensor | None]) -> list:
    dy, _ = grad_ys
    # self.inputs are new if REMAT recomputes the layer; see `_Projection`.
    x, gates, choice, *kernels = self.inputs
    given = [recompute(each, dy) for each in (x, gates, choice, *kernels)]
    dx, dgates, *dkernels = _ExpertsGradient(self, given, dy).outputs
    return [dx, dgates, None, *dkernels]

  def lower(self, lowering: mtf.Lowering) -> None:
    impl = lowering.mesh_impl(self)

    def apply(first, x, gates, choice, *kernels):
      given = map(to_rows, (x, gates, choice))
      y, wide = sum_experts(*given, first, kernels, self.mlp)
      return tf.reshape(y, x.shape), wide

    y, wide = impl.slicewise(apply, *self.given(lowering, self.inputs))
    y = self.open_sum(impl, y)
    lowering.set_tensor_lowering(self.outputs[0], y)
    # A device has only the rows of its experts, and some of the columns.
    lowering.tensors[self.outputs[1]] = wide

  def given(
    self, lowering: mtf.Lowering, inputs: Sequence[mtf.Tensor]
  ) -> list[Any]:
    """Returns the first expert of each device, and the inputs' slices."""
    first = slice_offset(lowering.mesh_impl(self), self.experts_dim)
    return [first, *(lowering.tensors[x] for x in inputs)]

  def open_sum(self, impl: mtf.MeshImpl, x: Any) -> Any:
    """Returns x, to be summed over devices with other experts or columns."""
    *_, output = self.inputs
    axes = split_axes(impl, output.shape.dims[:2])
    return mtf.LazyAllreduceSum(impl, x, axes) if axes else x


class _ExpertsGradient(mtf.Operation):
  """Outputs the gradients of x, of the gates and of each kernel."""

  def __init__(
    self, forward: _Experts, given: Sequence[mtf.Tensor], dy: mtf.Tensor
  ):
    super().__init__([*given, forward.outputs[1], dy], name="experts_gradient")
    self._forward = forward
    x, gates, _, *kernels = given
    dtype = forward.gradient_dtype
    outputs = [
      *((each.shape, each.dtype) for each in (x, gates)),
      *((each.shape, dtype) for each in kernels),
    ]
    self._outputs = [
      mtf.Tensor(self, shape, dtype, index=i)
      for i, (shape, dtype) in enumerate(outputs)
    ]

  def lower(self, lowering: mtf.Lowering) -> None:
    forward, impl = self._forward, lowering.mesh_impl(self)
    mlp, dtype = forward.mlp, forward.gradient_dtype

    def apply(first, x, gates, choice, *others):
      *kernels, output, wide, dy = others
      rows = find_rows(to_rows(choice), first, output.shape[0])
      dys = take_rows(to_rows(dy), rows)
      unscaled = multiply(dys, output, rows, transpose=True)
      row_gates = tf.gather(tf.reshape(gates, [-1]), tf.maximum(rows.choice, 0))
      hidden, dwide, drow_gates = _hidden_gradient(
        wide, unscaled, row_gates, mlp
      )
      joined = tf.concat(kernels, 2)
      dx = multiply(dwide, joined, rows, transpose=True)
      dx = _gather(dx, rows.place)
      dx = _add_choices(dx, tf.ones(rows.place.shape))
      djoined = kernel_gradients(take_rows(to_rows(x), rows), dwide, rows)
      dgates = _gather(drow_gates[:, tf.newaxis], rows.place)
      return (
        tf.cast(tf.reshape(dx, x.shape), x.dtype),
        tf.reshape(dgates, gates.shape),
        *(tf.cast(z, dtype) for z in tf.split(djoined, len(kernels), 2)),
        tf.cast(kernel_gradients(hidden, dys, rows), dtype),
      )

    values = impl.slicewise(apply, *forward.given(lowering, self.inputs))
    batch = self.inputs[0].shape.dims[:2]
    own = self.outputs[2].shape.dims
    for i, (output, value) in enumerate(zip(self.outputs, values, strict=True)):
      if i < 2:
        value = forward.open_sum(impl, value)
      else:
        over = sorted({*split_axes(impl, batch)} - {*split_axes(impl, own)})
        value = mtf.LazyAllreduceSum(impl, value, over) if over else value
      lowering.set_tensor_lowering(output, value)


def run_experts(
  x: mtf.Tensor,
  gates: mtf.Tensor,
  choice: mtf.Tensor,
  kernels: Sequence[mtf.Tensor],
  mlp: Mlp,
  gradient_dtype: tf.DType | None = None,
) -> mtf.Tensor:
  """Returns the sum of the results of each token's experts.

  If a layout splits `d_ff` or `experts`, the result is an mtf.LazyAllreduceSum.

  Args:
    x: [batch, length, d_model], activation dtype.
    gates, choice: what `route` returns.
    kernels: wi_gate if the MLP has a gate, and wi, [experts, d_model, d_ff];
      and wo, [experts, d_ff, d_model]; in the dtype of x.
    mlp: what an expert computes.
    gradient_dtype: dtype of the kernels' gradients; None is the dtype of x.

  Returns:
    [batch, length, d_model], dtype of x.
  """
  dtype = gradient_dtype or x.dtype
  return _Experts(x, gates, choice, kernels, mlp, dtype).outputs[0]
