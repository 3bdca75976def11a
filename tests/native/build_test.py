# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations are compiled for this CPU, or TensorFlow's are used."""

import os
import platform
import tempfile

import pytest

from palm_mtf.machine import processors as cpu
from palm_mtf.native import build, operations
from tests import processes
from tests.cpus import (
  ALDER_LAKE,
  CASCADE_LAKE,
  SAPPHIRE_RAPIDS,
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
    (
      SAPPHIRE_RAPIDS,
      [
        *("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        *("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
      ],
      64,
    ),
  ],
)
def test_no_instruction_is_used_that_the_cpu_lacks(
  flags, options, columns, tmp_path, monkeypatch
):
  pretend_cpu(flags, tmp_path, monkeypatch)
  assert build.choose_instruction_flags(cpu.cpu_flags(), "x86_64") == options
  monkeypatch.setattr(platform, "machine", lambda: "x86_64")
  assert build.count_panel_columns() == columns


# A library that consists of the word that load_library looks for.
MADE = """
while [ "$1" != -o ]; do shift; done
printf 'palm_mtf was built with -mword (1)' > "$2"
"""


@pytest.fixture
def caches(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
  return tmp_path / "caches" / "palm_mtf"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
  """Returns a function that makes a compiler from a shell script."""
  folder = tmp_path / "programs"
  folder.mkdir()
  monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

  def make(script=MADE, name="a-compiler"):
    (folder / name).write_text(f"#!/bin/sh\n{script}")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("CXX", name)
    return folder / name

  return make


def files(folder):
  return [x for x in folder.rglob("*") if x.is_file()]


@pytest.mark.parametrize(
  ("script", "reason"),
  [
    (None, "no-such-compiler: no such compiler; install g++ 11"),
    ("exit 3", "a-compiler: exit status 3; install g++ 11"),
    ("exit 0", "has made no library; install g++ 11"),
    ("echo nothing > operations.so", "has made no library; install g++ 11"),
    (
      "printf 'caf\\351: error: \\351\\n' >&2; exit 1",
      "caf\ufffd: error: \ufffd;",
    ),
    ("echo bad option; exit 1", "a-compiler: bad option; install g++ 11"),
    ("echo 'x.cc:1: error: 1'; echo 'error: 2'; exit 1", "x.cc:1: error: 1;"),
  ],
)
def test_without_a_library_there_are_no_operations_and_one_warning(
  script, reason, caches, compiler, monkeypatch, caplog
):
  compiler(script or "")
  if script is None:
    monkeypatch.setenv("CXX", "no-such-compiler")
  assert operations._load.__wrapped__().module is None
  (line,) = (x.message for x in caplog.records if x.levelname == "WARNING")
  assert reason in line
  assert line.endswith("; install g++ 11 or newer, or name it by CXX")
  assert not files(caches)


def test_a_full_disk_is_the_reason_given(caches, compiler):
  compiler("""
echo "a.s: Fatal error: can't write 9 bytes: 'No space left on device'" >&2
echo "collect2: error: ld returned 1 exit status" >&2
exit 1""")
  with pytest.raises(build.BuildError) as error:
    build.load_library()
  assert "No space left on device" in str(error.value)
  assert str(error.value).endswith("make room, or set TMPDIR")
  assert "g++" not in str(error.value)  # the compiler is not what is missing


@pytest.mark.parametrize(
  "refuse",
  [
    lambda caches: caches.parent.write_text("a file"),
    lambda caches: (caches.parent.mkdir(), caches.symlink_to("/tmp")),
  ],
  ids=["no_folder", "link"],
)
def test_without_a_cache_it_is_compiled_elsewhere_and_one_line_says_so(
  refuse, caches, compiler, tmp_path, monkeypatch, caplog
):
  compiler()
  refuse(caches)
  temporary = tmp_path / "temporary"
  temporary.mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(temporary))
  assert build.load_library().endswith(b"-mword (1)")
  (line,) = (x.message for x in caplog.records if x.levelname == "WARNING")
  assert line.startswith(f"the cache is not used: {caches.parent}")
  assert not [*temporary.iterdir()]


def test_without_room_in_the_cache_it_is_compiled_elsewhere(caches, compiler):
  full = (
    f"case $(pwd) in {caches}*) echo No space left on device; exit 1;; esac"
  )
  compiler(full + MADE)
  assert build.load_library().endswith(b"-mword (1)")


def test_compiling_is_announced_and_the_library_is_kept(
  caches, compiler, monkeypatch, caplog
):
  compiler()
  caplog.set_level("INFO")
  content = build.load_library()
  assert caplog.messages == [
    "compiling the operations in C++ for this CPU, once: some 15 seconds"
  ]
  for name in ("a-compiler", "no-such-compiler"):
    monkeypatch.setenv("CXX", name)
    assert build.load_library() == content
  assert len(caplog.messages) == 1
  assert build.read_build_options(content) == "-mword (1)"
  assert [x.suffix for x in files(caches)] == [".so"]


@pytest.mark.parametrize(
  "damage",
  [
    lambda path: os.truncate(path, 10),
    lambda path: path.write_bytes(b"an older library, whole but for its hash"),
    lambda path: (path.unlink(), path.mkdir(), (path / "x").touch()),
  ],
  ids="cut stale folder".split(),
)
def test_a_damaged_library_is_compiled_again(damage, caches, compiler):
  compiler()
  content = build.load_library()
  (path,) = files(caches)
  damage(path)
  assert build.load_library() == content
  assert files(caches) == [path]


def test_another_or_newer_compiler_compiles_another_library(caches, compiler):
  path = compiler()
  build.load_library()
  build.load_library()
  assert len(files(caches)) == 1
  path.write_text(path.read_text() + "# newer")
  build.load_library()
  compiler(name="another")
  build.load_library()
  assert len(files(caches)) == 3


@pytest.mark.parametrize(
  ("name", "given"),
  [
    ("a-compiler", "a-compiler -g"),
    ("ccache", "ccache g++ '-DA=1 2'"),
    ("a compiler", "a compiler"),
  ],
)
def test_cxx_is_a_command_with_arguments_or_a_name_with_spaces(
  name, given, caches, compiler, monkeypatch
):
  compiler(name=name)
  monkeypatch.setenv("CXX", given)
  assert build.load_library()
  monkeypatch.setenv("CXX", "'")
  with pytest.raises(
    build.BuildError, match='CXX = "\'": No closing quotation'
  ):
    build.load_library()


def test_a_hanging_compiler_is_ended_with_all_its_processes(
  caches, compiler, tmp_path, monkeypatch
):
  compiler(f"sleep 600 & echo $! > {tmp_path}/pid; wait")
  monkeypatch.setattr(build, "_COMPILE_SECS", 0.5)
  with pytest.raises(build.BuildError, match="has not ended in "):
    build.load_library()
  # On a slow machine it may have been ended before it started a process.
  for file in tmp_path.glob("pid"):
    pid = file.read_text().strip()
    processes.wait_for(lambda pid=pid: not processes.is_running(pid))


def test_two_files_are_compiled_at_the_same_time(
  caches, compiler, tmp_path, monkeypatch
):
  # Each compiler waits until the other one has begun.
  wait = f"""
case "$*" in *" -c "*)
  touch {tmp_path}/$$.begun
  until ls {tmp_path}/*.begun | grep -c . | grep 2; do sleep 0.01; done;;
esac"""
  compiler(wait + MADE)
  monkeypatch.setattr(build, "_COMPILE_SECS", 60)
  assert build.load_library().endswith(b"-mword (1)")


def test_a_library_is_compiled_while_a_command_does_other_work(
  caches, compiler
):
  compiler()
  assert not build.is_compiled()
  build.compile_soon()
  assert build.load_library().endswith(b"-mword (1)")
  assert build.is_compiled()
  assert len(files(caches)) == 1


def test_a_command_that_ends_ends_its_compiler(caches, compiler, tmp_path):
  compiler(f"echo $$ > {tmp_path}/pid; sleep 600")
  code = (
    "from palm_mtf.native import build; import os, time; build.compile_soon()\n"
    f"while not os.path.exists('{tmp_path}/pid'): time.sleep(0.01)"
  )
  assert processes.python("-c", code).returncode == 0
  pid = int((tmp_path / "pid").read_text())
  processes.wait_for(lambda: not processes.is_running(pid))
