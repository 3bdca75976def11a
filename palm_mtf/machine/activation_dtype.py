# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice of ACTIVATION_DTYPE = "auto": what this machine multiplies fast.

  bfloat16   on TPUs, on GPUs and CPUs that multiply it natively
  float32    elsewhere

The choice is made once for a command, before TensorFlow is imported. Weights
are float32 in every checkpoint, so a model may be read in the other dtype.
"""

import dataclasses

from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.machine.cpu import bfloat16_flags, cpu_name
from palm_mtf.machine.gpu import gpu_capabilities, gpus_multiply_bfloat16


def native_bfloat16(mesh: MeshLayout) -> str:
  """Returns what multiplies bfloat16 natively here, or "" if nothing does.

  Args:
    mesh: devices of a pod.
  """
  if mesh.tpu:
    return f"TPU {mesh.tpu}"
  return native_bfloat16_here()


def native_bfloat16_here() -> str:
  """Returns what multiplies bfloat16 natively on this host, TPUs aside."""
  if gpu_capabilities():
    return "GPU" if gpus_multiply_bfloat16() else ""
  return ", ".join(bfloat16_flags())


def fast_dtype_here() -> str:
  """Returns the dtype that this host multiplies fast, TPUs aside."""
  return "bfloat16" if native_bfloat16_here() else "float32"


def resolved(
  model: PalmConfig, mesh: MeshLayout, begun_in: str | None = None
) -> PalmConfig:
  """Returns the architecture with a dtype in place of "auto".

  Args:
    model: the architecture, as it was configured.
    mesh: devices of a pod.
    begun_in: the dtype of the run that is resumed, None for a new run.
  """
  if model.activation_dtype != "auto":
    return model
  fast = "bfloat16" if native_bfloat16(mesh) else "float32"
  return dataclasses.replace(model, activation_dtype=begun_in or fast)


def described(
  model: PalmConfig, mesh: MeshLayout, begun_in: str | None = None
) -> str:
  """Returns the line that says what a run computes in, and why.

  Args:
    model: the architecture, resolved.
    mesh: devices of a pod.
    begun_in: the dtype of the run that is resumed, None for a new run.
  """
  dtype, native = model.activation_dtype, native_bfloat16(mesh)
  begun = ", as the run began" if begun_in == dtype else ""
  if native:
    here = f"native bfloat16: {native}"
  elif gpu_capabilities():
    here = "a GPU without native bfloat16"
  else:
    here = f"no native bfloat16: {cpu_name()}"
  return f"computing in {dtype}{begun} ({here})"


def is_slow(model: PalmConfig, mesh: MeshLayout) -> bool:
  """Returns whether products are in bfloat16 and the devices have none."""
  return model.activation_dtype == "bfloat16" and not native_bfloat16(mesh)
