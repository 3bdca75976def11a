# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a CPU computes natively is read off its flags."""

import pytest

from palm_mtf.machine import cpu
from tests.cpus import (
  ALDER_LAKE,
  CASCADE_LAKE,
  SAPPHIRE_RAPIDS,
  SKYLAKE_X,
  ZEN_3,
  ZEN_4,
  pretend_cpu,
)


@pytest.fixture
def has_flags(tmp_path, monkeypatch):
  """Returns a function that pretends a CPU with flags."""
  return lambda flags, label="flags": pretend_cpu(
    flags, tmp_path, monkeypatch, label
  )


@pytest.mark.parametrize(
  ("flags", "bfloat16", "int8", "label"),
  [
    (ZEN_3, [], False, "flags"),
    (SKYLAKE_X, [], False, "flags"),
    (CASCADE_LAKE, [], True, "flags"),
    (ALDER_LAKE, [], True, "flags"),
    (ZEN_4, ["avx512_bf16"], True, "flags"),
    (SAPPHIRE_RAPIDS, ["amx_bf16", "avx512_bf16"], True, "flags"),
    ("fp asimd i8mm bf16", ["bf16"], True, "Features"),  # Arm
  ],
)
def test_flags_say_what_is_native(has_flags, flags, bfloat16, int8, label):
  has_flags(flags, label)
  assert cpu.bfloat16_flags() == bfloat16
  assert cpu.sums_int8_in_32_bits() == int8
  assert cpu.cpu_name() == "A CPU"


@pytest.mark.parametrize(
  ("limit", "bfloat16", "int8"),
  [
    ("SSE41", [], False),
    ("avx2", [], False),
    ("AVX2_VNNI", [], False),  # another instruction than avx512_vnni
    ("AVX512_CORE", [], False),
    ("AVX512_CORE_VNNI", [], True),
    ("AVX512_CORE_BF16", ["avx512_bf16"], True),
    ("AVX512_CORE_AMX", ["amx_bf16", "avx512_bf16"], True),
    ("ALL", ["amx_bf16", "avx512_bf16"], True),
  ],
)
def test_a_limit_of_onednn_holds_here_too(
  has_flags, monkeypatch, limit, bfloat16, int8
):
  has_flags(SAPPHIRE_RAPIDS)
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
  assert cpu.bfloat16_flags() == bfloat16
  assert cpu.sums_int8_in_32_bits() == int8


def test_a_cpu_that_nothing_is_known_of_has_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "none")
  assert cpu.bfloat16_flags() == []
  assert not cpu.sums_int8_in_32_bits()
  assert cpu.cpu_name() == "this CPU"


def test_kernels_are_chosen_by_vector_instructions_and_the_limit_of_onednn(
  has_flags, monkeypatch
):
  has_flags(f"{ZEN_4} sse4a clzero")
  everything = ["avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512bw"]
  everything += ["avx512f", "f16c", "fma"]
  assert cpu.kernel_flags() == everything
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
  core = cpu.kernel_flags()
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
  # Both are without VNNI and bfloat16; oneDNN's kernels differ.
  assert cpu.kernel_flags()[1:] == core[1:]
  assert cpu.kernel_flags() != core
