# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables that exist only as slices and are drawn the same everywhere.

Mesh TensorFlow's own variable keeps a full copy, the master, beside the slices
that the mesh uses, and its random draws differ from process to process. Ours
has no master: each device holds its slice alone, the initial value is a
pure function of (seed, name, position), and the checkpoint is written from and
restored into the slices (checkpoints/manifest.py). So neither memory nor values
depend on the layout.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Protocol

from palm_mtf._tf import BaseResourceVariable, mtf, tf


class Part(Protocol):
  """What one device holds of a variable (mesh/placement.py).

  Attributes:
    sizes: sizes of its dimensions, without padding.
  """

  sizes: list[int]

  def cut(self, x: tf.Tensor) -> tf.Tensor:
    """Returns the part of x, the whole variable."""


@dataclasses.dataclass(frozen=True)
class Normal:
  """Draws from N(0, stddev^2), not truncated (PaLM 5, weight initialization).

  Attributes:
    stddev: standard deviation; 1/sqrt(fan-in) for kernels, 1 for embeddings.
    seed: seed of the run; the draw is keyed by (seed, name of the variable).
  """

  stddev: float
  seed: int

  def full_value(self, name: str, shape: list[int]) -> tf.Tensor:
    """Returns the whole initial value of `name`, float32."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    key = int.from_bytes(digest, "little", signed=True)
    return self.stddev * tf.random.stateless_normal(
      shape, seed=[self.seed % 2**31, key]
    )

  def part_value(self, name: str, shape: list[int], part: Part) -> tf.Tensor:
    """Returns a part of it; all of it is drawn, so that parts agree."""
    return part.cut(self.full_value(name, shape))


@dataclasses.dataclass(frozen=True)
class Fill:
  """Fills with one number."""

  number: float

  def full_value(self, name: str, shape: list[int]) -> tf.Tensor:
    """Returns the whole initial value of `name`, float32."""
    del name
    return tf.fill(shape, self.number)

  def part_value(self, name: str, shape: list[int], part: Part) -> tf.Tensor:
    """Returns a part of it."""
    del shape
    return self.full_value(name, part.sizes)


class SlicedVariable(mtf.Variable):
  """A variable without a master; `lowering.variables` maps it to its slices.

  Attributes:
    initializer: gives the first value.
    sizes: sizes of the dimensions in a checkpoint; what the mesh has more is
      padding, zeros at the end.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    name: str,
    shape: mtf.Shape,
    *,
    initializer: Normal | Fill,
    stored_dtype: tf.DType,
    activation_dtype: tf.DType,
    trainable: bool,
    sizes: Sequence[int] | None,
  ):
    # mtf.Variable's constructor makes the master, hence not super().__init__.
    mtf.Operation.__init__(self, [], mesh, name=name)
    # The graph made it another name where another pod's mesh has this one.
    self._name = name
    self._dtype = mtf.VariableDType(
      stored_dtype, stored_dtype, activation_dtype
    )
    self._trainable = trainable
    self.initializer = initializer
    self.sizes = list(sizes or shape.to_integer_list)
    self._outputs = [mtf.Tensor(self, shape, activation_dtype)]
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_all_dimensions_as_splittable()
    )
    self.graph.all_variables.append(self)
    if trainable:
      self.graph.trainable_variables.append(self)


def sliced_variable(
  mesh: mtf.Mesh,
  name: str,
  shape: mtf.Shape,
  *,
  initializer: Normal | Fill,
  stored_dtype: tf.DType = tf.float32,
  activation_dtype: tf.DType = tf.float32,
  trainable: bool = True,
  sizes: Sequence[int] | None = None,
) -> mtf.Tensor:
  """Makes a variable and returns its value in `activation_dtype`.

  Args:
    mesh: the pod's mesh.
    name: the variable's name in a checkpoint, which carries no pod, no layout.
    shape: dimensions, stored in this order.
    initializer: gives the first value.
    stored_dtype: dtype of the slices and of the checkpoint.
    activation_dtype: what the value is cast to where the model reads it.
    trainable: False for what the optimizer keeps.
    sizes: sizes of the dimensions in a checkpoint, where some are padded; None
      where none are.

  Returns:
    [shape], activation_dtype; its `operation` is the variable.
  """
  return SlicedVariable(
    mesh,
    name,
    shape,
    initializer=initializer,
    stored_dtype=stored_dtype,
    activation_dtype=activation_dtype,
    trainable=trainable,
    sizes=sizes,
  ).outputs[0]


def device_variable(value: tf.Tensor, name: str) -> tf.Variable:
  """Makes a variable that is not trained by TensorFlow, and its initializer.

  It lives on the device whose scope this is. tf.Variable itself makes twice the
  operations, in three times the time, and a pod has a hundred thousand.

  Args:
    value: the first.
    name: name of its operations.
  """
  with tf.name_scope(name) as scope:
    unique_name = scope.removesuffix("/")
    handle = tf.raw_ops.VarHandleOp(
      dtype=value.dtype, shape=value.shape, shared_name=unique_name, name=scope
    )
    variable = BaseResourceVariable(
      trainable=False,
      shape=value.shape,
      dtype=value.dtype,
      handle=handle,
      handle_name=unique_name,
      unique_id=unique_name,
      initial_value=value,
      initializer_op=tf.raw_ops.AssignVariableOp(resource=handle, value=value),
      in_graph_mode=True,
    )
  tf.add_to_collection(tf.GraphKeys.GLOBAL_VARIABLES, variable)
  return variable
