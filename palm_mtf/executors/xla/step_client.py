# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds training steps on pods of accelerators."""

import dataclasses
from collections.abc import Sequence

from palm_mtf.config import (
  LossConfig,
  MeshLayout,
  ModelConfig,
  OptimizerConfig,
  PodsConfig,
  StepConfig,
)
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.executors.xla import pod_arrays
from palm_mtf.executors.xla.devices import AcceleratorDevices
from palm_mtf.executors.xla.parts import LoweringError
from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.stages_builder import StagesBuilder
from palm_mtf.executors.xla.step_builder import StepBuilder
from palm_mtf.executors.xla.whole_model import WholeSettings, name_loss_function
from palm_mtf.json_text import named_text
from palm_mtf.programs.features import (
  ServerFeatures,
)
from palm_mtf.programs.loss_function import LossFunction
from palm_mtf.programs.model_loss import text_loss
from palm_mtf.programs.step_programs import (
  LossProgram,
  StepPrograms,
)


def build_train_program(
  config: StepConfig,
  *,
  batch_size: int,
  seed: int,
  frozen: Sequence[str] = (),
  features: Sequence[str] | ServerFeatures,
  devices: AcceleratorDevices,
) -> StepPrograms:
  """Builds a training step of PaLM in the current tf.Graph.

  Takes the arguments of `build_train_program` in programs/train_program.py.
  """
  is_read = isinstance(features, ServerFeatures)
  names, read = features if is_read else (features, None)
  if config.model.model_function:
    mesh = _to_device_mesh(config.mesh_layout)
    num_rows = batch_size // config.pods.num_pods // mesh.num_microbatches
    return build_program(
      text_loss(config, names, num_rows=num_rows, seed=seed, frozen=frozen),
      mesh,
      config.optimizer,
      batch_size=batch_size,
      pods=config.pods,
      devices=devices,
    )
  settings = StepSettings(
    model=config.model,
    mesh_layout=config.mesh_layout,
    optimizer=config.optimizer,
    loss=config.loss,
    features=list(names),
    num_rows=batch_size // config.pods.num_pods,
    dcn_dtype=config.pods.dcn_dtype,
    seed=seed,
    frozen=list(frozen),
  )
  builder = StagesBuilder if config.mesh_layout.stages > 1 else StepBuilder
  return builder(settings, devices, read).build(config.pods)


def _to_device_mesh(layout: MeshLayout) -> DeviceMesh:
  """Returns the settings that a model other than PaLM has, too."""
  names = [x.name for x in dataclasses.fields(DeviceMesh)]
  return DeviceMesh(**{name: getattr(layout, name) for name in names})


def build_program(
  loss_function: LossFunction,
  mesh_layout: DeviceMesh,
  optimizer: OptimizerConfig,
  *,
  batch_size: int,
  pods: PodsConfig,
  devices: AcceleratorDevices,
) -> StepPrograms:
  """Builds a training step of any model in the current tf.Graph.

  Takes the arguments of `build_program` in programs/train_program.py.
  """
  settings = WholeSettings(
    loss_function=name_loss_function(loss_function),
    mesh_layout=mesh_layout,
    optimizer=optimizer,
    num_rows=batch_size // pods.num_pods,
    dcn_dtype=pods.dcn_dtype,
  )
  programs = StepBuilder(settings, devices, None).build(pods)
  try:
    pod_arrays.make_programs(named_text(settings), 0, 1).lower()
  except LoweringError as error:
    operation, reason = error.args
    raise UserError(
      f"the model function's operation {operation} cannot run on TPUs: "
      f"{reason.rstrip('.')}; "
      'use another operation, or set TPU = "" to train on CPUs.'
    ) from error
  return programs


def build_loss_program(
  config: ModelConfig,
  mesh_layout: MeshLayout,
  *,
  batch_size: int,
  features: Sequence[str],
  devices: AcceleratorDevices,
) -> LossProgram:
  """Builds the loss of a batch on one pod, which needs no optimizer slots.

  Takes the arguments of `build_forward_program` in programs/forward_program.py.
  """
  settings = StepSettings(
    model=config,
    mesh_layout=dataclasses.replace(mesh_layout, num_microbatches=1),
    optimizer=None,
    loss=LossConfig(z_loss=0.0),
    features=list(features),
    num_rows=batch_size,
    dcn_dtype="float32",
    seed=0,
  )
  return StepBuilder(settings, devices, None).build_loss()
