# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""JAX_PLATFORMS lets CPUs take the place of accelerators."""

import pytest

from palm_mtf.machine.accelerators import is_rehearsal


@pytest.mark.parametrize("value", ["", "tpu", "tpu,cpu"])
def test_only_jax_platforms_cpu_is_a_rehearsal(value, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", value)
  assert not is_rehearsal()
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert is_rehearsal()
