# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The program that compares servers leaves no server running."""

import socket
import sys

import pytest

from tests import processes

PROGRAM = processes.ROOT / "tools" / "peers" / "served_adapters.py"
# Answers whether it is ready, but never a completion.
SERVER = """
import http.server, os, pathlib, threading

class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200)
    self.end_headers()
  def do_POST(self):
    pathlib.Path("asked").touch()
    threading.Event().wait()

pathlib.Path("new").write_text(str(os.getpid()))
os.rename("new", "pid")
address = "127.0.0.1", {port}
if {answers}:
  http.server.ThreadingHTTPServer(address, Handler).serve_forever()
threading.Event().wait()
"""


@pytest.mark.parametrize(
  "answers", [False, True], ids=["starts", "is asked for texts"]
)
def test_sigterm_ends_the_server_while_it(answers, tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  server = SERVER.format(port=port, answers=answers)
  with processes.start(
    *(PROGRAM, "--program=palm_mtf", "--names=base,one", f"--port={port}"),
    *("--texts=2", "--", sys.executable, "-c", server),
    cwd=tmp_path,
  ) as program:
    begun = tmp_path / ("asked" if answers else "pid")
    processes.wait_until(begun.exists, program)
    pid = int((tmp_path / "pid").read_text())
    assert processes.is_running(pid)
    program.terminate()
    program.wait(60)
  assert not processes.is_running(pid)
