# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TPU in gin decides who runs a program; _tf_test.py has imports of JAX."""

import pytest

from palm_mtf.config import MeshLayout
from palm_mtf.machine.accelerators import is_rehearsal, uses_accelerators


def test_a_mesh_of_tpus_uses_accelerators_on_any_machine():
  mesh = MeshLayout(mesh_shape="data:4", layout="batch:data", tpu="v4-8")
  assert uses_accelerators(mesh)


@pytest.mark.parametrize("value", ["", "tpu", "tpu,cpu"])
def test_only_jax_platforms_cpu_is_a_rehearsal(value, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", value)
  assert not is_rehearsal()
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert is_rehearsal()
