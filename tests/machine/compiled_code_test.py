# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA keeps its code for this CPU and these versions alone."""

import os

import pytest

from palm_mtf.machine.compiled_code import (
  compiled_code_folder,
  keep_compiled_code,
)
from tests.cpus import ZEN_3, ZEN_4, pretend_cpu


@pytest.fixture
def caches(tmp_path, monkeypatch):
  # Set first, so that it is taken back in any case.
  monkeypatch.setenv("TF_XLA_FLAGS", "")
  monkeypatch.delenv("TF_XLA_FLAGS")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
  return tmp_path / "caches"


def test_code_of_one_cpu_is_never_given_to_another(
  caches, tmp_path, monkeypatch
):
  folders = set()
  for cpu_flags in (ZEN_3, ZEN_4):
    pretend_cpu(cpu_flags, tmp_path, monkeypatch)
    folders.add(compiled_code_folder())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2")
    folders.add(compiled_code_folder())
    monkeypatch.delenv("XLA_FLAGS")
  assert len(folders) == 4
  assert all(x.startswith(str(caches / "palm_mtf" / "xla")) for x in folders)


def test_the_folder_is_named_to_tensorflow_and_cleared_of_lost_files(caches):
  keep_compiled_code()
  folder = compiled_code_folder()
  assert os.environ["TF_XLA_FLAGS"] == (
    f"--tf_xla_persistent_cache_directory={folder}"
  )
  assert os.stat(folder).st_mode & 0o777 == 0o700
  for name, content in (("lost", b""), ("kept", b"code")):
    with open(os.path.join(folder, name), "wb") as file:
      file.write(content)
  del os.environ["TF_XLA_FLAGS"]
  keep_compiled_code()
  assert os.listdir(folder) == ["kept"]


def test_flags_of_the_user_stay(caches, monkeypatch):
  monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=0")
  keep_compiled_code()
  assert os.environ["TF_XLA_FLAGS"] == "--tf_xla_auto_jit=0"
  assert not caches.exists()


def test_without_a_place_to_write_nothing_is_kept(caches):
  caches.write_text("a file where the folder would be")
  keep_compiled_code()
  assert "TF_XLA_FLAGS" not in os.environ
