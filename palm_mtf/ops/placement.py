# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Interface by which models, optimizers and decoding use a pod's devices.

Executors implement `Placement`. mesh/cpu_gpu.py builds a TensorFlow graph with
the operations of all devices. executors/xla/xla_placement.py builds the
operations of one device, and each device runs the same program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from palm_mtf._tf import mtf, tf


class LaidOut(Protocol):
  """The slices of a tensor: one per device, or only one in an XLA program.

  An XLA program is built for one device, so it has only that device's slice.
  Annotations use `LaidOut` also for an mtf.LazyAllreduceSum, whose slices are
  terms that are not yet summed over devices.
  """

  @property
  def tensor_list(self) -> list[tf.Tensor]:
    """The slices; for a variable, the tf.Variable of each slice."""

  @property
  def slice_shape(self) -> list[int]:
    """Shape of a slice."""


@runtime_checkable
class Placement(Protocol):
  """The devices of one pod: a Mesh TensorFlow `MeshImpl` with more methods.

  A collective runs separately in each group of devices whose coordinates differ
  only along its mesh axes.
  """

  native_threads: int  # per C++ operation; 0 if the devices run none
  cpu: str  # device of operations on whole tensors; "" lets XLA choose

  @property
  def shape(self) -> mtf.Shape:
    """The mesh's axes."""

  @property
  def size(self) -> int:
    """Number of devices."""

  def tensor_dimension_to_mesh_axis(self, dim: mtf.Dimension) -> int | None:
    """Returns the mesh axis that splits a dimension, if any."""

  def slice_shape(self, shape: mtf.Shape) -> list[int]:
    """Returns the shape of a device's slice of a tensor."""

  # --- Slices ----------------------------------------------------------------

  def LaidOutTensor(self, slices: list[tf.Tensor]) -> LaidOut:  # noqa: N802
    """Wraps slices as a `LaidOut`; Mesh TensorFlow requires this name."""

  def make_slices(self, x: tf.Tensor, shape: mtf.Shape) -> list[tf.Tensor]:
    """Cuts a whole tensor x into the devices' slices."""

  def combine_slices(
    self, slices: list[tf.Tensor], shape: mtf.Shape
  ) -> tf.Tensor:
    """Returns the whole tensor of the given shape from its slices."""

  def laid_out_pcoord(self, mesh_axis: int) -> LaidOut:
    """Returns each device's coordinate along an axis, [] int32."""

  def slicewise(self, fn: Callable[..., Any], *inputs: Any) -> Any:
    """Applies `fn` to each device's slices of the inputs; returns slices."""

  def delay(self, x: Any, signal: Any) -> Any:
    """Returns x, but lets nothing read it before `signal`, to save memory."""

  # --- Collectives -----------------------------------------------------------

  def allreduce(
    self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOut:
    """Reduces x by "SUM", "MAX" or "MIN", in the same order in each run."""

  def allconcat(self, x: Any, mesh_axis: int, concat_axis: int) -> LaidOut:
    """All-gathers x; each device gets all parts, joined along `concat_axis`."""

  def allsplit(self, x: Any, mesh_axis: int, split_axis: int) -> LaidOut:
    """Cuts x along `split_axis`; each device along a mesh axis keeps its part.

    Before, the devices along the mesh axis hold equal copies of x.
    """

  def alltoall(
    self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int
  ) -> LaidOut:
    """Cuts x along `split_axis`; device i gets part i of each device's x.

    A device joins the parts that it gets along `concat_axis`.
    """

  def reduce_scatter(self, x: Any, mesh_axis: int, split_axis: int) -> LaidOut:
    """Sums x over a mesh axis; each device gets a part along `split_axis`."""

  def lower(self, placements: Mapping[mtf.Mesh, Any]) -> Any:
    """Lowers the graph of a mesh into the current tf.Graph."""

  # --- Variables -------------------------------------------------------------

  def assign_if_finite(
    self, variable: Any, value: Any, is_finite: Any
  ) -> list[tf.Operation]:
    """Assigns `value`, in the stored dtype, if `is_finite`, [] bool, is true.

    Otherwise the old value stays.
    """

  def update_if_finite(
    self,
    fn: Callable[..., Sequence[tf.Tensor]],
    variables: Sequence[Any],
    operands: Sequence[Any],
    is_finite: Any,
  ) -> list[tf.Operation]:
    """Updates variables of one shape if `is_finite`; see `assign_if_finite`.

    Args:
      fn: element-wise function, defined in a module. It takes a list of the
        variables' slices, then the operands' slices; it returns the next
        values.
      operands: tensors; the first has the shape of the variables.
    """
