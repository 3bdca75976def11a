# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TPU in gin decides who runs a program; _tf_test.py has imports of JAX."""

import pytest

from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.executors import choose
from palm_mtf.machine import processors

TPUS = MeshLayout(mesh_shape="data:4", layout="batch:data", tpu="v4-8")
STAGES = MeshLayout(mesh_shape="", layout="", stages=2, num_microbatches=2)
PLAIN = MeshLayout(mesh_shape="", layout="")
OF_ANY_MODEL = DeviceMesh(mesh_shape="", layout="")


def name_of(executor):
  return type(executor).__name__


def test_a_mesh_of_tpus_uses_accelerators_on_any_machine():
  assert name_of(choose.executor_of(TPUS)) == "XlaExecutor"


@pytest.mark.parametrize(
  ("mesh", "name"),
  [
    (PLAIN, "XlaExecutor"),
    (STAGES, "XlaExecutor"),
    (OF_ANY_MODEL, "HostExecutor"),
  ],
)
def test_gpus_run_palm_and_its_stages(mesh, name, monkeypatch):
  assert name_of(choose.executor_of(mesh)) == "HostExecutor"
  monkeypatch.setattr(processors, "has_gpus", lambda: True)
  assert name_of(choose.executor_of(mesh)) == name


@pytest.mark.parametrize(
  ("islands", "platforms", "name"),
  [
    ((), "", "HostExecutor"),
    ((), "cpu", "XlaExecutor"),
    ([["a:1"]], "", "XlaExecutor"),
  ],
)
def test_a_model_of_tpus_decodes_on_cpus_where_there_are_none(
  islands, platforms, name, monkeypatch
):
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  monkeypatch.setattr(processors, "has_tpus", lambda: False)
  pods = PodsConfig(
    num_pods=1, islands=islands, pods="cluster" if islands else "in_process"
  )
  assert name_of(choose.decoding_executor(TPUS, pods)) == name
