# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The GPUs that TensorFlow will compute on, asked of NVIDIA's driver."""

import ctypes
import ctypes.util
import importlib.util

# Of the driver's interface, cuda.h.
_COMPUTE_CAPABILITY_MAJOR = 75
# The first with products of bfloat16: A100.
_BFLOAT16_CAPABILITY = 8


def gpu_capabilities() -> list[int]:
  """Returns the major compute capability of every GPU of TensorFlow."""
  try:
    cuda = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return []  # no driver
  if not _has_cudnn():  # without it TensorFlow computes on the CPU
    return []
  count, value = ctypes.c_int(), ctypes.c_int()
  if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    return []
  found = []
  for device in range(count.value):
    cuda.cuDeviceGetAttribute(
      ctypes.byref(value), _COMPUTE_CAPABILITY_MAJOR, device
    )
    found.append(value.value)
  return found


def gpus_multiply_bfloat16() -> bool:
  """Returns whether there are GPUs, all with native products of bfloat16."""
  return min(gpu_capabilities(), default=0) >= _BFLOAT16_CAPABILITY


def _has_cudnn() -> bool:
  """Returns whether cuDNN is installed, as a Python package or otherwise."""
  try:
    if importlib.util.find_spec("nvidia.cudnn"):
      return True
  except ModuleNotFoundError:  # there is no package `nvidia`
    pass
  return ctypes.util.find_library("cudnn") is not None
