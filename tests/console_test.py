# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log lines: format, destination, and that each line is written once."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from palm_mtf.cli.main import main
from palm_mtf.console import configure_logging
from tests import processes
from tests.log_lines import STAMP

LOGGER = logging.getLogger("palm_mtf.training.loop")
LOGS = """
import logging, sys
from palm_mtf.console import configure_logging, progress_bar
configure_logging()
logger = logging.getLogger("palm_mtf.data.tokens.store")
"""


@pytest.fixture
def half_past_five(monkeypatch):
  """A time zone that is 5:30 ahead of Greenwich."""
  monkeypatch.setenv("TZ", "IST-5:30")
  time.tzset()
  yield
  monkeypatch.undo()
  time.tzset()


@pytest.mark.parametrize(
  ("level", "marked"),
  [
    (logging.INFO, ""),
    (logging.WARNING, "warning: "),
    (logging.ERROR, "error: "),
  ],
)
def test_a_line_is_local_time_program_level_and_message(
  half_past_five, capsys, level, marked
):
  record = LOGGER.makeRecord(
    LOGGER.name, level, __file__, 1, "step 100  loss %.1f", (2.5,), None
  )
  record.created = 0.75
  LOGGER.handle(record)
  assert capsys.readouterr() == (
    "",
    f"1970-01-01 05:30:00 palm_mtf: {marked}step 100  loss 2.5\n",
  )


def test_what_is_for_debugging_is_not_shown(capsys):
  LOGGER.debug("a detail")
  assert capsys.readouterr() == ("", "")


def test_a_message_is_one_line_however_often_main_is_called(
  capsys, monkeypatch
):
  of_root = io.StringIO()
  monkeypatch.setattr(
    logging.getLogger(), "handlers", [logging.StreamHandler(of_root)]
  )
  for _ in range(3):
    assert main([]) == 2
    configure_logging()
  capsys.readouterr()
  LOGGER.warning("once")
  out, err = capsys.readouterr()
  assert re.fullmatch(f"{STAMP}palm_mtf: warning: once\n", err)
  assert (out, of_root.getvalue()) == ("", "")


def test_who_imports_the_library_decides_where_its_records_go(tmp_path):
  (tmp_path / "binary").write_bytes(b"\0")
  (tmp_path / "text").write_text("text")
  done = processes.python(
    "-c",
    f"""
import logging, sys
from palm_mtf.data.sources.text_files import Fields, TextFiles
logging.basicConfig(format="%(levelname)s %(name)s", stream=sys.stdout)
source = TextFiles({f"{tmp_path}/*"!r}, Fields("text"), validation_share=0.5)
list(source.documents())
source.report_skipped()
""",
  )
  assert done.stderr == ""
  assert done.stdout == "WARNING palm_mtf.data.sources.text_files\n"


def test_lines_that_nobody_reads_are_dropped():
  program = (
    LOGS
    + """
import os, warnings
logger.info("lost")
from palm_mtf.cli.main import main
warnings.warn("lost")
with progress_bar("lost", 3) as advance:
  advance(1)
print("lost", file=sys.stderr, flush=True)
print(main(["lost"]), flush=True)
1 / 0
"""
  )
  reading, writing = os.pipe()
  os.close(reading)
  done = processes.python("-c", program, stderr=writing)
  os.close(writing)
  assert (done.returncode, done.stdout) == (1, "2\n")
  closed = 'sys.stderr.close()\nlogger.info("x")\nprint("result")'
  done = processes.python("-c", LOGS + closed)
  assert (done.returncode, done.stdout) == (0, "result\n")


def test_with_a_closed_stderr_stdout_has_only_results():
  program = f"{sys.executable} -m palm_mtf doctr 2>&-"
  done = subprocess.run(
    program, shell=True, stdout=subprocess.PIPE, check=False
  )
  assert (done.returncode, done.stdout) == (2, b"")
  program = LOGS + (
    'logger.info("lost")\nimport os\nprint(os.readlink("/proc/self/fd/2"))'
  )
  done = subprocess.run(
    f"{sys.executable} -c '{program}' 2>&-",
    shell=True,
    stdout=subprocess.PIPE,
    check=False,
    env=processes.environment(),
  )
  assert (done.returncode, done.stdout) == (0, b"/dev/null\n")


def test_results_that_the_encoding_has_not_are_escaped():
  program = LOGS + 'logger.info("\\xfc")\nprint("\\xfc", sys.stdin.read())'
  done = processes.python(
    "-c", program, input="\xdf", variables={"PYTHONIOENCODING": "ascii"}
  )
  assert done.returncode == 0
  assert done.stdout == r"\xfc \xdf" + "\n"  # stdin is UTF-8 in any locale
  assert done.stderr.endswith(r": \xfc" + "\n")


def test_a_command_without_stdin_stdout_and_stderr_still_has_its_exit_code():
  for arguments, code in (("--version", 0), ("doctr", 2), ("generate", 2)):
    program = f"{sys.executable} -m palm_mtf {arguments} <&- >&- 2>&-"
    done = subprocess.run(program, shell=True, check=False)
    assert done.returncode == code


def test_a_progress_bar_on_a_terminal_is_not_torn():
  reading, terminal = pty.openpty()
  done = processes.python(
    "-c",
    LOGS
    + """
import time
with progress_bar("Reading", 3) as advance:
  for i in range(3):
    logger.warning(f"line {i}")
    advance(1)
    time.sleep(0.2)  # the bar is drawn ten times a second
""",
    stderr=terminal,
    variables={"TERM": "xterm"},
  )
  os.close(terminal)
  assert (done.returncode, done.stdout) == (0, "")
  shown = os.read(reading, 100_000).decode()
  os.close(reading)
  assert "Reading" in shown
  # Each line is written as a whole; if the bar was shown, it is erased first.
  lines = re.findall(
    rf"(?:^|\n|\x1b\[2K){STAMP}palm_mtf: warning: line (\d)\r\n", shown
  )
  assert lines == ["0", "1", "2"], shown


# Sets a terminal's clipboard, moves back and erases, also with C1 codes.
HARMFUL = "a\x1b]52;c;aGk=\x07\tb\r\x08\x7f\x9b2Kc\n\u00e9"
SHOWN = "a\\x1b]52;c;aGk=\\x07\tb\\x0d\\x08\\x7f\\x9b2Kc\n\u00e9"
PRINTS = f"""
from palm_mtf.cli import main
def run(arguments):
  print({HARMFUL!r}, end="", flush=True)
  return 0
main._run = run
main.main([])
"""


def test_what_a_command_prints_cannot_command_a_terminal():
  reading, terminal = pty.openpty()
  done = processes.python("-c", PRINTS, stdout=terminal)
  os.close(terminal)
  assert (done.returncode, done.stderr) == (0, "")
  shown = os.read(reading, 10_000).decode()
  os.close(reading)
  assert shown == SHOWN.replace("\n", "\r\n")  # the line end of terminals


def test_a_pipe_gets_every_character():
  done = processes.python("-c", PRINTS, stdout=subprocess.PIPE)
  # The pipe is read as text, which converts line ends.
  assert done.stdout == HARMFUL.replace("\r", "\n")


def test_log_lines_and_errors_escape_what_they_quote(capsys):
  LOGGER.warning(HARMFUL)
  assert capsys.readouterr().err.endswith(f"warning: {SHOWN}\n")
  assert main([f"--{HARMFUL}"]) == 2
  assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", capsys.readouterr().err)
