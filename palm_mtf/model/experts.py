# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The MLPs that the router chooses for each token (Shazeer et al. 2017).

  y = sum over a token's experts e of gate_e MLP_e(x)

router.py computes the gates. Each choice of an expert by a token makes one row,
a copy of the token's x. The rows of an expert are adjacent, so that one matrix
product multiplies all rows of an expert by its kernel. A choice of an expert
that is full, or that is on another device, has no row.

On CPUs, rows are sorted by their experts, and each product has only the rows of
its expert. XLA needs static shapes, because it compiles before it knows the
choices. So for accelerators, each expert gets whole blocks of choices / experts
rows, and its last block is padded with zeros. A device then computes at most
twice as many rows as its tokens have choices (if choices outnumber experts),
even if most of these choices are of experts on other devices.

If one mesh axis splits both `experts` and `batch`, a token's experts are on
other devices of the axis. Then an expert has a fixed number of rows for each
sequence, its capacity, and two all-to-alls move rows to the devices of their
experts and back (Lepikhin et al. 2021). Of n devices, a device has

  [experts, batch / n * capacity, d_model]    before: rows of its tokens
  [experts / n, batch * capacity, d_model]    after: rows of its experts

The gradient needs two more. With REMAT = "layer", the backward pass moves the
rows to their experts once more.
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


class Groups(NamedTuple):
  """The experts of rows that are sorted by expert.

  With the defaults, each expert has one block of rows, and all blocks have
  equal size.
  """

  count: int  # number of experts
  # Number of rows of each expert and, last, number of choices without a row,
  # [count + 1] int32; None if rows are in blocks of equal size.
  sizes: tf.Tensor | None = None
  # Expert of each block of rows, [blocks] int32; None if expert i has block i.
  experts: tf.Tensor | None = None


class Rows(NamedTuple):
  """Which row belongs to which token, choice and expert.

  On CPUs, the choices without a row come last in `token` and `choice`.
  """

  # Token of each row, [rows] int32; arbitrary for a padding row.
  token: tf.Tensor
  # Choice of each row, [rows] int32: i * chosen + j for choice j of token i; -1
  # for a padding row.
  choice: tf.Tensor
  # Row of each choice, [tokens, chosen] int32; -1 for a choice without a row.
  place: tf.Tensor
  groups: Groups  # the expert of each row


def find_rows(
  choice: tf.Tensor,
  first: tf.Tensor | int,
  count: int,
  capacity: int | None = None,
) -> Rows:
  """Returns the rows of experts `first` to `first` + `count` - 1.

  Args:
    choice: numbers of each token's experts, [tokens, chosen] int32; -1 in place
      of an expert that is full.
    first: number of the first expert, [] int32.
    count: number of experts.
    capacity: if given, each expert has exactly `capacity` rows, and must have
      at most as many choices. If None, each expert has a row per choice; inside
      XLA, these are padded to whole blocks.
  """
  chosen = choice.shape[1]
  expert = tf.reshape(choice, [-1]) - first
  here = (expert >= 0) & (expert < count)
  expert = tf.where_v2(here, expert, count)  # choices without a row come last
  order = tf.argsort(expert, stable=True)
  sizes = tf.math.unsorted_segment_sum(tf.ones_like(expert), expert, count + 1)
  sorted_place = tf.argsort(order)  # position of each choice in `order`
  if not capacity and not in_xla_computation():
    place = tf.where_v2(here, sorted_place, -1)
    place = tf.reshape(place, [-1, chosen])
    return Rows(order // chosen, order, place, Groups(count, sizes))
  num, experts = choice.shape.num_elements(), None
  size = capacity or max(1, num // count)  # rows per block
  num_blocks, begins = count, tf.range(count + 1) * size
  if not capacity:
    num_blocks += num // size
    blocks = -(-sizes[:count] // size)  # blocks per expert
    ends = tf.cumsum(blocks)
    begins = tf.concat([(ends - blocks) * size, [0]], 0)
    experts = tf.reduce_sum(
      tf.cast(tf.range(num_blocks)[:, tf.newaxis] >= ends, tf.int32), 1
    )
    experts = tf.minimum(experts, count - 1)  # for unused blocks at the end
  before = tf.cumsum(sizes, exclusive=True)
  place = tf.gather(begins - before, expert) + sorted_place
  rows = num_blocks * size
  # Choices without a row are written to an extra element, which is dropped.
  taken = tf.tensor_scatter_nd_update(
    tf.fill([rows + 1], -1),
    tf.where_v2(here, place, rows)[:, tf.newaxis],
    tf.range(num),
  )[:rows]
  place = tf.reshape(tf.where_v2(here, place, -1), choice.shape)
  token = tf.maximum(taken, 0) // chosen
  return Rows(token, taken, place, Groups(count, experts=experts))


def _gather(x: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
  """Returns rows of x, or zeros where `place` is -1, in the dtype of x."""
  found = tf.gather(x, tf.maximum(place, 0))
  return tf.where_v2((place >= 0)[..., tf.newaxis], found, tf.zeros_like(found))


def take_rows(x: tf.Tensor, rows: Rows) -> tf.Tensor:
  """Returns the rows, [rows, size], of tokens x, [tokens, size]."""
  if rows.groups.sizes is not None:  # there are no padding rows
    return tf.gather(x, rows.token)
  return _gather(x, tf.where_v2(rows.choice >= 0, rows.token, -1))


def multiply(
  x: tf.Tensor, kernels: tf.Tensor, groups: Groups, *, transpose: bool = False
) -> tf.Tensor:
  """Multiplies each row by its expert's kernel; returns [rows, columns].

  Args:
    x: [rows, inner].
    kernels: [experts, inner, columns], or [experts, columns, inner] if
      `transpose`.
  """
  if groups.sizes is None:
    if groups.experts is not None:
      kernels = tf.gather(kernels, groups.experts)
    blocks = tf.reshape(x, [kernels.shape[0], -1, x.shape[-1]])
    y = matmul(blocks, kernels, transpose_b=transpose)
    return tf.reshape(y, [x.shape[0], y.shape[-1]])
  *parts, others = tf.split(x, groups.sizes, num=groups.count + 1)
  columns = kernels.shape[1 if transpose else 2]
  found = [
    matmul(part, kernel, transpose_b=transpose)
    for part, kernel in zip(parts, tf.unstack(kernels), strict=True)
  ]
  # Append a row of zeros for each choice without a row: the number of rows is
  # static then.
  found.append(tf.zeros([tf.shape(others)[0], columns], x.dtype))
  y = tf.concat(found, 0)
  y.set_shape([x.shape[0], columns])
  return y


def kernel_gradients(x: tf.Tensor, dy: tf.Tensor, groups: Groups) -> tf.Tensor:
  """Returns the sum over each expert's rows of x^T dy.

  x is [rows, inner], dy is [rows, columns] and the result is [experts, inner,
  columns]. A padding row must be zero in x or in dy.
  """
  count, sizes, experts = groups
  if sizes is None:
    num_blocks = count if experts is None else experts.shape[0]
    blocks = (tf.reshape(z, [num_blocks, -1, z.shape[-1]]) for z in (x, dy))
    found = matmul(*blocks, transpose_a=True)
    if experts is None:
      return found
    found = tf.cast(found, tf.float32)
    return tf.math.unsorted_segment_sum(found, experts, count)
  parts = [tf.split(z, sizes, num=count + 1)[:-1] for z in (x, dy)]
  return tf.stack(
    [matmul(a, b, transpose_a=True) for a, b in zip(*parts, strict=True)]
  )


@fused
def _add_choices(found, gates):
  # Returns the sum over a token's choices, [tokens, size] float32, in a fixed
  # order, so that the same run gives the same bits. `found` is [tokens, chosen,
  # size], and `gates` is [tokens, chosen].
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
  # gradient of the gates. `wide` is what `_compute` returns, `unscaled` is dy
  # times the transpose of the kernel wo, and `gates` is [rows] float32.
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


def _compute(taken, kernels, groups, mlp):
  # Returns the experts' results, and the products of rows with wi_gate (if any)
  # and wi, joined: [rows, columns].
  *inputs, output = kernels
  wide = multiply(taken, tf.concat(inputs, 2), groups)
  return multiply(_hidden(wide, mlp), output, groups), wide


def _differentiate(taken, wide, dys, gates, kernels, groups, mlp):
  # Returns the gradients of the rows, of their gates and of each kernel. `dys`
  # has the gradient of y for each row; `gates` is [rows] float32.
  *inputs, output = kernels
  unscaled = multiply(dys, output, groups, transpose=True)
  hidden, dwide, dgates = _hidden_gradient(wide, unscaled, gates, mlp)
  dtaken = multiply(dwide, tf.concat(inputs, 2), groups, transpose=True)
  djoined = kernel_gradients(taken, dwide, groups)
  dkernels = tf.split(djoined, len(inputs), 2)
  return dtaken, dgates, *dkernels, kernel_gradients(hidden, dys, groups)


def _row_gates(gates, rows):
  # Returns the gate of each row; an arbitrary number for a padding row.
  return tf.gather(tf.reshape(gates, [-1]), tf.maximum(rows.choice, 0))


def _to_tokens(dtaken, dgates, rows, x, gates):
  # Returns the gradients of x and of the gates, given the gradients per row.
  dx = _add_choices(_gather(dtaken, rows.place), tf.ones(rows.place.shape))
  dgates = _gather(tf.reshape(dgates, [-1, 1]), rows.place)
  return (
    tf.cast(tf.reshape(dx, x.shape), x.dtype),
    tf.reshape(dgates, gates.shape),
  )


def sum_experts(
  x: tf.Tensor,
  gates: tf.Tensor,
  choice: tf.Tensor,
  first: tf.Tensor,
  kernels: Sequence[tf.Tensor],
  mlp: Mlp,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the sum, for each token, of the results of a device's experts.

  Args:
    x: [tokens, d_model], activation dtype.
    gates, choice: factor and number of each token's experts, [tokens, chosen].
    first: number of the device's first expert, [] int32.
    kernels: slices of wi_gate if the MLP has a gate, of wi and of wo; the first
      dimension is that of the device's experts.
    mlp: what an expert computes.

  Returns:
    The sum, [tokens, d_model] in the dtype of x; and the products of rows with
    wi_gate (if any) and wi, joined: [rows, columns].
  """
  rows = find_rows(choice, first, kernels[0].shape[0])
  found, wide = _compute(take_rows(x, rows), kernels, rows.groups, mlp)
  y = _add_choices(_gather(found, rows.place), gates)
  return tf.cast(y, x.dtype), wide


class _Experts(mtf.Operation):
  """Outputs what `sum_experts` returns; the gradient reads the second output.

  That output is [rows, columns] on each device.
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
    dy, *_ = grad_ys
    # Read self.inputs: if REMAT recomputes the layer, this operation is a copy,
    # whose inputs are the recomputed tensors.
    x, gates, choice, *kernels = self.inputs
    given = [recompute(each, dy) for each in (x, gates, choice, *kernels)]
    dx, dgates, *dkernels = _ExpertsGradient(self, given, dy).outputs
    return [dx, dgates, None, *dkernels]

  def lower(self, lowering: mtf.Lowering) -> None:
    impl = lowering.mesh_impl(self)
    y, *kept = self.run(impl, *(lowering.tensors[x] for x in self.inputs))
    lowering.set_tensor_lowering(self.outputs[0], self.open_sum(impl, y))
    # `set_tensor_lowering` would refuse these: a device has only the rows of
    # its experts and some of the columns, although no layout rule says so.
    lowering.tensors |= dict(zip(self.outputs[1:], kept, strict=True))

  def run(self, impl: Any, *inputs: Any) -> tuple[Any, ...]:
    """Returns the slices of all outputs."""

    def apply(first, x, gates, choice, *kernels):
      given = map(to_rows, (x, gates, choice))
      y, wide = sum_experts(*given, first, kernels, self.mlp)
      return tf.reshape(y, x.shape), wide

    return impl.slicewise(apply, slice_offset(impl, self.experts_dim), *inputs)

  def run_backward(self, impl: Any, *inputs: Any) -> tuple[Any, ...]:
    """Returns slices of the gradients of x, of the gates and of each kernel.

    `inputs` are slices of the inputs, of the outputs except y, and of the
    gradient of y.
    """

    def apply(first, x, gates, choice, *others):
      *kernels, wide, dy = others
      rows = find_rows(to_rows(choice), first, kernels[0].shape[0])
      taken, dys = (take_rows(to_rows(z), rows) for z in (x, dy))
      given = taken, wide, dys, _row_gates(gates, rows)
      found = _differentiate(*given, kernels, rows.groups, self.mlp)
      return *_to_tokens(*found[:2], rows, x, gates), *found[2:]

    return impl.slicewise(apply, slice_offset(impl, self.experts_dim), *inputs)

  def open_sum(self, impl: mtf.MeshImpl, x: Any) -> Any:
    """Returns x, as an mtf.LazyAllreduceSum if `experts` or d_ff is split."""
    *_, output = self.inputs
    axes = split_axes(impl, output.shape.dims[:2])
    return mtf.LazyAllreduceSum(impl, x, axes) if axes else x


class _MovedExperts(_Experts):
  """Experts of tokens that all devices along a mesh axis send to each other.

  The third output has the rows that a device receives, for the gradient.
  """

  def __init__(self, *args: Any, capacity: int):
    super().__init__(*args)
    self._capacity = capacity
    x = self.inputs[0]
    self._outputs.append(mtf.Tensor(self, x.shape, x.dtype, 2))

  def _find_rows(self, choice):
    # Returns the rows of a device's tokens, before the all-to-all: `capacity`
    # rows per expert and sequence. To `find_rows`, each pair of an expert and a
    # sequence is an expert.
    count, batch = self.experts_dim.size, choice.shape[0]
    of_sequence = choice * batch + tf.range(batch)[:, tf.newaxis, tf.newaxis]
    group = tf.where_v2(choice < 0, -1, of_sequence)
    return find_rows(to_rows(group), 0, count * batch, self._capacity)

  def _exchange(self, impl, x, *, back=False):
    # Moves rows to the devices of their experts or, if `back`, to the devices
    # of their tokens. Takes and returns [rows, ...], sorted by expert.
    axis = impl.tensor_dimension_to_mesh_axis(self.experts_dim)
    parts = self.experts_dim.size
    if back:
      parts //= impl.shape[axis].size
    x = impl.slicewise(lambda x: tf.reshape(x, [parts, -1, *x.shape[1:]]), x)
    x = impl.alltoall(x, axis, int(back), int(not back))
    return impl.slicewise(lambda x: tf.reshape(x, [-1, *x.shape[2:]]), x)

  def run(self, impl: Any, *inputs: Any) -> tuple[Any, ...]:
    x, gates, choice, *kernels = inputs

    def dispatch(x, choice):
      return take_rows(to_rows(x), self._find_rows(choice))

    def compute(taken, *kernels):
      return _compute(taken, kernels, Groups(kernels[0].shape[0]), self.mlp)

    def combine(found, x, gates, choice):
      place = self._find_rows(choice).place
      y = _add_choices(_gather(found, place), to_rows(gates))
      return tf.cast(tf.reshape(y, x.shape), x.dtype)

    taken = self._exchange(impl, impl.slicewise(dispatch, x, choice))
    found, wide = impl.slicewise(compute, taken, *kernels)
    found = self._exchange(impl, found, back=True)
    return impl.slicewise(combine, found, x, gates, choice), wide, taken

  def run_backward(self, impl: Any, *inputs: Any) -> tuple[Any, ...]:
    x, gates, choice, *kernels, wide, taken, dy = inputs

    def dispatch(gates, choice, dy):
      rows = self._find_rows(choice)
      return take_rows(to_rows(dy), rows), _row_gates(gates, rows)

    def compute(taken, wide, dys, gates, *kernels):
      given = taken, wide, dys, gates, kernels
      return _differentiate(*given, Groups(kernels[0].shape[0]), self.mlp)

    def combine(dtaken, dgates, x, gates, choice):
      return _to_tokens(dtaken, dgates, self._find_rows(choice), x, gates)

    sent = impl.slicewise(dispatch, gates, choice, dy)
    moved = (self._exchange(impl, z) for z in sent)
    found = impl.slicewise(compute, taken, wide, *moved, *kernels)
    back = (self._exchange(impl, z, back=True) for z in found[:2])
    return *impl.slicewise(combine, *back, x, gates, choice), *found[2:]

  def open_sum(self, impl: mtf.MeshImpl, x: Any) -> Any:
    """Returns x, as an mtf.LazyAllreduceSum if d_ff is split."""
    axes = split_axes(impl, self.inputs[-1].shape.dims[1:2])
    return mtf.LazyAllreduceSum(impl, x, axes) if axes else x


class _ExpertsGradient(mtf.Operation):
  """Outputs the gradients of x, of the gates and of each kernel."""

  def __init__(
    self, forward: _Experts, given: Sequence[mtf.Tensor], dy: mtf.Tensor
  ):
    kept = forward.outputs[1:]
    super().__init__([*given, *kept, dy], name="experts_gradient")
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
    inputs = (lowering.tensors[x] for x in self.inputs)
    values = forward.run_backward(impl, *inputs)
    batch = self.inputs[0].shape.dims[:2]
    own = self.outputs[2].shape.dims
    for i, (output, value) in enumerate(zip(self.outputs, values, strict=True)):
      if i < 2:
        value = forward.open_sum(impl, value)
      else:
        value = impl.slicewise(tf.cast, value, forward.gradient_dtype)
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
  capacity: int | None = None,
) -> mtf.Tensor:
  """Returns the sum of the results of each token's experts.

  If a layout splits `d_ff`, or `experts` over another axis than `batch`, the
  result is an mtf.LazyAllreduceSum.

  Args:
    x: [batch, length, d_model], activation dtype.
    gates, choice: what `route` returns.
    kernels: wi_gate if the MLP has a gate, and wi, [experts, d_model, d_ff];
      and wo, [experts, d_ff, d_model]; in the dtype of x.
    mlp: what an expert computes.
    gradient_dtype: dtype of the kernels' gradients; None is the dtype of x.
    capacity: how many tokens of a sequence an expert takes, if one mesh axis
      splits both `experts` and `batch`, so that tokens move to their experts;
      otherwise None.

  Returns:
    [batch, length, d_model], dtype of x.
  """
  given = x, gates, choice, kernels, mlp, gradient_dtype or x.dtype
  if capacity is None:
    return _Experts(*given).outputs[0]
  return _MovedExperts(*given, capacity=capacity).outputs[0]
