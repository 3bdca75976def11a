# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Cores and their quota, from the kernel's files."""

import pytest

from palm_mtf.machine import cores


@pytest.fixture
def files(tmp_path, monkeypatch):
  """The kernel's files, of a machine whose cores 1 and 3 are ours."""
  for name in ("CPU_MAX", "CPU_QUOTA", "CPU_PERIOD"):
    monkeypatch.setattr(cores, name, tmp_path / name)
  monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {3, 1})
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
  assert cores.core_quota() == quota


@pytest.mark.parametrize(
  ("quota", "usable"),
  [("max", 2), ("50000", 1), ("100000", 1), ("190000", 1), ("900000", 2)],
)
def test_processes_at_once_are_limited_by_cores_and_quota(files, quota, usable):
  (files / "CPU_MAX").write_text(f"{quota} 100000\n")
  assert cores.usable_cores() == usable


def test_threads_are_those_of_the_cores_or_what_the_environment_asks(files):
  assert cores.visible_cores() == [1, 3]
  assert cores.thread_count({}) == 2
  assert cores.thread_count({"OMP_NUM_THREADS": "1"}) == 2
  assert cores.thread_count({"TF_NUM_INTRAOP_THREADS": "16"}) == 16
