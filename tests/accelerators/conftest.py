# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Virtual CPU devices take the place of accelerators in these tests."""

import gc

import jax
import pytest

from palm_mtf.accelerators import pod


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  yield
  pod.make_programs.cache_clear()
  pod.make_pod_step.cache_clear()
  jax.clear_caches()
  gc.collect()
