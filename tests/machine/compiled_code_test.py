# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA's code is kept for this CPU and these versions, whole or not at all."""

import errno
import os
import pathlib

import pytest

from palm_mtf._tf import tf
from palm_mtf.machine.compiled_code import (
  CompiledCode,
  check_xla_flags,
  compiled_code_folder,
  keep_compiled_code,
  save_compiled_code,
)
from palm_mtf.mesh.session import session_config
from tests import processes
from tests.cpus import ZEN_3, ZEN_4, pretend_cpu
from tests.refusals import message_of


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


def test_flags_of_the_user_stay(caches, monkeypatch):
  monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=0")
  keep_compiled_code()
  assert os.environ["TF_XLA_FLAGS"] == "--tf_xla_auto_jit=0"
  assert not caches.exists()


@pytest.mark.parametrize(
  "flags",
  [
    "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit",
    "--tf_xla_cpu_global_jit=true --tf_xla_auto_jit=fusible",
  ],
)
def test_flags_that_fail_on_several_cpu_devices_are_refused(flags, monkeypatch):
  monkeypatch.setenv("TF_XLA_FLAGS", flags)
  check_xla_flags(1)
  assert message_of(session_config, 1, num_pods=2) == (
    f"TF_XLA_FLAGS = '{flags}': TensorFlow cannot compile for the 2 CPU "
    "devices of one process; remove --tf_xla_cpu_global_jit."
  )


@pytest.mark.parametrize(
  "flags",
  [
    "--tf_xla_auto_jit=2",
    "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit=false",
    "--tf_xla_auto_jit=0 --tf_xla_cpu_global_jit",
    "--tf_xla_auto_jit=single-gpu(2) --tf_xla_cpu_global_jit",
  ],
)
def test_flags_that_work_on_several_cpu_devices_are_permitted(
  flags, monkeypatch
):
  monkeypatch.setenv("TF_XLA_FLAGS", flags)
  check_xla_flags(2)


@pytest.fixture
def code(caches):
  """The path of the folder, which holds a program that XLA compiled."""
  keep_compiled_code()
  flag = os.environ["TF_XLA_FLAGS"]
  folder = compiled_code_folder()
  assert flag == f"--tf_xla_persistent_cache_directory=ram://ram://{folder}"
  code = CompiledCode(tf.io.gfile, folder)
  yield Code(folder, code)
  clear(folder)


def files(memory):
  return tf.io.gfile.glob(f"{memory}/*.pb*")


def clear(folder):
  for path in (*files(f"ram://ram://{folder}"), *files(f"ram://{folder}")):
    tf.io.gfile.remove(path)


class Code:
  """A folder on the disk, and what is in memory."""

  def __init__(self, folder, code):
    self.folder, self.code = pathlib.Path(folder), code
    self.memory = f"ram://ram://{folder}"

  def xla_writes(self, name, content):
    with tf.io.gfile.GFile(f"{self.memory}/{name}", "wb") as file:
      file.write(content)

  def next_process_reads(self):
    clear(self.folder)
    CompiledCode(tf.io.gfile, str(self.folder))
    return {
      os.path.basename(x): tf.io.gfile.GFile(x, "rb").read()
      for x in files(self.memory)
    }


def test_what_xla_compiles_is_there_for_the_next_process(code):
  assert code.next_process_reads() == {}
  code.xla_writes("1.pb", b"code")
  code.xla_writes("2.pb.1_2_3.tmp", b"half of the c")
  code.code.save()
  code.xla_writes("2.pb", b"more code")
  code.code.save()
  assert code.next_process_reads() == {"1.pb": b"code", "2.pb": b"more code"}


def test_processes_that_share_the_folder_keep_each_others_code(code):
  other = CompiledCode(tf.io.gfile, str(code.folder))
  code.xla_writes("1.pb", b"code")
  code.code.save()
  code.xla_writes("2.pb", b"more code")
  other.save()
  assert code.next_process_reads().keys() == {"1.pb", "2.pb"}


def test_xla_never_sees_a_damaged_file(code, caplog):
  """cache_folder_test.py has every kind of damage."""
  for name in ("1.pb", "2.pb"):
    code.xla_writes(name, b"code" * 250)
  code.code.save()
  path = code.folder / "1.pb"
  os.truncate(path, path.stat().st_size // 2)
  assert code.next_process_reads() == {"2.pb": b"code" * 250}
  assert (
    "not what this user wrote there, removed and compiled again: 1.pb"
    in caplog.text
  )
  assert not path.exists()


def test_a_full_disk_ends_nothing_and_one_line_says_so(
  code, monkeypatch, caplog
):
  def fsync(_):  # a disk cannot be filled here
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", fsync)
  for name in ("1.pb", "2.pb"):
    code.xla_writes(name, bytes(1000))
    code.code.save()
  (line,) = caplog.messages
  top = code.folder.parent.parent
  assert line == f"the cache is not used: {top}: No space left on device"
  assert not [*code.folder.iterdir()]
  assert tf.io.gfile.exists(f"{code.memory}/2.pb")  # for this process


MEMORY = os.environ["TF_XLA_FLAGS"].partition("=")[2]  # of this process
FOLDER = MEMORY.removeprefix("ram://ram://")


@pytest.fixture
def program():
  """A function that runs a new program, and the path of its compiled code."""
  number = int.from_bytes(os.urandom(3))  # that no earlier run has compiled
  with tf.Graph().as_default() as graph:
    add = tf.function(lambda x: x + number, jit_compile=True)
    tf.identity(add(tf.placeholder(tf.int32, [], name="x")), name="sum")
    definition = graph.as_graph_def(add_shapes=True)

  def computes():
    with tf.Graph().as_default(), tf.Session() as session:
      tf.import_graph_def(definition, name="")
      return session.run("sum:0", {"x:0": 1}) == number + 1

  before = {*files(MEMORY)}
  assert computes()
  (made,) = {*files(MEMORY)} - before
  return computes, made


def test_xla_compiles_to_memory_and_loads_from_there(program):
  computes, made = program
  save_compiled_code()
  assert (pathlib.Path(FOLDER) / os.path.basename(made)).exists()
  with tf.io.gfile.GFile(made, "wb") as file:
    file.write(b"damaged")
  with pytest.raises(tf.errors.OpError):
    computes()
  tf.io.gfile.remove(made)
  CompiledCode(tf.io.gfile, FOLDER)  # from the disk
  assert computes()


def test_code_that_another_pod_still_writes_is_not_read(program):
  """DeviceExecutablePersistor writes NAME.pb<...>.tmp, and then renames it."""
  computes, made = program
  save_compiled_code()
  tf.io.gfile.remove(made)
  tf.io.gfile.remove(made.removeprefix("ram://"))  # the mark of a whole file
  with tf.io.gfile.GFile(f"{made}host-1-2-3.tmp", "wb") as file:
    file.write(b"half of the c")
  assert computes()


_COMPILES = """
from palm_mtf.machine.compiled_code import keep_compiled_code
keep_compiled_code()
from palm_mtf._tf import tf
with tf.Session() as session:
  double = tf.function(lambda x: 2 * x, jit_compile=True)
  x = tf.placeholder(tf.int32, [])
  print(session.run(double(x), {x: 21}))
"""


@pytest.mark.slow
def test_a_process_keeps_what_it_has_compiled_when_it_ends(caches):
  run = processes.python("-c", _COMPILES)
  assert (run.stdout, run.returncode) == ("42\n", 0), run.stderr
  assert [*caches.rglob("*.pb")]
