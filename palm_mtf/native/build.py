# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the operations for this CPU, once, and keeps them."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from palm_mtf.machine.cache_folder import cache_path
from palm_mtf.machine.cpu import cpu_flags

_SOURCE = Path(__file__).parent / "operations.cc"
# No sum is added up in another order than it is written in.
_FLAGS = (
  *("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi"),
  *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_LIBRARIES = ("-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2")
# What vectors.h needs of x86-64, and what the compiler calls it.
_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512_vnni"}
_COMPILE_SECS = 300


def instruction_flags(cpu: frozenset[str], machine: str) -> list[str]:
  """Returns the compiler's options for a CPU.

  Args:
    cpu: flags of the CPU (machine/cpu.py).
    machine: `platform.machine()`.
  """
  if machine != "x86_64":
    return ["-mcpu=native"] if machine == "aarch64" else []
  if not cpu >= _AVX2:
    return ["-march=x86-64"]
  if cpu >= _AVX512:
    options = ["-march=x86-64-v4", "-mavx512vnni"]
    return options + ["-mavx512bf16"] * ("avx512_bf16" in cpu)
  return ["-march=x86-64-v3"] + ["-mavxvnni"] * ("avx_vnni" in cpu)


def panel_columns() -> int:
  """Returns the columns of a panel, kColumns of vectors.h, on this CPU."""
  options = _options_here()
  if "-mavx512vnni" in options:
    return 64
  return 32 if "-march=x86-64-v3" in options else 16


def compiled() -> str:
  """Returns the path of the library for this CPU; compiles it if need be.

  The C++ compiler is what CXX names, or `c++`.

  Raises:
    BuildError: it cannot be compiled here, for a reason in one line.
  """
  digest = hashlib.sha256()
  for part in sorted(_SOURCE.parent.glob("*.[ch]*")):
    digest.update(part.read_bytes())
  version = importlib.metadata.version("tensorflow")
  options = _options_here()
  path = cache_path("native", digest.hexdigest(), version, *options) + ".so"
  try:
    # A machine that lost power may keep a file's name without its content.
    if not os.path.exists(path) or not os.path.getsize(path):
      _compile(os.environ.get("CXX") or "c++", options, path)
  except subprocess.CalledProcessError as error:
    said = [line for line in error.stderr.splitlines() if "error" in line]
    said.append(f"{error.cmd[0]}: exit status {error.returncode}")
    raise BuildError(said[0]) from None
  except (OSError, subprocess.TimeoutExpired) as error:
    raise BuildError(str(error)) from None
  return path


class BuildError(Exception):
  """The operations cannot be compiled here."""


def _options_here() -> list[str]:
  return instruction_flags(cpu_flags(), platform.machine())


def _compile(compiler: str, options: Sequence[str], path: str) -> None:
  package = importlib.util.find_spec("tensorflow").submodule_search_locations[0]
  folder = os.path.dirname(path)
  os.makedirs(folder, mode=0o700, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder) as parts:
    made = os.path.join(parts, "made.so")
    subprocess.run(
      [
        *(compiler, *_FLAGS, *options, f"-I{package}/include", str(_SOURCE)),
        *("-o", made, f"-L{package}", *_LIBRARIES),
      ],
      check=True,
      capture_output=True,
      text=True,
      timeout=_COMPILE_SECS,
    )
    # Another process may be making the same.
    os.replace(made, path)
