# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import os
import time

import pytest

from palm_mtf.tasks.code_execution import Limits, run_program

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
    outcome = run_program(program, Limits(secs=1.0))
    assert outcome.why == "took more than 1 s"
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


def test_what_it_started_ends_with_it(tmp_path):
  if os.geteuid():
    # RLIMIT_NPROC lets nothing start at all.
    outcome = run_program("import os; os.fork()", QUICK)
    assert "BlockingIOError" in outcome.why
    return
  path = tmp_path / "written_late"
  program = (
    "import os, time\n"
    "if not os.fork():\n"
    f"  time.sleep(2); open({str(path)!r}, 'w').close(); os._exit(0)\n"
  )
  assert run_program(program, QUICK).passed
  time.sleep(3)
  assert not path.exists()
