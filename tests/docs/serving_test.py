# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every call of docs/serving.md is made as the page writes it.

But for the port, which is any free one.
"""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests import processes
from tests.source_files import ROOT

pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
WRITTEN = "http://127.0.0.1:8000"


def _calls() -> list[tuple[str, str]]:
  """Returns (language, text) of each call, in the order of the page.

  The section "Load" trains and measures, as tools/bench/cases/serve_test.py
  does.
  """
  page = PAGE.partition("## Load")[0].replace("\\\n", " ")
  calls = []
  for language, block in re.findall(
    r"^```(\w*)\n(.*?)^```$", page, re.M | re.S
  ):
    if language == "python":
      calls.append((language, block))
      continue
    for line in block.splitlines():
      if language or line.startswith("$ "):  # other lines show an answer
        calls.append((language or "output", line.removeprefix("$ ")))
  return [call for call in calls if not call[1].startswith("pip install")]


@contextlib.contextmanager
def _server(command: str, folder):
  """Starts the server of a command; yields its URL."""
  _, *arguments = shlex.split(command)
  if "--listen" not in arguments:
    arguments += ["--listen", "127.0.0.1:8000"]
  arguments = [x.replace(":8000", ":0") for x in arguments]
  with processes.start("-m", "palm_mtf", *arguments, cwd=folder) as process:
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    shown = re.match(r"serving quickstart, step 12, on (http://\S+)/v1\n", line)
    try:
      yield shown[1]
    finally:  # or a failed call waits for the server without an end
      process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error


def _run(language: str, text: str, url: str, folder) -> str:
  """Runs a call against a server; returns what it prints."""
  text = text.replace(WRITTEN, url)
  command = [sys.executable, "-c", text]
  if language != "python":
    command = ["bash", "-e", "-o", "pipefail", "-c", text]
  result = subprocess.run(
    command, check=False, text=True, capture_output=True, cwd=folder
  )
  assert result.returncode == 0, f"{text}: {result.stderr}"
  return result.stdout


@pytest.mark.slow  # a server starts for each command: 40 seconds
def test_every_call_of_the_page_works_as_it_is_written(finished, tmp_path):
  pytest.importorskip("openai", reason="the client openai is absent")
  shutil.copytree(finished, tmp_path / "runs" / "quickstart")
  made = []
  with contextlib.ExitStack() as stack:
    url = ""
    for language, text in _calls():
      if text.startswith("palm_mtf serve "):
        stack.close()  # the server before
        url = stack.enter_context(_server(text, tmp_path))
        made.append("serve")
        continue
      printed = _run(language, text, url, tmp_path)
      made.append(text.split()[0])
      if text.startswith("curl "):
        assert {"choices", "data"} & {*json.loads(printed)}, printed
      elif language == "python":
        assert printed.strip()
  assert made.count("serve") > 4 and made.count("curl") == 3
  assert "import" in made  # of the Python client
