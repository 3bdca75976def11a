# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds which devices a run uses, without importing JAX or TensorFlow."""

import glob
import importlib.util
import os

from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.pods import PodsConfig


def uses_accelerators(mesh: DeviceMesh) -> bool:
  """Returns whether JAX, and not TensorFlow, runs the programs of a mesh.

  JAX runs a mesh for which TPU is set and, if this machine has GPUs, any mesh
  of PaLM that is no pipeline (STAGES = 1). If JAX_PLATFORMS is "cpu" (a
  rehearsal), JAX runs these meshes on virtual CPU devices.
  """
  if mesh.tpu:
    return True
  # Stages, and models other than PaLM, run only on TensorFlow's devices.
  return isinstance(mesh, MeshLayout) and mesh.stages == 1 and has_gpus()


def decodes_on_accelerators(mesh: MeshLayout, pods: PodsConfig) -> bool:
  """Returns whether JAX, and not TensorFlow, runs a trained model.

  JAX does so on the servers that the run lists in ISLANDS or, if it lists none,
  on this machine. If TPU is set, but this machine has no TPUs and ISLANDS lists
  no servers, TensorFlow runs the model on CPUs.
  """
  if not uses_accelerators(mesh):
    return False
  has_none = mesh.tpu and not (is_rehearsal() or has_tpus())
  return pods.has_islands or not has_none


def has_tpus() -> bool:
  """Returns whether this machine has TPUs and JAX's library for them."""
  if importlib.util.find_spec("libtpu") is None:
    return False
  return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def has_gpus() -> bool:
  """Returns whether this machine has NVIDIA GPUs and JAX's plugin for them."""
  has_jax = importlib.util.find_spec("jax_cuda12_plugin") is not None
  return has_jax and bool(glob.glob("/dev/nvidia[0-9]*"))


def is_rehearsal() -> bool:
  """Returns whether JAX's virtual CPU devices replace the accelerators."""
  return os.environ.get("JAX_PLATFORMS") == "cpu"
