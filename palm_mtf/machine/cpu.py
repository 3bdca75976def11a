# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU instructions for bfloat16 and int8, by the flags that Linux lists."""

import os
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

# Multiply bfloat16 numbers and add up in float32; "bf16" is Arm's.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# Multiply 8-bit integers and add up in 32 bits. What x86 CPUs without them do
# adds pairs of products in 16 bits, and saturates.
INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"})

# 256-bit registers, for the code that we compile.
AVX2_FLAGS = frozenset({"avx2"})

_VECTORS = re.compile("avx|amx|fma|f16c|asimd|sve|sme|bf16|i8mm")

# This variable lets oneDNN, whose kernels multiply, do without some
# instructions, which simulates a lesser CPU. For each limit the flags above
# that remain; other limits leave all.
_LIMIT = "ONEDNN_MAX_CPU_ISA"
_NONE = frozenset()
_LIMITS = {
  "SSE41": _NONE,
  "AVX": _NONE,
  "AVX2": AVX2_FLAGS,
  "AVX2_VNNI": AVX2_FLAGS | {"avx_vnni"},
  "AVX2_VNNI_2": AVX2_FLAGS | {"avx_vnni"},
  "AVX512_CORE": AVX2_FLAGS,
  "AVX512_CORE_VNNI": AVX2_FLAGS | {"avx512_vnni"},
  "AVX512_CORE_BF16": AVX2_FLAGS | {"avx512_vnni", "avx512_bf16"},
  "AVX512_CORE_FP16": AVX2_FLAGS | {"avx512_vnni", "avx512_bf16"},
}


def cpu_flags() -> frozenset[str]:
  """Returns the flags of the CPU that oneDNN may use."""
  flags = frozenset(_entry("flags|Features").split())
  limit = os.environ.get(_LIMIT, "").upper()
  if limit in _LIMITS:
    flags -= (BFLOAT16_FLAGS | INT8_FLAGS | AVX2_FLAGS) - _LIMITS[limit]
  return flags


def kernel_flags() -> list[str]:
  """Returns the flags by which kernels are chosen, sorted.

  They are vector instructions of x86-64 and Arm, and the limit that oneDNN has.
  Kernels for different flags may compute different bits.
  """
  limit = os.environ.get(_LIMIT)
  limits = [f"{_LIMIT}={limit.upper()}"] if limit else []
  return limits + sorted(filter(_VECTORS.match, cpu_flags()))


def cpu_name() -> str:
  """Returns the name that the maker gave the CPU, or "this CPU"."""
  return _entry("model name") or "this CPU"


def bfloat16_flags() -> list[str]:
  """Returns the flags of native bfloat16 products, sorted."""
  return sorted(cpu_flags() & BFLOAT16_FLAGS)


def sums_int8_in_32_bits() -> bool:
  """Returns whether the CPU's products of 8-bit integers never saturate."""
  return bool(cpu_flags() & INT8_FLAGS)


def _entry(names: str) -> str:
  """Returns the value of CPUINFO's first line of these names, or ""."""
  try:
    text = CPUINFO.read_text(encoding="utf-8", errors="replace")
  except OSError:
    return ""
  match = re.search(rf"^(?:{names})[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
  return match[1].strip() if match else ""
