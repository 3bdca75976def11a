# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines: one JSON value per line."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically, writing


class JsonLinesWriter:
  """Appends JSON values to a file in an existing folder."""

  def __init__(self, path: str):
    # Unbuffered, so that each line is in the file when `write` returns, and
    # `close` does not retry a line for which the disk had no space.
    self._file = open(path, "ab", buffering=0)

  def write(self, value: object) -> None:
    """Appends a JSON value; raises UserError if the disk is full."""
    line = memoryview(json_text(value).encode() + b"\n")
    with writing(self._file.name, None):
      while line:  # the system may write only a part
        line = line[self._file.write(line) :]

  def sync(self) -> None:
    """Waits until all lines are on the disk, to survive a power loss."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read_json_lines(
  path: str, kind: type = dict, *, number: str = ""
) -> Iterator[Any]:
  """Yields the JSON value of each line; nothing if there is no file.

  Args:
    kind: type of every value; `object` for any.
    number: key, such as "step", that has an integer in every value; "" for no
      such key.

  Raises:
    UserError: the file cannot be read, or a line has a value of another type.
  """
  try:
    with open(path, encoding="utf-8", errors="replace") as file:
      lines = file.readlines()
  except FileNotFoundError:
    return
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}.") from None
  for count, line in enumerate(lines, start=1):
    # A machine that lost power may leave zero bytes instead of a line.
    line = line.strip("\0")
    try:
      value = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or nested too deep
      # Skip empty lines and a truncated last line, which a killed process may
      # leave. The next process that rewrites the file removes such lines.
      if not line.strip() or not line.endswith("\n"):
        continue
    else:
      if isinstance(value, kind) and (
        not number or isinstance(value.get(number), int)
      ):
        yield value
        continue
    what = "JSON object" if kind is dict else "JSON value"
    what += number and f' with a "{number}"'
    raise UserError(f"{path}, line {count}: is no {what}; remove the line.")


def write_json_lines(
  path: str,
  values: Iterable[object],
  default: Callable[[object], object] | None = None,
) -> None:
  """Writes JSON lines to a file, atomically.

  `default` converts a value of a type that JSON lacks.
  """
  lines = [json_text(value, default=default) + "\n" for value in values]
  write_atomically(path, "".join(lines).encode())
