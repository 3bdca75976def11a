# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adafactor in the form that trained PaLM (section 5), and in other forms.

For a variable p with gradient g, clipped by the global norm, at step k:

  v  <-  beta2 v + (1 - beta2) (g^2 + 1e-30)         beta2 = 1 - k^-0.8
  u   =  g / sqrt(v)
  u  <-  u / max(1, RMS(u) / UPDATE_CLIP)
  m  <-  beta1 m + (1 - beta1) lr max(1e-3, RMS(p)) u
  p  <-  p (1 - lr^2) - m                            lr = min(1e-2, 1/sqrt(k))

This is Adam with a learning rate relative to the variable's root mean square
(RMS). If NORM_SCALE is "zero_centered", p is a norm's scale minus one.
"""

import collections
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.optimizer_state import (
  optimizer_state,
  parameter_slots,
  row_rank,
)
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.config import AdafactorConfig
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.variables import Fill, SlicedVariable
from palm_mtf.ops.xla import fused_sum
from palm_mtf.optim.second_moment import (
  FactoredMoment,
  factored_update,
  full_update,
)

# m (momentum) and v (second moment) start at zero; v needs no bias correction,
# because beta2 is 0 at the first step.
#
# The update makes two passes over memory, one for the root mean squares and one
# for the assignments; a factored v takes a third pass. None can be a part of
# the backward pass, because the clip factor depends on all gradients.


@fused_sum
def _sum_of_squares(p, center):
  return tf.square(p - center)


@fused_sum
def _full_squares(g, clip, one_minus_beta2, v):
  u, _ = full_update(g, clip, one_minus_beta2, v)
  return tf.square(u)


@fused_sum
def _factored_squares(g, clip, row, column):
  return tf.square(factored_update(g, clip, row, column))


def _step_values(p, m, u, beta1, step_size, shrink, center):
  # Returns the next parameter p and momentum m; `m` is [] without momentum.
  change = step_size * u
  if m:
    change += beta1 * tf.cast(m[0], tf.float32)
  p -= (p - center) * shrink + change
  return p, *(tf.cast(change, x.dtype) for x in m)


def _full_step(values, g, scalars):
  p, *m, v = values
  clip, one_minus_beta2, *others = tf.unstack(scalars)
  u, next_v = full_update(g, clip, one_minus_beta2, v)
  return (*_step_values(p, m, u, *others), tf.cast(next_v, v.dtype))


def _factored_step(values, g, scalars, row, column):
  p, *m = values
  clip, _, *others = tf.unstack(scalars)
  u = factored_update(g, clip, row, column)
  return _step_values(p, m, u, *others)


class _Parameter:
  """Computes and assigns the next values of a variable and its slots."""

  def __init__(
    self,
    lowering: mtf.Lowering,
    variable: mtf.Variable,
    slots: dict[str, mtf.Variable],
    scalars: Sequence[mtf.Tensor],
    gradient: mtf.Tensor,
    center: float,
  ):
    # `slots` maps names of optimizer slots to variables; `scalars` are clip
    # factor, learning rate, 1 - beta2 and is_finite, on the variable's mesh. p
    # decays towards `center`, and RMS(p) means RMS(p - center).
    self.name = variable.name
    self.center = center
    self.size = math.prod(variable.sizes)
    self.mesh_impl = mesh_impl = lowering.mesh_impl(variable)
    dims = variable.shape.dims
    self._split_axes = split_axes(mesh_impl, dims)
    self._variables = {
      name: lowering.variables[x].laid_out_tensor
      for name, x in {"": variable, **slots}.items()
    }
    values = {
      name: mesh_impl.slicewise(tf.convert_to_tensor, x)
      for name, x in self._variables.items()
      if name != "momentum"
    }
    self._p = values.pop("")
    self._g = lowering.tensors[gradient]
    self._clip, self._rate, self._decay, self._is_finite = (
      lowering.tensors[x] for x in scalars
    )
    # `moment` is (v,) or, if v is factored, (row means, column means).
    moment = tuple(values.values())
    self._next_means, self._factors = (), ()
    if len(moment) == 1:
      self._squares, self._step = _full_squares, _full_step
      self._of_squares = self._decay, *moment
    else:
      self._squares, self._step = _factored_squares, _factored_step
      factored = FactoredMoment(
        mesh_impl, dims, variable.sizes, row_rank(self.name)
      )
      self._next_means = factored.next_means(
        self._g, self._clip, self._decay, *moment
      )
      self._factors = factored.row_and_column_factors(*self._next_means)
      self._of_squares = self._factors

  def parameter_squares(self):
    # Returns the sum of (p - center)^2, for RMS(p), a LaidOutTensor [] float32.
    return self._sum(_sum_of_squares, self._p, self.center)

  def update_squares(self):
    # Returns the sum of u^2, for RMS(u), a LaidOutTensor [] float32.
    return self._sum(self._squares, self._g, self._clip, *self._of_squares)

  def _sum(self, sum_slice, *operands):
    sums = self.mesh_impl.slicewise(sum_slice, *operands)
    return self.mesh_impl.allreduce(sums, self._split_axes, "SUM")

  def assign(self, make_scalars, *arguments) -> list[tf.Operation]:
    # Returns operations that assign each slice of p and of its slots.
    # `make_scalars` computes step size and decay from `arguments`: the mean of
    # (p - center)^2, the mean of u^2, and whether p decays.
    slots, mesh_impl = self._variables, self.mesh_impl
    scalars = mesh_impl.slicewise(
      make_scalars,
      *(self._clip, self._decay, self._rate),
      *arguments,
      self.center,
    )
    whole = [x for x in ("", "momentum", "second_moment") if x in slots]
    operations = mesh_impl.update_if_finite(
      self._step,
      [slots[name] for name in whole],
      [self._g, scalars, *self._factors],
      self._is_finite,
    )
    means = [slots[name] for name in slots if name not in whole]
    for slot, value in zip(means, self._next_means, strict=True):
      operations += mesh_impl.assign_if_finite(slot, value, self._is_finite)
    return operations


class Measure(mtf.Operation):
  """Outputs sums of squares of variables p, then of updates u, for their RMS.

  Attributes:
    variables: the variables and their optimizer slots.
    sums_of_squares: a SumOfSquares of each variable, then of each update.
  """

  def __init__(
    self,
    variables: Sequence[mtf.Variable],
    gradients: Sequence[mtf.Tensor],
    scalars: Mapping[mtf.Mesh, Sequence[mtf.Tensor]],
    config: AdafactorConfig,
  ):
    # Makes the optimizer slots; for the arguments see `adafactor_updates`.
    state = optimizer_state(config)
    self._slots = [
      {
        slot.name: SlicedVariable(
          variable.mesh,
          f"{variable.name}/{slot.name}",
          mtf.Shape(variable.shape.dims[slot.dims]),
          initializer=Fill(0.0),
          stored_dtype=tf.as_dtype(slot.dtype),
          trainable=False,
          sizes=variable.sizes[slot.dims],
        )
        for slot in parameter_slots(variable.name, variable.shape.ndims, state)
      }
      for variable in variables
    ]
    super().__init__(
      [*gradients, *itertools.chain(*scalars.values())],
      name=f"{variables[0].name}/measure",
    )
    self._trained, self._gradients = list(variables), list(gradients)
    self._scalars_of, self._norm_scale = scalars, config.norm_scale
    slots = [slot for x in self._slots for slot in x.values()]
    self.variables = [*variables, *slots]
    measured = [(of, x) for of in ("parameter", "update") for x in variables]
    self._outputs = [
      mtf.Tensor(self, mtf.Shape([]), tf.float32, index=i)
      for i in range(len(measured))
    ]
    self.sums_of_squares = [
      SumOfSquares(of, x.name, math.prod(x.sizes), value)
      for (of, x), value in zip(measured, self._outputs, strict=True)
    ]
    self._lowered: weakref.WeakKeyDictionary[mtf.Lowering, list[_Parameter]] = (
      weakref.WeakKeyDictionary()
    )

  def parameters(self, lowering: mtf.Lowering) -> list[_Parameter]:
    """Lowers the variables once, for both `Measure` and `AdafactorUpdate`."""
    if lowering not in self._lowered:
      self._lowered[lowering] = [
        _Parameter(
          lowering,
          variable,
          slots,
          self._scalars_of[variable.mesh],
          gradient,
          center_of(variable.name, self._norm_scale),
        )
        for variable, slots, gradient in zip(
          self._trained, self._slots, self._gradients, strict=True
        )
      ]
    return self._lowered[lowering]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to sums, of which TensorFlow computes only those that are read."""
    parameters = self.parameters(lowering)
    sums = [
      *[x.parameter_squares() for x in parameters],
      *[x.update_squares() for x in parameters],
    ]
    for output, x in zip(self.outputs, sums, strict=True):
      lowering.set_tensor_lowering(output, x)


class AdafactorUpdate(mtf.Operation):
  """Updates variables that share one root mean square; updates their moments.

  The attributes `variables` and `sums_of_squares` are the same as in `Measure`.
  """

  def __init__(
    self,
    measure: Measure,
    num_layers: Mapping[str, int],
    config: AdafactorConfig,
  ):
    """For `num_layers` see `adafactor_updates`."""
    super().__init__(
      [*measure.inputs, *measure.outputs],
      name=measure.name.replace("/measure", "/update"),
    )
    self._measure, self._num_layers = measure, num_layers
    self._config = config
    self.variables = measure.variables
    self.sums_of_squares = measure.sums_of_squares

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to the assignments of all slices, as one operation."""
    parameters, config = self._measure.parameters(lowering), self._config
    count = float(
      sum(x.size * self._num_layers.get(x.name, 1) for x in parameters)
    )
    sums = [lowering.tensors[x] for x in self._measure.outputs]
    # Each stage adds the sums in the same order, so that all means are equal.
    means = {
      impl: [
        impl.slicewise(lambda *parts: total(parts) / count, *squares)
        for squares in (sums[: len(parameters)], sums[len(parameters) :])
      ]
      for impl in {x.mesh_impl: None for x in parameters}
    }
    operations = []
    for parameter in parameters:
      operations += parameter.assign(
        self._scalars,
        *means[parameter.mesh_impl],
        is_decayed(parameter.name, config.weight_decay_on),
      )
    lowering.operations[self] = tf.group(operations)

  def _scalars(
    self,
    clip,
    one_minus_beta2,
    learning_rate,
    p_square,
    u_square,
    is_decayed,
    center,
  ):
    # Returns the six scalars that are stacked below, [6] float32. Devices
    # compute the scalars, so that no step waits for the session's client.
    config = self._config
    step_size = (1.0 - config.beta1) * learning_rate
    if config.parameter_scale != "off":
      scale = tf.maximum(config.parameter_scale_floor, tf.sqrt(p_square))
      step_size *= scale
    if config.update_clip is not None:
      step_size /= tf.maximum(1.0, tf.sqrt(u_square) / config.update_clip)
    # `shrink` is lr^2 and not 1 - lr^2, because 1 - lr^2 loses digits of lr^2.
    shrink = 0.0
    if is_decayed and config.weight_decay_exponent is not None:
      shrink = learning_rate**config.weight_decay_exponent
    return tf.stack(
      [clip, one_minus_beta2, config.beta1, step_size, shrink, center]
    )


def adafactor_updates(
  variables: Sequence[mtf.Variable],
  gradients: Sequence[mtf.Tensor],
  scalars: Mapping[mtf.Mesh, Sequence[mtf.Tensor]],
  config: AdafactorConfig,
  num_layers: Mapping[str, int] = MappingProxyType({}),
) -> list[AdafactorUpdate]:
  """Returns the operations that update all variables and moments in place.

  Args:
    variables: the trained variables.
    gradients: gradient of each variable, in its shape, any float dtype.
    scalars: for each mesh with variables: clip factor, learning rate and
      1 - beta2, [] float32 each; and whether the step's losses and gradient
      norm are finite, [] bool. If this is false, nothing is updated.
    config: settings; schedules, GRADIENT_CLIP and Z_LOSS are unused.
    num_layers: {variable: number of layers that it stands for}, 1 if it is
      missing. On accelerators, whose graph has only one layer, this is the
      number of layers in which the variable is trained. If layers share a root
      mean square, the update then reads the sum over all layers.
  """
  groups = scale_groups([v.name for v in variables], config.parameter_scale)
  updates = []
  for group in groups:
    own = [variables[i] for i in group]
    measure = Measure(own, [gradients[i] for i in group], scalars, config)
    is_joined = shares_scale(own[0].name, config.parameter_scale)
    layers = num_layers if is_joined else {}
    updates.append(AdafactorUpdate(measure, layers, config))
  return updates


# The PaLM paper multiplies the learning rate by the root mean square of "the
# parameter matrix", but does not say what the matrices are. If PARAMETER_SCALE
# is "variable", each variable is one matrix. If it is "stacked", the matrices
# are those of PaLM's published inference code, where three matrices hold the
# kernels of all layers: the table below names each kernel's matrix. The `norm`
# scales of all layers form another matrix, and so do the `mlp_norm` scales. A
# parameter that is not trained (FROZEN) is in no matrix.
_STACKED_WITH = {
  **dict.fromkeys(("q", "wi_gate", "wi"), "q_wi"),
  **dict.fromkeys(("k", "v"), "kv"),
  **dict.fromkeys(("o", "wo"), "o_wo"),
}


def scale_groups(names: Sequence[str], parameter_scale: str) -> list[list[int]]:
  """Returns groups of variables that share an RMS, as indices in `names`.

  For "stacked" and names ["layer_000/mlp/wi", "final_norm/scale",
  "layer_001/mlp/wi"] the groups are [[0, 2], [1]].
  """
  groups: dict[str, list[int]] = {}
  for position, name in enumerate(names):
    key = name
    if shares_scale(name, parameter_scale):
      parameter = parse_name(name)
      key = _STACKED_WITH.get(parameter.last, parameter.part)
    groups.setdefault(key, []).append(position)
  return list(groups.values())


def shares_scale(name: str, parameter_scale: str) -> bool:
  """Returns whether a variable shares its RMS with other layers' variables."""
  return parameter_scale == "stacked" and parse_name(name).layer is not None


def is_decayed(name: str, weight_decay_on: str) -> bool:
  """Returns whether WEIGHT_DECAY_ON makes a parameter decay."""
  if weight_decay_on == "all":
    return True
  if weight_decay_on == "all_but_scales":
    return not parse_name(name).is_scale
  return parse_name(name).is_kernel


def center_of(name: str, norm_scale: str) -> float:
  """Returns the value towards which a parameter decays: 1 or 0."""
  # Google's published code stores scale - 1 for a norm, so its optimizer works
  # on scale - 1. This optimizer does so if NORM_SCALE is "zero_centered", but
  # checkpoints always hold the scale itself.
  is_centered = norm_scale == "zero_centered" and parse_name(name).is_scale
  return 1.0 if is_centered else 0.0


class SumOfSquares(NamedTuple):
  """Sum of squares of one variable, or of its update, in one step, for RMS."""

  # "parameter": `value` is the sum of (p - center)^2 before the step.
  # "update": `value` is the sum of u^2 before UPDATE_CLIP scales u.
  of: str
  variable: str
  size: int  # number of elements of the variable, for the mean
  value: mtf.Tensor | tf.Tensor  # [] float32; tf.Tensor in a lowered graph


def total(terms: Sequence[tf.Tensor]) -> tf.Tensor:
  """Adds up float32 tensors of one shape in the given order."""
  # tf.add_n may start from any term whose buffer nothing else uses. The order
  # of the terms, and so the sum's last bit, could then differ between steps.
  return tf.reduce_sum(tf.stack(terms), axis=0)


def rms_by_kind(sums: Iterable[SumOfSquares]) -> dict[str, tf.Tensor]:
  """Returns {metric name: root mean square, [] float32}.

  Names are "update_rms/<kind>" and "parameter_rms/<kind>". A kind is
  "embedding", "norm", "attention" or "mlp"; it covers all layers.
  """
  by_name = collections.defaultdict(list)
  for each in sums:
    by_name[f"{each.of}_rms/{parse_name(each.variable).kind}"].append(each)
  return {
    name: tf.sqrt(
      total([each.value for each in group])
      / float(sum(each.size for each in group))
    )
    for name, group in by_name.items()
  }
