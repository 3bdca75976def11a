# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains one step; prints which functions of palm_mtf ran, and their callers.

  python -m tests.traced_step COMMAND_LINE_AS_JSON

The result is JSON: {"files": files whose functions ran, "callers": {function:
functions that were on the stack in one of its calls}}, with functions as
"cli/main.py: main", in files below palm_mtf/.
"""

import inspect
import json
import sys
import threading
from pathlib import Path
from types import FrameType

from palm_mtf.cli.main import main

_PACKAGE = str(Path(__file__).resolve().parent.parent / "palm_mtf") + "/"


def trace(arguments: list[str]) -> dict:
  """Runs a command with success; returns files and callers."""
  files: set[str] = set()
  callers: dict[str, set[str]] = {}

  def name_of(frame: FrameType) -> str | None:
    code = frame.f_code
    # The body of a class or of a module, run by an import, is no function.
    is_function = code.co_flags & inspect.CO_OPTIMIZED
    if not is_function or not code.co_filename.startswith(_PACKAGE):
      return None
    file = code.co_filename.removeprefix(_PACKAGE)
    return f"{file}: {code.co_qualname}"

  def record(frame: FrameType, event: str, unused: object) -> None:
    if event != "call" or not (name := name_of(frame)):
      return
    files.add(name.partition(":")[0])
    found = callers.setdefault(name, set())
    caller = frame.f_back
    while caller:
      if above := name_of(caller):
        found.add(above)
      caller = caller.f_back

  threading.setprofile(record)
  sys.setprofile(record)
  try:
    assert main(arguments) == 0
  finally:
    sys.setprofile(None)
    threading.setprofile(None)
  return {
    "files": sorted(files),
    "callers": {name: sorted(found) for name, found in callers.items()},
  }


if __name__ == "__main__":
  result = trace(json.loads(sys.argv[1]))
  Path(sys.argv[2]).write_text(json.dumps(result), "utf-8")
