# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""ACTIVATION_DTYPE = "auto": bfloat16 if it is native, otherwise float32.

A command chooses once, before it imports TensorFlow.
"""

import dataclasses
import logging

from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.machine.processors import (
  bfloat16_flags,
  cpu_name,
  gpu_capabilities,
  gpus_multiply_bfloat16,
)

_logger = logging.getLogger(__name__)


def native_bfloat16(tpu: str = "") -> str:
  """Returns the name of hardware that multiplies bfloat16 natively, or "".

  It is the TPU slice `tpu` or, if `tpu` is "", this machine's CPU or GPU.
  """
  if tpu:
    return f"TPU {tpu}"
  # TensorFlow places a model on the GPU if there is one.
  if gpu_capabilities():
    return "GPU" if gpus_multiply_bfloat16() else ""
  return ", ".join(bfloat16_flags())


def resolve_dtype(
  model: ModelConfig, mesh: MeshLayout, begun_in: str | None = None
) -> ModelConfig:
  """Returns `model` with a dtype in place of ACTIVATION_DTYPE = "auto".

  `begun_in` is the dtype in which the resumed run began; None for a new run.
  """
  if model.activation_dtype != "auto":
    return model
  # Checkpoints are float32 with either dtype. A resumed run still keeps its
  # dtype on another machine, because another dtype would change its results.
  fast = "bfloat16" if native_bfloat16(mesh.tpu) else "float32"
  return dataclasses.replace(model, activation_dtype=begun_in or fast)


def log_dtype(
  model: ModelConfig, mesh: MeshLayout, begun_in: str | None = None
) -> None:
  """Logs the dtype in which a command computes, and why.

  Results of different dtypes differ in the third digit. `model` has a dtype in
  place of "auto", chosen for the same `mesh` and `begun_in`.
  """
  dtype, native = model.activation_dtype, native_bfloat16(mesh.tpu)
  begun = ", as the run began" if begun_in == dtype else ""
  if native:
    here = f"native bfloat16: {native}"
  elif gpu_capabilities():
    here = "a GPU without native bfloat16"
  else:
    here = f"no native bfloat16: {cpu_name()}"
  _logger.info(f"computing in {dtype}{begun} ({here})")


def is_slow(model: ModelConfig, mesh: MeshLayout) -> bool:
  """Returns whether a model multiplies in emulated bfloat16."""
  return model.activation_dtype == "bfloat16" and not native_bfloat16(mesh.tpu)
