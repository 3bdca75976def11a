# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The native dtypes of a machine, and its number of cores."""

import pytest

from palm_mtf import __version__
from palm_mtf.machine import processors
from palm_mtf.machine.processors import difference, kernels_here, kernels_of
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
  ("flags", "bfloat16", "label"),
  [
    (ZEN_3, [], "flags"),
    (SKYLAKE_X, [], "flags"),
    (CASCADE_LAKE, [], "flags"),
    (ALDER_LAKE, [], "flags"),
    (ZEN_4, ["avx512_bf16"], "flags"),
    (SAPPHIRE_RAPIDS, ["amx_bf16", "avx512_bf16"], "flags"),
    ("fp asimd i8mm bf16", ["bf16"], "Features"),  # Arm
  ],
)
def test_flags_say_what_is_native(has_flags, flags, bfloat16, label):
  has_flags(flags, label)
  assert processors.bfloat16_flags() == bfloat16
  assert processors.cpu_name() == "A CPU"


@pytest.mark.parametrize(
  ("limit", "bfloat16"),
  [
    ("SSE41", []),
    ("avx2", []),
    ("AVX2_VNNI", []),  # another instruction than avx512_vnni
    ("AVX512_CORE", []),
    ("AVX512_CORE_VNNI", []),
    ("AVX512_CORE_BF16", ["avx512_bf16"]),
    ("AVX512_CORE_AMX", ["amx_bf16", "avx512_bf16"]),
    ("ALL", ["amx_bf16", "avx512_bf16"]),
  ],
)
def test_a_limit_of_onednn_holds_here_too(
  has_flags, monkeypatch, limit, bfloat16
):
  has_flags(SAPPHIRE_RAPIDS)
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
  assert processors.bfloat16_flags() == bfloat16


def test_doctor_says_whether_amx_is_used_and_why_not(has_flags, monkeypatch):
  has_flags(ZEN_4)
  assert processors.describe_amx() == ""
  has_flags(SAPPHIRE_RAPIDS)
  assert processors.describe_amx() == "used by products in bfloat16 and int8"
  monkeypatch.setattr(processors, "may_use_tiles", lambda: False)
  assert processors.describe_amx().startswith("not used: Linux gives no tiles")
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
  assert processors.describe_amx() == (
    "not used, because of ONEDNN_MAX_CPU_ISA=avx2"
  )


def test_a_cpu_that_nothing_is_known_of_has_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(processors, "CPUINFO", tmp_path / "none")
  assert processors.bfloat16_flags() == []
  assert processors.cpu_name() == "this CPU"


def test_kernels_are_chosen_by_vector_instructions_and_the_limit_of_onednn(
  has_flags, monkeypatch
):
  has_flags(f"{ZEN_4} sse4a clzero")
  everything = ["avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512bw"]
  everything += ["avx512f", "f16c", "fma"]
  assert processors.kernel_flags() == everything
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
  core = processors.kernel_flags()
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
  # Both are without VNNI and bfloat16; oneDNN's kernels differ.
  assert processors.kernel_flags()[1:] == core[1:]
  assert processors.kernel_flags() != core


@pytest.fixture
def files(tmp_path, monkeypatch):
  """The kernel's files on a machine where this process may use cores 1, 3."""
  for name in ("CPU_MAX", "CPU_QUOTA", "CPU_PERIOD"):
    monkeypatch.setattr(processors, name, tmp_path / name)
  monkeypatch.setattr(processors.os, "sched_getaffinity", lambda pid: {3, 1})
  return tmp_path


@pytest.mark.parametrize(
  ("texts", "quota"),
  [
    ({}, None),
    ({"CPU_MAX": "max 100000\n"}, None),
    ({"CPU_MAX": "250000 100000\n"}, 2.5),
    ({"CPU_QUOTA": "-1\n", "CPU_PERIOD": "100000\n"}, None),
    ({"CPU_QUOTA": "50000\n", "CPU_PERIOD": "100000\n"}, 0.5),
  ],
)
def test_the_quota_of_a_container_is_found(files, texts, quota):
  for name, text in texts.items():
    (files / name).write_text(text)
  assert processors.core_quota() == quota


@pytest.mark.parametrize(
  ("quota", "usable"),
  [("max", 2), ("50000", 1), ("100000", 1), ("190000", 1), ("900000", 2)],
)
def test_processes_at_once_are_limited_by_cores_and_quota(files, quota, usable):
  (files / "CPU_MAX").write_text(f"{quota} 100000\n")
  assert processors.usable_cores() == usable


def test_threads_are_those_of_the_cores_or_what_the_environment_asks(files):
  assert processors.visible_cores() == [1, 3]
  assert processors.thread_count({}) == 2
  assert processors.thread_count({"OMP_NUM_THREADS": "1"}) == 2
  assert processors.thread_count({"TF_NUM_INTRAOP_THREADS": "16"}) == 16


BUILT = "-march=x86-64-v4 (12.2.0)"


def test_nothing_differs_on_the_same_machine(tmp_path, monkeypatch):
  pretend_cpu(ZEN_4, tmp_path, monkeypatch)
  before = kernels_here(BUILT)
  assert before["palm_mtf"].startswith(f"{__version__} (")
  # The other flags choose no kernel; another Linux lists more of them.
  pretend_cpu(f"constant_tsc {ZEN_4} user_shstk", tmp_path, monkeypatch)
  monkeypatch.setenv("OMP_NUM_THREADS", "1")
  assert difference(kernels_here(BUILT), before) == ""


def test_every_change_is_named(tmp_path, monkeypatch):
  pretend_cpu(ZEN_4, tmp_path, monkeypatch)
  before = kernels_here(BUILT)
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
  pretend_cpu(f"{ZEN_3} avx_vnni", tmp_path, monkeypatch)
  assert difference(kernels_here("none"), before) == (
    "CPU instructions: with avx_vnni, without avx512_bf16, "
    "without avx512_vnni, without avx512bw, without avx512f; "
    f"operations in C++: none, before {BUILT}; "
    "XLA_FLAGS: --xla_cpu_max_isa=AVX2, before not set"
  )


@pytest.mark.parametrize("name", ["palm_mtf", "tensorflow", "CPU"])
def test_another_version_or_cpu_is_named(name):
  now = kernels_here(BUILT)
  before = {**now, name: "another"}
  assert difference(now, before) == f"{name}: {now[name]}, before another"


def test_what_earlier_versions_did_not_record_is_no_difference():
  now = kernels_here(BUILT)
  assert difference(now, {}) == ""
  assert difference(now, {"CPU": now["CPU"], "another": "record"}) == ""


def test_servers_are_recorded_together():
  one, other = {"CPU": "A", "tensorflow": "2"}, {"CPU": "B", "tensorflow": "2"}
  assert kernels_of([one, other, one]) == {"CPU": "A and B", "tensorflow": "2"}
  assert difference(kernels_of([one, one]), kernels_of([one])) == ""
  # If one server lacks operations in C++, no server uses them.
  built, none = ({"operations in C++": x} for x in (BUILT, "none"))
  assert kernels_of([built, none]) == none


@pytest.mark.parametrize("value", ["", "tpu", "tpu,cpu"])
def test_only_jax_platforms_cpu_is_a_rehearsal(value, monkeypatch):
  """JAX_PLATFORMS lets CPUs take the place of accelerators."""
  monkeypatch.setenv("JAX_PLATFORMS", value)
  assert not processors.is_rehearsal()
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert processors.is_rehearsal()
