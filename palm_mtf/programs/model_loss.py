# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lets a user's model function train in place of PaLM and its loss."""

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import check_frozen, frozen_names
from palm_mtf.config import ModelConfig, StepConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.ops.variables import adopt_variables
from palm_mtf.programs.features import FEATURE_DTYPES, Feature, Stage
from palm_mtf.programs.loss_function import LossSums, token_sums

# Makes a model on a mesh. The second argument holds rows of a batch by feature
# name; the first dimension of each tensor is "batch". Returns the mean loss of
# these rows, [] any float dtype; or a pair of such tensors: a sum of losses,
# and a weight such as the number of tokens. The loss of a step is then the sum
# of all sums divided by the sum of all weights. A function whose loss has
# several terms returns a LossSums.
ModelFunction = Callable[
  [mtf.Mesh, dict[str, mtf.Tensor]],
  mtf.Tensor | tuple[mtf.Tensor, mtf.Tensor] | LossSums,
]


class ModelLoss:
  """Lets `build_program` use a user's model function as its `LossFunction`.

  Attributes:
    features: dtype and shape of each feature of a microbatch, by name.
  """

  has_dropout = False  # the function may have its own
  first_backward = 0

  def __init__(
    self,
    function: ModelFunction,
    features: Mapping[str, tuple[str, str]],
    mesh: DeviceMesh,
    *,
    num_rows: int,
    seed: int,
    frozen: Sequence[str] = (),
  ):
    """Checks the features; a microbatch has `num_rows` rows.

    Raises UserError if a feature is not a pair of a dtype and dimensions.
    """
    self._function, self._device_mesh, self._seed = function, mesh, seed
    self._frozen = frozen
    self.features: Mapping[str, Feature] = {
      name: _make_feature(name, given, num_rows)
      for name, given in features.items()
    }

  def build_sums(self, stages: Sequence[Stage]) -> LossSums:
    """Makes the variables and the loss; see `LossFunction`.

    Raises UserError if the function returns no loss, or a variable or a layout
    rule does not fit.
    """
    (stage,) = stages
    return self.build(stage.mesh, stage.batch)

  def build(self, mesh: mtf.Mesh, batch: Mapping[str, mtf.Tensor]) -> LossSums:
    """Makes the variables and the loss for the features `batch` on `mesh`.

    Raises what `build_sums` raises.
    """
    with adopt_variables(mesh, self._seed):
      returned = self._function(mesh, dict(batch))
    variables = [x for x in mesh.graph.all_variables if x.mesh is mesh]
    _check_variables(variables)
    self._freeze(variables)
    _check_layout(self._device_mesh, mesh)
    if isinstance(returned, LossSums):
      return returned
    loss, weight = self._split_loss(returned)
    if weight is None:  # a mean loss; microbatches have equal sizes
      weight = mtf.constant(mesh, 1.0, dtype=tf.float32)
    return LossSums(
      {"loss": mtf.cast(loss, tf.float32)}, mtf.cast(weight, tf.float32)
    )

  def _freeze(self, variables: Sequence[mtf.Variable]) -> None:
    """Removes what FROZEN matches from the graph's trainable variables."""
    names = [x.name for x in variables if x.trainable]
    check_frozen(names, self._frozen)
    without = frozen_names(names, self._frozen)
    for variable in variables:
      if variable.name in without:
        variable.graph.trainable_variables.remove(variable)

  def _split_loss(
    self, returned: object
  ) -> tuple[mtf.Tensor, mtf.Tensor | None]:
    pair = returned if isinstance(returned, tuple) else (returned, None)
    is_scalar = len(pair) == 2 and all(
      isinstance(x, mtf.Tensor) and not x.shape.dims and x.dtype.is_floating
      for x in pair
      if x is not None or x is pair[0]
    )
    if not is_scalar:
      name = getattr(self._function, "__name__", "the model function")
      raise UserError(
        f"{name} returns {_describe(returned)}: return the mean loss, a float "
        "Mesh TensorFlow tensor without dimensions, or a pair of such tensors, "
        "sum and weight."
      )
    return pair


def _describe(returned: object) -> str:
  if isinstance(returned, tuple):
    return f"({', '.join(map(_describe, returned))})"
  if isinstance(returned, mtf.Tensor):
    dims = ", ".join(f"{x.name}={x.size}" for x in returned.shape.dims)
    return f"a tensor [{dims}] of {returned.dtype.name}"
  return "None" if returned is None else type(returned).__name__


def _make_feature(name: str, given: tuple[str, str], num_rows: int) -> Feature:
  try:
    dtype, dims = given
    row = mtf.convert_to_shape(dims)
    shape = mtf.Shape([mtf.Dimension("batch", num_rows), *row])
    return Feature(tf.as_dtype(dtype), shape)
  except (AttributeError, TypeError, ValueError):
    raise UserError(
      f"feature {name} = {given!r}: give the dtype and the dimensions of a "
      'row, as in ("int32", "length:64").'
    ) from None


def _check_variables(variables: Sequence[mtf.Variable]) -> None:
  trained = [x for x in variables if x.trainable]
  if not trained:
    raise UserError(
      "the model function makes no variable that is trained: make them by "
      "mtf.get_variable, on the mesh that it is given."
    )
  for variable in trained:
    if variable.slice_dtype != tf.float32:
      raise UserError(
        f"variable {variable.name} is kept in {variable.slice_dtype.name}: the "
        "optimizer adds small updates to large numbers; give it the slice "
        "dtype float32, its activation dtype may be another."
      )


def _check_layout(device_mesh: DeviceMesh, mesh: mtf.Mesh) -> None:
  """Raises UserError if a layout rule does not fit the model.

  A rule must match a dimension, and its axis must divide the dimension's size.
  No tensor may have two dimensions that the same axis splits.
  """
  rules = device_mesh.rules
  shapes = {
    tuple((dim.name, dim.size) for dim in x.shape.dims)
    for op in mesh.graph.operations
    if op.mesh is mesh
    for x in op.outputs
  }
  names = {name for shape in shapes for name, _ in shape}
  for dimension, axis in rules.items():
    if dimension not in names:
      raise UserError(
        f'layout rule "{dimension}:{axis}": the model has no dimension '
        f'"{dimension}"{did_you_mean(dimension, names)}. Dimensions: '
        f"{', '.join(sorted(names))}."
      )
  for shape in shapes:
    split: dict[str, str] = {}
    for name, size in shape:
      if name not in rules:
        continue
      axis, parts = rules[name], device_mesh.axes[rules[name]]
      if size % parts:
        raise UserError(
          f"{name}={size} is not divisible by mesh axis {axis}={parts} (rule "
          f"{name}:{axis}). Use a divisor of {size}, or drop the rule."
        )
      if axis in split:
        raise UserError(
          f'layout rules "{split[axis]}:{axis}" and "{name}:{axis}": a tensor '
          f'of the model has both dimensions, and axis "{axis}" can split one; '
          "drop one rule."
        )
      split[axis] = name


def text_loss(
  config: StepConfig,
  feature_names: Sequence[str],
  *,
  num_rows: int,
  seed: int,
  frozen: Sequence[str] = (),
) -> ModelLoss:
  """Returns PaLM's loss (`PalmLoss`) for the logits of MODEL_FUNCTION.

  MODEL_FUNCTION takes {name: feature}, [batch, length] each, and the dtype of
  activations. It returns the logits of "targets", [batch, length, vocab].
  """
  model = config.model
  function = pkgutil.resolve_name(model.model_function)
  dtype = tf.as_dtype(model.activation_dtype)

  def build(unused_mesh: mtf.Mesh, batch: dict[str, mtf.Tensor]) -> LossSums:
    logits = function(batch, dtype)
    _check_logits(logits, batch["targets"], model)
    return token_sums(logits, batch, config.loss, dtype)

  row = f"length:{model.sequence_length}"
  return ModelLoss(
    build,
    {name: (FEATURE_DTYPES[name].name, row) for name in feature_names},
    config.mesh_layout,
    num_rows=num_rows,
    seed=seed,
    frozen=frozen,
  )


def _check_logits(
  logits: object, targets: mtf.Tensor, model: ModelConfig
) -> None:
  """Raises UserError unless MODEL_FUNCTION returns logits of the targets."""
  is_right = (
    isinstance(logits, mtf.Tensor)
    and logits.dtype.is_floating
    and logits.shape.dims[:-1] == targets.shape.dims
    and logits.shape.dims[-1].size >= model.vocab_size
  )
  if not is_right:
    raise UserError(
      f"MODEL_FUNCTION = {model.model_function!r}: returns "
      f"{_describe(logits)}; return float logits [batch, length, vocab] of at "
      f"least VOCAB_SIZE = {model.vocab_size} tokens."
    )


def find_shapes(
  config: StepConfig, num_rows: int
) -> dict[str, tuple[int, ...]]:
  """Returns {parameter: shape} of the model that MODEL_FUNCTION makes.

  Raises UserError if the model does not fit the layout for `num_rows` rows, and
  any exception of MODEL_FUNCTION.
  """
  # ACTIVATION_DTYPE may be "auto", which is not a dtype. Use any dtype, because
  # shapes do not depend on it.
  model = dataclasses.replace(config.model, activation_dtype="float32")
  config = dataclasses.replace(config, model=model)
  names = [x for x in FEATURE_DTYPES if x != "prefix" or model.has_prefix]
  loss = text_loss(config, names, num_rows=num_rows, seed=0)
  mesh = mtf.Mesh(mtf.Graph(), "shapes")
  batch = {
    name: mtf.zeros(mesh, x.shape, x.dtype) for name, x in loss.features.items()
  }
  loss.build(mesh, batch)
  variables = mesh.graph.all_variables
  return {x.name: tuple(x.shape.to_integer_list) for x in variables}
