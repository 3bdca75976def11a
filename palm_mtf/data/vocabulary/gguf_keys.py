# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads keys of a GGUF file, and checks the types of their values.

The program that wrote the file chose the type of each value, so a key may hold
a string instead of a number. Other code need not check types again.
"""

import types
from collections.abc import Mapping
from typing import Any, get_args

from palm_mtf.errors import UserError, shorten

_REQUIRED = object()
_AGAIN = "convert the model again"
_NAMES = {
  int: "a whole number",
  float: "a number",
  bool: "true or false",
  str: "a text",
  list[int]: "an array of whole numbers",
  list[float]: "an array of numbers",
  list[str]: "an array of texts",
}


def read_key(
  metadata: Mapping[str, Any],
  key: str,
  kind: type | types.GenericAlias,
  default: Any = _REQUIRED,
) -> Any:
  """Returns the value of a key.

  Args:
    metadata: {key: value} of a GGUF file.
    kind: type of the value, or list[type]. A whole number is a float, too.
    default: value for a file without the key.

  Raises:
    UserError: the value has another type; or the key is missing, and there is
      no default.
  """
  value, (item,) = metadata.get(key), get_args(kind) or (kind,)
  if value is None:
    if default is _REQUIRED:
      raise UserError(f"{key}: is missing in the GGUF file; {_AGAIN}.")
    return default
  allowed = (int, float) if item is float else (item,)
  is_array = item is not kind
  if isinstance(value, list) is not is_array or not all(
    type(x) in allowed for x in (value if is_array else [value])
  ):
    raise UserError(
      f"{key} = {shorten(value)}: is not {_NAMES[kind]}; {_AGAIN}."
    )
  return value
