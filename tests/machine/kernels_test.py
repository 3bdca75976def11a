# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels are recorded by name, and compared."""

import pytest

from palm_mtf import __version__
from palm_mtf.machine.kernels import difference, kernels_here, kernels_of
from tests.cpus import ZEN_3, ZEN_4, pretend_cpu

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
