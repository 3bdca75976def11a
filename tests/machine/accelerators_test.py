# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The host path imports no JAX; TPU in gin decides who runs a program."""

import pytest

from palm_mtf.config import MeshLayout
from palm_mtf.machine.accelerators import is_rehearsal, uses_accelerators
from tests.processes import python

HOST_PATH = """
import sys
from palm_mtf.machine.process import own_process
own_process()
import palm_mtf.training.supervisor
from palm_mtf.runtime.host_functions import HOST_MODULES
for name in HOST_MODULES:
  __import__(name)
print([x for x in sys.modules if x.split(".")[0] in ("jax", "jaxlib")])
"""


def test_modules_of_training_and_of_servers_import_no_jax():
  done = python("-c", HOST_PATH)
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["[]"]


def test_a_mesh_of_tpus_uses_accelerators_on_any_machine():
  mesh = MeshLayout(mesh_shape="data:4", layout="batch:data", tpu="v4-8")
  assert uses_accelerators(mesh)


@pytest.mark.parametrize("value", ["", "tpu", "tpu,cpu"])
def test_only_jax_platforms_cpu_is_a_rehearsal(value, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", value)
  assert not is_rehearsal()
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert is_rehearsal()
