# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""ACTIVATION_DTYPE = "auto" is bfloat16 where it is native, else float32."""

import dataclasses

import pytest

from palm_mtf.config import MeshLayout
from palm_mtf.machine import activation_dtype
from palm_mtf.machine.activation_dtype import is_slow, log_dtype, resolve_dtype
from tests.mtf_testing import SINGLE, small_config

AUTO = small_config(activation_dtype="auto")
TPU = MeshLayout(
  mesh_shape="data:8", layout="batch:data", num_microbatches=1, tpu="v3-8"
)
NEW_CPU = {"cpu": ["avx512_bf16"]}
V100 = {"gpus": [7], **NEW_CPU}  # next to a new CPU


@pytest.fixture
def has(monkeypatch):
  """Returns a function that pretends a machine's processors."""

  def pretend(*, cpu=(), gpus=()):
    for name, value in (
      ("bfloat16_flags", list(cpu)),
      ("cpu_name", "A CPU"),
      ("gpu_capabilities", list(gpus)),
      ("gpus_multiply_bfloat16", bool(gpus) and min(gpus) >= 8),
    ):
      monkeypatch.setattr(activation_dtype, name, lambda value=value: value)

  return pretend


@pytest.fixture
def logged(caplog):
  """Returns a function that returns the last line of the log."""
  caplog.set_level("INFO", "palm_mtf")
  return lambda: caplog.messages[-1]


@pytest.mark.parametrize(
  ("machine", "mesh", "dtype", "line"),
  [
    ({}, SINGLE, "float32", "no native bfloat16: A CPU"),
    (NEW_CPU, SINGLE, "bfloat16", "native bfloat16: avx512_bf16"),
    ({"gpus": [9]}, SINGLE, "bfloat16", "native bfloat16: GPU"),
    (V100, SINGLE, "float32", "a GPU without native bfloat16"),
    ({}, TPU, "bfloat16", "native bfloat16: TPU v3-8"),
  ],
)
def test_auto_is_what_the_devices_multiply_natively(
  has, logged, machine, mesh, dtype, line
):
  has(**machine)
  model = resolve_dtype(AUTO, mesh)
  assert model.activation_dtype == dtype
  log_dtype(model, mesh)
  assert logged() == f"computing in {dtype} ({line})"
  assert not is_slow(model, mesh)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_that_is_named_stays(has, dtype):
  has()
  model = dataclasses.replace(AUTO, activation_dtype=dtype)
  assert resolve_dtype(model, SINGLE, begun_in="float32") is model
  assert is_slow(model, SINGLE) == (dtype == "bfloat16")


def test_a_run_goes_on_in_the_dtype_it_began_with(has, logged):
  has(cpu=["amx_bf16"])
  model = resolve_dtype(AUTO, SINGLE, begun_in="float32")
  log_dtype(model, SINGLE, "float32")
  assert logged() == (
    "computing in float32, as the run began (native bfloat16: amx_bf16)"
  )
  has()
  model = resolve_dtype(AUTO, SINGLE, begun_in="bfloat16")
  assert is_slow(model, SINGLE)
