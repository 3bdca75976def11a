# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the executor of a run, without importing TensorFlow or JAX."""

import importlib
import logging
from typing import TYPE_CHECKING

from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.machine import processors
from palm_mtf.machine.compiled_code import check_xla_flags

if TYPE_CHECKING:  # imports TensorFlow
  from palm_mtf.executors.executor import Executor

_logger = logging.getLogger(__name__)


def uses_accelerators(mesh: DeviceMesh) -> bool:
  """Returns whether JAX, and not TensorFlow, runs the programs of a mesh.

  JAX runs a mesh for which TPU is set and, if this machine has GPUs, any mesh
  of PaLM. If JAX_PLATFORMS is "cpu" (a rehearsal), JAX runs
  these meshes on virtual CPU devices.
  """
  if mesh.tpu:
    return True
  # TensorFlow runs other models than PaLM on GPUs.
  return isinstance(mesh, MeshLayout) and processors.has_gpus()


def decodes_on_accelerators(mesh: MeshLayout, pods: PodsConfig) -> bool:
  """Returns whether JAX, and not TensorFlow, runs a trained model.

  JAX does so on the servers in ISLANDS if the run has them, otherwise on this
  machine. If TPU is set, but this machine has no TPUs and ISLANDS has no
  servers, TensorFlow runs the model on CPUs.
  """
  if not uses_accelerators(mesh):
    return False
  is_here = processors.is_rehearsal() or processors.has_tpus()
  return pods.has_islands or is_here or not mesh.tpu


def executor_of(mesh: DeviceMesh) -> "Executor":
  """Returns the executor that trains a model on a mesh."""
  return _import(uses_accelerators(mesh))


def decoding_executor(mesh: MeshLayout, pods: PodsConfig) -> "Executor":
  """Returns the executor that runs a trained model; logs if TPUs are absent."""
  on_accelerators = decodes_on_accelerators(mesh, pods)
  if mesh.tpu and not on_accelerators:
    _logger.info(f'TPU = "{mesh.tpu}": absent here, so the CPUs compute')
  return _import(on_accelerators)


def check_devices(mesh: DeviceMesh, pods: PodsConfig) -> None:
  """Raises UserError if this process cannot compute for the pods of a run."""
  if not uses_accelerators(mesh):
    check_xla_flags(mesh.pod_devices * pods.num_pods)
  elif pods.pods == "in_process":
    # Finding accelerators imports TensorFlow, which takes seconds, but data,
    # which are made next, may take hours.
    executor_of(mesh).open_here(mesh, pods.num_pods)


def _import(on_accelerators: bool) -> "Executor":
  # An executor imports JAX or TensorFlow's operations; import only one of them.
  name = "xla" if on_accelerators else "host"
  module = importlib.import_module(f"palm_mtf.executors.{name}.executor")
  executor: Executor = module.EXECUTOR
  return executor
