# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Simulated CPUs: the flags of /proc/cpuinfo that our own code reads.

The kernels of oneDNN and XLA still depend on the real CPU; lesser_cpus_test.py
limits them in separate processes.
"""

import pathlib

import pytest

from palm_mtf.machine import processors as cpu

# Only the flags that differ between these CPUs; all of them have AVX2.
ZEN_3 = "fpu sse4_1 avx f16c avx2 fma"
SKYLAKE_X = f"{ZEN_3} avx512f avx512bw"
CASCADE_LAKE = f"{SKYLAKE_X} avx512_vnni"
ALDER_LAKE = f"{ZEN_3} avx_vnni"
ZEN_4 = f"{CASCADE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 amx_tile amx_int8"


def pretend_cpu(
  flags: str,
  folder: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
  label: str = "flags",
) -> None:
  """Lets a test see a CPU of two cores with these flags."""
  path = folder / "cpuinfo"
  core = f"processor\t: 0\nmodel name\t: A CPU\n{label}\t\t: {flags}\n\n"
  path.write_text(core * 2)
  cpu._read_once.cache_clear()
  monkeypatch.setattr(cpu, "CPUINFO", path)
  monkeypatch.setattr(cpu, "may_use_tiles", lambda: True)
  monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
