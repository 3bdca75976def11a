# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A JSON parser that is as strict as parsers of other languages."""

import json
from pathlib import Path
from typing import Any, NoReturn


def loads(text: str | bytes) -> Any:
  """Returns a JSON value; raises ValueError at NaN and Infinity."""
  return json.loads(text, parse_constant=_refuse)


def load_lines(path: Path) -> list[Any]:
  """Returns the values of a file of JSON lines, as `loads` parses each."""
  return [*map(loads, path.read_text().splitlines())]


def _refuse(constant: str) -> NoReturn:
  raise ValueError(f"{constant} is not JSON")
