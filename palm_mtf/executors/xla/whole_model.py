# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Any model and its loss: JAX runs the whole graph, and scans no layers."""

import dataclasses
import secrets
import weakref

import jax
import jax.numpy as jnp

from palm_mtf._tf import tf
from palm_mtf.config import OPTIMIZERS, OptimizerConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.executors.xla.device_model import Arrays, DeviceModel
from palm_mtf.executors.xla.device_update import DeviceUpdate
from palm_mtf.executors.xla.parts import DeviceFunction
from palm_mtf.executors.xla.xla_placement import RANDOM_STATE
from palm_mtf.programs.loss_function import LossFunction
from palm_mtf.programs.pod import Update

# Loss functions of this process, by the names in `WholeSettings`: a text, such
# as a host's settings, cannot hold a function.
_loss_functions: weakref.WeakValueDictionary[str, LossFunction] = (
  weakref.WeakValueDictionary()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeSettings:
  """All settings that the training programs of a pod depend on."""

  # Name that `name_loss_function` gave the model and its loss.
  loss_function: str
  mesh_layout: DeviceMesh  # axes and layout rules of a pod
  optimizer: OptimizerConfig = dataclasses.field(
    metadata={"choices": OPTIMIZERS}
  )
  num_rows: int  # rows of a step in one pod, in all microbatches
  dcn_dtype: str  # dtype in which pods exchange gradients

  @property
  def micro_rows(self) -> int:
    """Number of rows that one pod has in each microbatch."""
    return self.num_rows // self.mesh_layout.num_microbatches


def name_loss_function(loss_function: LossFunction) -> str:
  """Returns a name by which this process finds a loss function while it lives.

  `loss_function` takes a microbatch of one pod.
  """
  name = secrets.token_hex(8)
  _loss_functions[name] = loss_function
  return name


class WholeModel(DeviceModel):
  """Loss and gradients of a microbatch, each one function of a device."""

  def __init__(self, settings: WholeSettings, platform: str):
    """Builds the graph; `platform` is "cpu", "tpu" or "cuda"."""
    loss_function = _loss_functions[settings.loss_function]
    for name, feature in loss_function.features.items():
      _check_dtype("feature", name, feature.dtype)
    super().__init__(loss_function, settings.mesh_layout, platform)
    for x in self.mesh.graph.all_variables:
      _check_dtype("variable", x.name, x.slice_dtype)
    given = [x.outputs[0] for x in self.features.values()]
    losses = [*self.losses.values()]
    self._find_losses, self._find_gradients = (
      DeviceFunction(self.placement, given, gives, open_axes=self.open_axes)
      for gives in (losses, [*losses, *self.gradients.values()])
    )

  def find_gradients(
    self, variables: Arrays, batch: Arrays, dropout_state: jax.Array
  ) -> tuple[Arrays, Arrays]:
    """Returns one device's terms; see `ScannedModel.find_gradients`.

    Random operations of the model depend on `dropout_state`.
    """
    values = self._call(self._find_gradients, variables, batch, dropout_state)
    return (
      {name: values[x] for name, x in self.losses.items()},
      {name: values[x] for name, x in self.gradients.items()},
    )

  def find_losses(self, variables: Arrays, batch: Arrays) -> Arrays:
    """Returns one device's terms of the losses' sums."""
    state = jnp.array([-1, 0, 0, 0])
    values = self._call(self._find_losses, variables, batch, state)
    return {name: values[x] for name, x in self.losses.items()}

  def _call(
    self, function: DeviceFunction, variables: Arrays, batch: Arrays, state
  ):
    given = {x.outputs[0]: batch[name] for name, x in self.features.items()}
    return function(given, {**variables, RANDOM_STATE: state})[0]


def _check_dtype(kind: str, name: str, dtype: tf.DType) -> None:
  """Raises UserError unless JAX has arrays of the dtype."""
  if dtype in (tf.int64, tf.float64) or dtype.as_numpy_dtype is object:
    raise UserError(
      f"{kind} {name} is {dtype.name}: accelerators hold numbers of at most 32 "
      "bits; give it a dtype such as int32 or float32."
    )


class WholeUpdate(DeviceUpdate):
  """The update of a pod's variables as one function of a device."""

  def __init__(self, settings: WholeSettings, model: WholeModel):
    """Adds the update to the graph of `model`."""
    trained, losses = model.variables, [*model.sums.terms]
    super().__init__(model.placement, trained, losses, settings.optimizer)

  def _build_functions(self, update: Update) -> None:
    given = [*self._gradients.values(), *self._given.values()]
    gives = list(dict.fromkeys(self.fetched.values()))
    self._function = DeviceFunction(
      self._placement, given, gives, update.operations
    )

  def num_periods(self, name: str) -> int | None:
    """Returns None: each metric has one value."""

  def apply(
    self, variables: Arrays, gradients: Arrays, numbers: Arrays
  ) -> tuple[Arrays, Arrays]:
    """Returns the next variables, and metrics; see `ScannedUpdate.apply`."""
    taken = {self._gradients[x]: y for x, y in gradients.items()}
    taken |= {self._given[x]: y for x, y in numbers.items()}
    found, assigned = self._function(taken, variables)
    metrics = {name: found[x] for name, x in self.fetched.items()}
    return {**variables, **assigned}, metrics
