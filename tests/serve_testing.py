# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts `palm_mtf serve` in a separate process, and sends it HTTP requests."""

import contextlib
import http.client
import json
import re
import socket

import pytest

from tests import processes


def skip_without_library():
  reason = "aiohttp, which serve needs, is absent"
  return pytest.importorskip("aiohttp", reason=reason)


def start(model_dir, *flags):
  skip_without_library()
  return processes.start(
    *("-m", "palm_mtf", "serve", "--model_dir", model_dir),
    *("--listen=127.0.0.1:0", "--slots=4", "--gin.TEMPERATURE=0.0", *flags),
  )


def make_url(process):
  line = process.stdout.readline()
  assert line, process.communicate()[1]
  return re.search(r"http://([\d.:]+)/v1", line)[1]


def ask(server, path, body=None, **headers):
  """Returns the status and the content of an answer."""
  connection = http.client.HTTPConnection(server, timeout=120)
  with contextlib.closing(connection):
    if body is None:
      connection.request("GET", path)
    else:
      text = body if isinstance(body, str) else json.dumps(body)
      headers = {"Content-Type": "application/json", **headers}
      connection.request("POST", path, text, headers)
    answer = connection.getresponse()
    content = answer.read().decode()
  if answer.getheader("Content-Type", "").startswith("application/json"):
    content = json.loads(content)
  return answer.status, content


def complete(server, **body):
  status, answer = ask(server, "/v1/completions", body)
  assert status == 200, answer
  return answer


def refused(server, status, **body):
  found, answer = ask(server, "/v1/completions", body)
  assert found == status, answer
  return answer["error"]["message"]


def streamed(server, **body):
  """Returns the events of a stream."""
  status, text = ask(server, "/v1/completions", {**body, "stream": True})
  assert status == 200, text
  events = [x.removeprefix("data: ") for x in text.strip().split("\n\n")]
  assert events[-1] == "[DONE]"
  return [json.loads(x) for x in events[:-1]]


def metrics(server):
  _, page = ask(server, "/metrics")
  lines = [x for x in page.splitlines() if not x.startswith("#")]
  return {name: float(x) for name, x in (line.rsplit(" ", 1) for line in lines)}


@contextlib.contextmanager
def request_under_way(server, **body):
  """Sends a request for a stream, reads its first event, and disconnects."""
  host, port = server.split(":")
  with socket.create_connection((host, int(port)), timeout=120) as connection:
    text = json.dumps({"stream": True, **body})
    connection.sendall(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
      "Connection: close\r\nContent-Type: "
      f"application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
    )
    file = connection.makefile("rb")
    assert b" 200 " in file.readline()
    while b"data: " not in file.readline():
      pass
    yield file
