# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding is compiled for the CPU at hand, or done without."""

import platform
from pathlib import Path

import pytest

from palm_mtf.machine import cpu
from palm_mtf.native import build, operations
from tests.cpus import (
  ALDER_LAKE,
  CASCADE_LAKE,
  SKYLAKE_X,
  ZEN_3,
  ZEN_4,
  pretend_cpu,
)


@pytest.mark.parametrize(
  ("flags", "options", "columns"),
  [
    ("fpu sse4_1 avx", ["-march=x86-64"], 16),
    (ZEN_3, ["-march=x86-64-v3"], 32),
    (SKYLAKE_X, ["-march=x86-64-v3"], 32),
    (ALDER_LAKE, ["-march=x86-64-v3", "-mavxvnni"], 32),
    (CASCADE_LAKE, ["-march=x86-64-v4", "-mavx512vnni"], 64),
    (ZEN_4, ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"], 64),
  ],
)
def test_no_instruction_is_used_that_the_cpu_lacks(
  flags, options, columns, tmp_path, monkeypatch
):
  pretend_cpu(flags, tmp_path, monkeypatch)
  assert build.instruction_flags(cpu.cpu_flags(), "x86_64") == options
  monkeypatch.setattr(platform, "machine", lambda: "x86_64")
  assert build.panel_columns() == columns


@pytest.mark.parametrize(
  ("compiler", "reason"),
  [("no-such-compiler", "No such file"), ("false", "exit status 1")],
)
def test_without_a_compiler_there_are_no_operations_and_one_warning(
  compiler, reason, tmp_path, monkeypatch, caplog
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setenv("CXX", compiler)
  assert operations.operations.__wrapped__() is None
  (line,) = caplog.messages  # of the one logger
  assert reason in line
  assert line.endswith("install g++ 11 or newer, or name it by CXX")


def test_an_empty_file_is_no_library(tmp_path, monkeypatch):
  path = tmp_path / "empty"
  path.with_suffix(".so").touch()
  monkeypatch.setattr(build, "cache_path", lambda *_: str(path))
  monkeypatch.setenv("CXX", "no-such-compiler")
  with pytest.raises(build.BuildError, match="no-such-compiler"):
    build.compiled()


def test_what_is_compiled_is_kept(monkeypatch):
  path = Path(build.compiled())
  monkeypatch.setenv("CXX", "no-such-compiler")
  assert build.compiled() == str(path)
  assert {x.suffix for x in path.parent.iterdir() if x.is_file()} == {".so"}
