# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A template of a stranger has limits of time and memory."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from palm_mtf.data.vocabulary.chat import ChatRenderer
from palm_mtf.machine.helper_process import HelperError

pytestmark = pytest.mark.peers

VALUES = {"messages": [{"role": "user", "content": "a"}], "eos_token": "[eod]"}
GREETS = "{{ messages[0].content }}{{ eos_token }}"
HOSTILE = {
  "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
  "{% endfor %}": "more than 1 seconds",
  "{{ 'a' * 10**10 }}": "MemoryError",
  "{{ messages[0].content * 10**10 }}": "MemoryError",
  "{{ messages[0].content * 10**7 }}": "10,000,000 characters",
  "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
  f"{{{{ {'(' * 5000}1{')' * 5000} }}}}": "RecursionError",
  "{% set x = namespace(a='a') %}{% for i in range(99) %}"
  "{% set x.a = x.a + x.a %}{% endfor %}": "MemoryError|1 seconds",
  "{% for": "TemplateSyntaxError",
  "{{ ''.__class__.x }}": "SecurityError",
  "{% set x = namespace(__html__=1) %}": "SecurityError",
  "{{ eos_token._origins + 1 }}": "SecurityError",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_is_an_error(template):
  with pytest.raises(HelperError, match=HOSTILE[template]):
    ChatRenderer(template, most_secs=1).render(VALUES)


def test_one_process_renders_all_and_is_replaced_when_it_has_ended(monkeypatch):
  template = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}"
  renderer = ChatRenderer(f"{template}{{% endfor %}}{GREETS}")
  expected = "a[eod]", [[0, 1], [1, 5]]
  first = renderer._process
  for _ in range(2):
    assert renderer.render({**VALUES, "n": 1}) == expected
  assert renderer._process is first
  monkeypatch.setattr(renderer, "_most_secs", 1)
  with pytest.raises(HelperError, match="more than 1 seconds"):
    renderer.render({**VALUES, "n": 99999})
  monkeypatch.undo()
  assert first.returncode == -signal.SIGKILL
  assert renderer.render({**VALUES, "n": 1}) == expected


def test_an_ended_process_is_named_by_its_signal():
  loop = "{% for i in range(99999) %}"
  renderer = ChatRenderer(f"{loop * 2}{'{% endfor %}' * 2}")
  kill = threading.Timer(0.3, renderer._process.send_signal, [signal.SIGSEGV])
  kill.start()
  with pytest.raises(HelperError, match="its process ended with signal SIGSEG"):
    renderer.render(VALUES)


def test_the_process_runs_no_file_of_the_current_folder(tmp_path, monkeypatch):
  """A user may stand in the folder of a model that somebody else made."""
  (tmp_path / "jinja2.py").write_text("raise SystemExit")
  monkeypatch.chdir(tmp_path)
  assert ChatRenderer(GREETS).render(VALUES)[0] == "a[eod]"


def test_the_process_has_no_socket_and_no_tensorflow():
  with socket.create_server(("127.0.0.1", 0)):
    renderer = ChatRenderer(GREETS)
    folder = f"/proc/{renderer._process.pid}"
    files = [
      os.readlink(f"{folder}/fd/{x}") for x in os.listdir(f"{folder}/fd")
    ]
    with open(f"{folder}/maps") as maps:
      assert "tensorflow" not in maps.read()
  assert not any(x.startswith("socket") for x in files)


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_with_its_parent(busy):
  code = (
    "import sys, threading, time\n"
    "from palm_mtf.data.vocabulary.chat import ChatRenderer\n"
    "renderer = ChatRenderer('{% for i in range(n) %}{% for j in range(n) %}"
    "{% endfor %}{% endfor %}')\n"
    "print(renderer._process.pid, flush=True)\n"
    f"renderer.render({{'messages': [], 'n': {99999 if busy else 1}}})\n"
    "time.sleep(60)\n"
  )
  with subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE
  ) as parent:
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
  end = time.monotonic() + 5
  while os.path.exists(f"/proc/{child}") and _state(child) != "Z":
    assert time.monotonic() < end
    time.sleep(0.01)


def _state(pid: int) -> str:
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0]
  except FileNotFoundError:
    return "Z"
