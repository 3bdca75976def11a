# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines: one object a line, each on the disk when it is written.

A process that is killed may leave half a line at the end: it is not read, and
gone when the file is next written.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import write_atomically, writing


class JsonLinesWriter:
  """Appends values to a file, at once; use it as a context manager."""

  def __init__(self, path: str):
    """Opens `path`, in a folder that exists."""
    # No buffer: what a full disk refuses is not tried again at the end.
    self._file = open(path, "ab", buffering=0)

  def __enter__(self) -> "JsonLinesWriter":
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def write(self, value: object) -> None:
    """Appends one JSON value.

    Raises:
      UserError: the disk is full.
    """
    line = memoryview(json.dumps(value).encode() + b"\n")
    with writing(self._file.name, None):
      while line:
        line = line[self._file.write(line) :]

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read_json_lines(path: str, kind: type = dict) -> Iterator[Any]:
  """Yields the JSON values of a file, none where there is no file.

  Args:
    path: path of the file.
    kind: type of every value; `object` for any.

  Raises:
    UserError: a line but the last is no such value, or the file cannot be read.
  """
  try:
    with open(path, encoding="utf-8", errors="replace") as file:
      lines = file.readlines()
  except FileNotFoundError:
    return
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}.") from None
  for number, line in enumerate(lines, start=1):
    try:
      value = json.loads(line)
    except ValueError:
      if not line.strip() or not line.endswith("\n"):
        continue  # half a line
    else:
      if isinstance(value, kind):
        yield value
        continue
    what = "JSON object" if kind is dict else "JSON value"
    raise UserError(f"{path}, line {number}: is no {what}; remove the line.")


def write_json_lines(
  path: str,
  values: Iterable[object],
  default: Callable[[object], object] | None = None,
) -> None:
  """Writes a whole file at once.

  Args:
    path: path of the file; folders above it are made.
    values: one a line.
    default: returns the JSON value of an object that json does not know.

  Raises:
    UserError: the disk is full, or the file may not be written.
  """
  lines = [json.dumps(value, default=default) + "\n" for value in values]
  write_atomically(path, "".join(lines).encode())
