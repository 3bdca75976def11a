# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palm_mtf.errors import UserError
from palm_mtf.tasks import code_execution, program_process
from palm_mtf.tasks.code_execution import Limits, check_confined, run_program
from tests import processes

QUICK = Limits(secs=5.0)


def test_a_program_that_reaches_its_end_passes():
  assert run_program("x = 1\nassert x == 1", QUICK).passed
  assert run_program("print('much')", QUICK).passed


@pytest.mark.parametrize(
  ("program", "why"),
  [
    ("assert 1 == 2, 'no'", "AssertionError: no"),
    ("def f(:", "SyntaxError: invalid syntax"),
    ("import sys; sys.exit(0)", "ended early with exit code 0"),
    ("import os; os._exit(0)", "ended early with exit code 0"),
    ("import os, signal; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
    ("input()", "EOFError: EOF when reading a line"),
  ],
)
def test_a_program_that_does_not_is_told_with_the_reason(program, why):
  outcome = run_program(program, QUICK)
  assert (outcome.passed, outcome.why) == (False, why)


def test_time_is_limited_for_a_program_that_sleeps_or_works():
  for program in ("import time; time.sleep(60)", "while True: pass"):
    start = time.monotonic()
    outcome = run_program(program, Limits(secs=0.5))
    assert outcome.why == "took more than 0.5 s"
    assert time.monotonic() - start < 10


def test_memory_is_limited():
  outcome = run_program("x = bytearray(1 << 30)", QUICK)
  assert (outcome.passed, outcome.why) == (False, "MemoryError")


def test_files_are_limited_in_size():
  program = "f = open('big', 'wb')\nf.write(bytes(1 << 22))\nf.flush()"
  outcome = run_program(program, QUICK)
  assert not outcome.passed
  assert "File too large" in outcome.why or "SIGXFSZ" in outcome.why


def test_a_program_sees_no_environment_and_leaves_no_folder(monkeypatch):
  monkeypatch.setenv("MY_TOKEN", "secret")
  program = (
    "import os\nassert 'MY_TOKEN' not in os.environ\n"
    "open('note', 'w').write('x')\nraise SystemExit(os.getcwd())"
  )
  folder = run_program(program, QUICK).why
  assert os.path.basename(folder).startswith("palm_mtf_program_")
  assert not os.path.exists(folder)


# Tries each action; ends with the outcomes of those that another error ends.
TRIES = """
import os, resource, socket, subprocess
found = []
for action, why in {actions}.items():
  try:
    exec(action)
    found.append((action, "done"))
  except OSError as error:
    if error.strerror != why:
      found.append((action, str(error)))
assert not found, found
"""
NO, DENIED = "Operation not permitted", "Permission denied"
REFUSED = {
  "os.kill(os.getppid(), 9)": NO,
  "os.kill(-1, 9)": NO,
  "os.killpg(0, 9)": NO,
  "os.fork()": NO,
  "os.posix_spawn('/bin/sh', ['sh'], {})": NO,
  "subprocess.run(['true'])": NO,
  "os.execv('/bin/true', ['true'])": NO,
  "socket.socket()": NO,
  "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))": NO,
  "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)": NO,
  "open(f'/proc/{os.getppid()}/environ')": DENIED,
  "open(f'/proc/{os.getppid()}/mem', 'r+b')": DENIED,
  "open('/etc/passwd')": DENIED,
  "os.listdir('/')": DENIED,
  "os.mkfifo('pipe')": DENIED,
}


def test_a_program_cannot_start_signal_or_read_others():
  program = TRIES.replace("{actions}", repr(REFUSED))
  assert run_program(program, QUICK) == (True, "")


# Each program would end the evaluation, or skip its tests.
@pytest.mark.parametrize(
  ("program", "why"),
  [
    ("import os; os.kill(os.getpid(), 40)", "ended by signal 40"),
    ("import sys; sys.stdin.read(1) or 1 / 0", "ZeroDivisionError"),
    ("import os; os.write(3, b'x' * 99); 1 / 0", ""),
    ("x = '\x00'", "null bytes"),
    ("x = '\ud800'", ""),
    ("(" * 100_000, ""),
  ],
)
def test_any_program_that_does_not_reach_its_end_fails(program, why):
  outcome = run_program(program, QUICK)
  assert not outcome.passed
  assert why in outcome.why


def facts(path):
  found = path.stat()
  return found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns


def test_files_of_others_are_out_of_reach(tmp_path):
  kept = tmp_path / "kept"
  kept.write_text("mine")
  kept.chmod(0o644)
  before = facts(kept)
  actions = {
    "open(kept).read()": DENIED,
    "open(kept, 'w')": DENIED,
    "open(kept + '2', 'w')": DENIED,
    "os.remove(kept)": DENIED,
    "os.truncate(kept, 0)": DENIED,
    "os.chmod(kept, 0)": NO,
    "os.utime(kept)": NO,
    "os.rename(kept, 'here')": "Invalid cross-device link",
    "os.link(kept, 'here')": "Invalid cross-device link",
    "os.symlink(kept, 'here'); open('here')": DENIED,
    "os.setxattr(kept, 'user.a', b'b')": NO,
  }
  program = f"kept = {str(kept)!r}{TRIES}".replace("{actions}", repr(actions))
  assert run_program(program, QUICK) == (True, "")
  assert kept.read_text() == "mine"
  assert facts(kept) == before
  assert [x.name for x in tmp_path.iterdir() if x.is_file()] == ["kept"]


def test_a_program_finds_its_mark_in_no_file_argument_variable_or_stream():
  program = """
import os, re, sys
texts = [*sys.argv, *os.environ.values(), sys.stdin.read()]
texts += [repr(value) for value in globals().copy().values()]
for folder, _, files in os.walk("."):
  texts += [open(os.path.join(folder, name)).read() for name in files]
found = re.findall("[0-9a-f]{32}", repr(texts))
raise SystemExit(f"{len(texts)} texts: {found}")
"""
  outcome = run_program(program, QUICK)
  assert not outcome.passed
  assert re.fullmatch(r"\d+ texts: \[\]", outcome.why)


def test_what_programs_use_works():
  programs = (
    "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')",
    "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\n"
    "os.rename('a/b/c', 'd')\nassert open('d').read() == 'x'",
    "import numpy\nassert (numpy.ones(3) @ numpy.ones(3)) == 3",
    "import random, hashlib, decimal, collections, datetime, heapq, re, json",
    "import dataclasses\n@dataclasses.dataclass\nclass A:\n  x: int\n"
    "import pickle\nassert pickle.loads(pickle.dumps(A(3))) == A(3)",
    "if __name__ == '__main__':\n  x = 1\nassert x",
    "import ctypes, asyncio, sqlite3\nsqlite3.connect('a.db').close()",
  )
  assert run_program("\n".join(programs), Limits(secs=60)) == (True, "")


def test_a_folder_of_any_depth_and_any_mode_is_removed(
  tmp_path, temporary_folder
):
  program = (
    "import os\n"
    "for i in range(DEPTH):\n"
    "  os.mkdir('depth'); open('f', 'w'); os.chdir('depth')\n"
    "os.mkdir('closed', 0)\nos.symlink('/', 'root')"
  )
  shallow = program.replace("DEPTH", "20")
  assert run_program(shallow, Limits(secs=30.0)) == (True, "")
  assert os.listdir(temporary_folder) == []
  # Without a namespace, the folder is on the disk.
  folder = tmp_path / "folder"
  folder.mkdir()
  deep = program.replace("DEPTH", "1100")
  subprocess.run([sys.executable, "-S", "-c", deep], cwd=folder, check=True)
  code_execution._remove(str(folder))
  assert not folder.exists()


def test_many_files_do_not_fill_the_disk():
  program = (
    "for i in range(10_000):\n"
    "  with open(f'{i}', 'wb') as file:\n    file.write(bytes(1 << 20))"
  )
  if not namespaces():
    pytest.skip("this kernel offers no namespaces to users")
  assert "No space left on device" in run_program(program, QUICK).why


def namespaces():
  return not subprocess.run(["unshare", "-Urm", "true"], check=False).returncode


def test_without_landlock_it_warns_and_without_seccomp_it_refuses(
  monkeypatch, caplog
):
  check_confined(QUICK)
  assert not caplog.records
  monkeypatch.setattr(program_process, "landlock_version", lambda: 0)
  check_confined(QUICK)
  assert "may read and change every file of yours" in caplog.text
  monkeypatch.setattr(program_process, "why_not_confined", lambda: "no seccomp")
  with pytest.raises(UserError, match="cannot be confined here: no seccomp;"):
    check_confined(QUICK)


@pytest.mark.slow
def test_a_program_ends_with_the_process_that_runs_it(tmp_path):
  code = (
    "from palm_mtf.tasks.code_execution import *\n"
    "run_program('import time; time.sleep(900)', Limits(secs=900))"
  )
  parent = processes.start("-c", code, variables={"TMPDIR": str(tmp_path)})

  def running():
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
      with contextlib.suppress(OSError):
        if os.readlink(path).startswith(str(tmp_path)):
          found.append(path)
    return found

  processes.wait_until(running, parent)
  parent.kill()
  parent.communicate()
  deadline = time.monotonic() + 60
  while running():
    assert time.monotonic() < deadline
