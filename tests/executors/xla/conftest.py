# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Virtual CPU devices take the place of accelerators in these tests."""

import sys

import jax
import pytest

from palm_mtf.executors.xla import decode_arrays, pod_arrays
from palm_mtf.machine.host_memory import free_garbage


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch):
  """Frees the programs of a test, of which a worker could hold only a few."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  yield
  pod_arrays.programs_of.cache_clear()
  pod_arrays.make_pod_step.cache_clear()
  decode_arrays.make_programs.cache_clear()
  jax.clear_caches()
  # JAX keeps the last 128 functions of TensorFlow that it has called.
  call_tf = sys.modules["jax.experimental.jax2tf.call_tf"]
  call_tf._get_concrete_function_tf.cache_clear()
  free_garbage()
