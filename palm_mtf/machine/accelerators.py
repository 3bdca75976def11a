# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which devices a run uses, found without an import of JAX or TensorFlow."""

import glob
import importlib.util
import os

from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.config.mesh_layout import MeshLayout


def uses_accelerators(mesh: DeviceMesh) -> bool:
  """Returns whether JAX, and not TensorFlow, runs the programs of a mesh.

  JAX runs them on TPUs, on GPUs, or in rehearsals on virtual CPU devices.
  """
  if mesh.tpu:
    return True
  # Stages, and models other than PaLM, run only on TensorFlow's devices.
  return isinstance(mesh, MeshLayout) and mesh.stages == 1 and has_gpus()


def has_gpus() -> bool:
  """Returns whether this machine has NVIDIA GPUs and JAX's plugin for them."""
  has_jax = importlib.util.find_spec("jax_cuda12_plugin") is not None
  return has_jax and bool(glob.glob("/dev/nvidia[0-9]*"))


def is_rehearsal() -> bool:
  """Returns whether virtual CPU devices take the place of accelerators.

  They do so if the environment variable JAX_PLATFORMS, which JAX reads, is
  "cpu".
  """
  return os.environ.get("JAX_PLATFORMS") == "cpu"
