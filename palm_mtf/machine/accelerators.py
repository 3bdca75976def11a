# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds this machine's accelerators, without importing JAX or TensorFlow."""

import glob
import importlib.util
import os


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
