# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What every optimizer does: slots, sums of squares, and in-place updates.

An optimizer is a `Rule` in a module of this folder, which the table of
optimizers (config/optimizer.py) names. The update makes two passes over
memory, one for sums of squares and one for the assignments. None can be a part
of the backward pass, because the clip factor depends on all gradients.
"""

import abc
import collections
import functools
import importlib
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.optimizer_state import parameter_slots
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.config import OptimizerConfig
from palm_mtf.ops.placement import Placement
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.variables import Fill, SlicedVariable
from palm_mtf.ops.xla import fused_sum


def clip_gradient(g: tf.Tensor, clip: tf.Tensor) -> tf.Tensor:
  """Returns a slice of a gradient times the clip factor, float32."""
  return tf.cast(g, tf.float32) * clip


@fused_sum
def _sum_of_squares(p, center):
  return tf.square(p - center)


@functools.cache  # because each function object is compiled once
def _keep_zeros(step):
  # Returns `step`, except that weights of 0 stay 0.
  @functools.wraps(step)
  def masked_step(values, *operands):
    after, *slots = step(values, *operands)
    return tf.where_v2(tf.equal(values[0], 0.0), 0.0, after), *slots

  return masked_step


class Rule(abc.ABC):
  """How an optimizer updates one variable and its slots, on their devices.

  Attributes:
    variable: the variable.
    name: its name.
    size: number of its elements, without padding.
    config: the optimizer's settings.
    mesh_impl: the devices of the variable.
    slots: {name of a slot: its variables, a LaidOutTensor}; the variable itself
      has the name "".
    g: the gradient, a LaidOutTensor of any float dtype.
    clip: factor of the gradient, [] float32.
    rates: {item of RATES: its value, [] float32}.
    is_finite: whether the step may change variables, [] bool.
    center: the value towards which the variable decays.
    is_decayed: whether WEIGHT_DECAY_ON makes the variable decay.
  """

  # Numbers of a step; "learning_rate" is first, if there are any.
  RATES: ClassVar[tuple[str, ...]] = ()

  @staticmethod
  def find_rates(k: tf.Tensor, config: Any) -> list[tf.Tensor]:
    """Returns RATES, [] float32 each, for step k = 1, 2, ..., [] float32."""
    raise NotImplementedError

  @staticmethod
  def scale_group(name: str, unused_config: Any) -> str:
    """Returns a key that variables share whose squares are added up.

    The key is `name` itself for a variable with its own sums. Only variables of
    layers may share sums.
    """
    return name

  def __init__(
    self,
    lowering: mtf.Lowering,
    variable: mtf.Variable,
    slots: Mapping[str, mtf.Variable],
    scalars: Sequence[mtf.Tensor],
    gradient: mtf.Tensor,
    config: Any,
  ):
    """Takes what `optimizer_updates` takes, for one variable and its slots."""
    self.variable, self.name, self.config = variable, variable.name, config
    self.center = center_of(variable.name, config.norm_scale)
    self.is_decayed = is_decayed(variable.name, config.weight_decay_on)
    self.size = math.prod(variable.sizes)
    self.mesh_impl: Placement = lowering.mesh_impl(variable)
    self._split_axes = split_axes(self.mesh_impl, variable.shape.dims)
    self.slots = {
      name: lowering.variables[x].laid_out_tensor
      for name, x in {"": variable, **slots}.items()
    }
    self._read: dict[str, Any] = {}
    self.g = lowering.tensors[gradient]
    self.clip, *rates, self.is_finite = (lowering.tensors[x] for x in scalars)
    self.rates = dict(zip(rule_of(config).RATES, rates, strict=True))

  def value(self, slot: str) -> Any:
    """Returns the values of a slot, or "" for the variable's, before the step.

    The result is a LaidOutTensor in the stored dtype.
    """
    if slot not in self._read:
      read = self.mesh_impl.slicewise(tf.convert_to_tensor, self.slots[slot])
      self._read[slot] = read
    return self._read[slot]

  def parameter_squares(self) -> Any:
    """Returns the sum of (p - center)^2, a LaidOutTensor [] float32."""
    return self.add_up(_sum_of_squares, self.value(""), self.center)

  @abc.abstractmethod
  def update_squares(self) -> Any:
    """Returns the sum of u^2 of the update u, a LaidOutTensor [] float32."""

  @abc.abstractmethod
  def assign(self, p_square: Any, u_square: Any) -> list[tf.Operation]:
    """Returns operations that assign each slice of the variable and its slots.

    The arguments are the means of (p - center)^2 and of u^2 over the variables
    with the same `scale_group`, LaidOutTensors [] float32. A rule that needs
    neither calls `wait`, because the sums read the values before the step.
    """

  def wait(self, x: Any, *signals: Any) -> Any:
    """Returns x, but lets nothing read it before the signals are known."""
    for signal in signals:
      x = self.mesh_impl.delay(x, signal)
    return x

  def add_up(self, sum_slice: Any, *operands: Any) -> Any:
    """Returns what `sum_slice` gives for each slice, summed over the slices."""
    sums = self.mesh_impl.slicewise(sum_slice, *operands)
    return self.mesh_impl.allreduce(sums, self._split_axes, "SUM")

  def update(
    self, step: Any, slots: Sequence[str], operands: Sequence[Any]
  ) -> list[tf.Operation]:
    """Returns operations that set the slots to what `step` returns.

    The first slot is "", the variable. `step` takes a list of the slots'
    slices, then the gradient's slice and those of the operands; see
    `update_if_finite` in ops/placement.py.
    """
    variables = [self.slots[x] for x in slots]
    given = [self.g, *operands]
    if self.config.keep_zeros and parse_name(self.name).is_masked:
      step = _keep_zeros(step)
    return self.mesh_impl.update_if_finite(
      step, variables, given, self.is_finite
    )


def rule_of(config: OptimizerConfig) -> type[Rule]:
  """Returns the `Rule` of an optimizer's settings."""
  # The settings import without TensorFlow, so the table of optimizers gives
  # only the name of the rule's module.
  module = importlib.import_module(f"palm_mtf.optim.{config.optimizer}")
  rule: type[Rule] = getattr(module, type(config).__name__[: -len("Config")])
  return rule


def _rule_for(name: str, config: OptimizerConfig) -> type[Rule]:
  """Returns the `Rule` of a variable: of the optimizer, or of a state."""
  if not parse_name(name).is_state:
    return rule_of(config)
  module = importlib.import_module("palm_mtf.optim.router_state")
  rule: type[Rule] = module.RouterState
  return rule


def find_rates(
  config: OptimizerConfig, step: tf.Tensor, slot_step: tf.Tensor
) -> dict[str, tf.Tensor]:
  """Returns the optimizer's numbers of a step by name, [] float32 each.

  `step` and `slot_step`, [] int64, are the numbers of steps done before: by the
  run, which decides the learning rate, and since the slots were 0.
  """
  rule = rule_of(config)
  of_step, of_slots = (
    dict(
      zip(
        rule.RATES,
        rule.find_rates(tf.cast(x + 1, tf.float32), config),
        strict=True,
      )
    )
    for x in (step, slot_step)
  )
  name = rule.RATES[0]  # the learning rate
  return of_slots | {name: of_step[name]}


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
    config: OptimizerConfig,
  ):
    # Makes the optimizer slots; for the arguments see `optimizer_updates`.
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
        for slot in parameter_slots(variable.name, variable.shape.ndims, config)
      }
      for variable in variables
    ]
    super().__init__(
      [*gradients, *itertools.chain(*scalars.values())],
      name=f"{variables[0].name}/measure",
    )
    self._trained, self._gradients = list(variables), list(gradients)
    self._scalars_of, self._config = scalars, config
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
    self._lowered: weakref.WeakKeyDictionary[mtf.Lowering, list[Rule]] = (
      weakref.WeakKeyDictionary()
    )

  def parameters(self, lowering: mtf.Lowering) -> list[Rule]:
    """Lowers the variables once, for both `Measure` and `UpdateVariables`."""
    if lowering not in self._lowered:
      self._lowered[lowering] = [
        _rule_for(variable.name, self._config)(
          lowering,
          variable,
          slots,
          self._scalars_of[variable.mesh],
          gradient,
          self._config,
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


class UpdateVariables(mtf.Operation):
  """Updates variables that share one root mean square; updates their slots.

  The attributes `variables` and `sums_of_squares` are the same as in `Measure`.

  Attributes:
    is_joined: whether the sums of squares of all layers are added up.
  """

  def __init__(
    self,
    measure: Measure,
    sums: Sequence["SumOfSquares"],
    size: int,
    is_joined: bool,
  ):
    """Updates the variables of `measure`.

    Args:
      sums: of all variables that share the root mean square, and their updates.
      size: number of elements of all these variables.
      is_joined: see above.
    """
    super().__init__(
      [*measure.inputs, *(x.value for x in sums)],
      name=measure.name.replace("/measure", "/update"),
    )
    self._measure, self._sums, self._size = measure, sums, size
    self.is_joined = is_joined
    self.variables = measure.variables
    self.sums_of_squares = measure.sums_of_squares

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to the assignments of all slices, as one operation."""
    parameters = self._measure.parameters(lowering)
    count, squares = float(self._size), collections.defaultdict(list)
    for each in self._sums:
      squares[each.of].append(lowering.tensors[each.value])
    # Each stage adds the sums in the same order, so that all means are equal.
    means = {
      impl: [
        impl.slicewise(lambda *parts: total(parts) / count, *squares[of])
        for of in ("parameter", "update")
      ]
      for impl in {x.mesh_impl: None for x in parameters}
    }
    operations = []
    for parameter in parameters:
      operations += parameter.assign(*means[parameter.mesh_impl])
    lowering.operations[self] = tf.group(operations)


def optimizer_updates(
  variables: Sequence[mtf.Variable],
  gradients: Sequence[mtf.Tensor],
  scalars: Mapping[mtf.Mesh, Sequence[mtf.Tensor]],
  config: OptimizerConfig,
  periods: Mapping[int, int] | None = None,
) -> list[UpdateVariables]:
  """Returns the operations that update all variables and slots in place.

  Args:
    variables: the trained variables.
    gradients: gradient of each variable, in its shape, any float dtype.
    scalars: for each mesh with variables: clip factor and RATES of the
      optimizer's rule, [] float32 each; and whether the step's losses and
      gradient norm are finite, [] bool. If this is false, nothing is updated.
    config: settings; schedules and GRADIENT_CLIP are unused.
    periods: on accelerators, {layer in the graph: number of layers for which
      it stands}. If layers share a root mean square, their updates then read
      sums over all these layers. Each operation updates only one layer, because
      a loop over layers runs the operation. None if the graph has all layers.
  """
  updates = []
  for key, group in scale_groups([v.name for v in variables], config).items():
    is_joined = key != variables[group[0]].name
    pairs = [(variables[i], gradients[i]) for i in group]
    by_layer = itertools.groupby(pairs, lambda x: parse_name(x[0].name).layer)
    parts = [pairs] if periods is None else [[*own] for _, own in by_layer]
    measures = [Measure(*zip(*x, strict=True), scalars, config) for x in parts]
    sums = [x for each in measures for x in each.sums_of_squares]
    size = 0
    for x in (x for x in sums if x.of == "parameter"):
      is_counted = periods and is_joined
      layer = parse_name(x.variable).layer
      size += x.size * (periods[layer] if is_counted else 1)
    updates += [UpdateVariables(x, sums, size, is_joined) for x in measures]
  return updates


def scale_groups(
  names: Sequence[str], config: OptimizerConfig
) -> dict[str, list[int]]:
  """Returns {key: indices in `names` of the variables that share its sums}.

  For Adafactor with PARAMETER_SCALE = "stacked" and names
  ["layer_000/mlp/wi", "final_norm/scale", "layer_001/mlp/wi"], the groups are
  [0, 2] and [1].
  """
  groups: dict[str, list[int]] = {}
  for position, name in enumerate(names):
    key = _rule_for(name, config).scale_group(name, config)
    groups.setdefault(key, []).append(position)
  return groups


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
  # "update": `value` is the sum of u^2 before UPDATE_CLIP scales u; for a state
  # it is the load of the busiest expert, see `largest_load`.
  of: str
  variable: str
  size: int  # number of elements of the variable, for the mean
  value: mtf.Tensor | tf.Tensor  # [] float32; tf.Tensor in a lowered graph


def total(terms: Sequence[tf.Tensor]) -> tf.Tensor:
  """Adds up float32 tensors of one shape in the given order."""
  # tf.add_n may start from any term whose buffer nothing else uses. The order
  # of the terms, and so the sum's last bit, could then differ between steps.
  return tf.reduce_sum(tf.stack(terms), axis=0)


def largest_load(sums: Iterable[SumOfSquares]) -> dict[str, tf.Tensor]:
  """Returns "expert_load", [] float32, of a model with experts; or nothing.

  It is the largest share of a layer's choices that an expert got in the step,
  times the number of experts: 1 if all experts got equal shares.
  """
  loads = [
    x.value
    for x in sums
    if x.of == "update" and parse_name(x.variable).is_state
  ]
  return {"expert_load": tf.reduce_max(tf.stack(loads))} if loads else {}


def rms_by_kind(sums: Iterable[SumOfSquares]) -> dict[str, tf.Tensor]:
  """Returns {metric name: root mean square, [] float32}.

  Names are "update_rms/<kind>" and "parameter_rms/<kind>". A kind is
  "embedding", "norm", "attention" or "mlp"; it covers all layers.
  """
  by_name = collections.defaultdict(list)
  for each in sums:
    if parse_name(each.variable).is_state:
      continue
    by_name[f"{each.of}_rms/{parse_name(each.variable).kind}"].append(each)
  return {
    name: tf.sqrt(
      total([each.value for each in group])
      / float(sum(each.size for each in group))
    )
    for name, group in by_name.items()
  }
