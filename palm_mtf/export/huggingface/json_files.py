# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON files that other programs wrote, and their values in messages."""

import json
import reprlib
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.model_dir.foreign_files import read_regular

# The index of a model of 10,000 layers has 10 MB.
_MAX_BYTES = 20_000_000

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_short.maxlevel = 3


def read_json_object(path: str, hint: str) -> dict[str, Any]:
  """Returns the JSON object that a file holds.

  Args:
    path: path of the file.
    hint: what to give, for the message where there is no such file.

  Raises:
    UserError: it is no regular file, or does not hold a JSON object.
  """
  try:
    found = json.loads(read_regular(path, _MAX_BYTES).decode())
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}; {hint}.") from None
  # An integer of too many digits is a ValueError; RecursionError is that of
  # too many brackets.
  except (ValueError, RecursionError):
    found = None
  if not isinstance(found, dict):
    raise UserError(f"{path}: is no JSON object; copy it again.")
  return found


def shown(value: object) -> str:
  """Returns a value of a JSON file for a message: one line, not too long."""
  return _short.repr(value)
