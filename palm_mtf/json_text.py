# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads JSON as the standard defines it.

Python's `json.dumps` writes NaN and Infinity. They are not JSON, so programs in
other languages refuse the whole line.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def json_text(
  value: object,
  *,
  indent: int | None = None,
  default: Callable[[object], object] | None = None,
) -> str:
  """Returns a value as JSON, with null for NaN and infinite numbers.

  Args:
    value: a value that `json.dumps` accepts, given `default`.
    indent: spaces per level; None for one line.
    default: function that converts a value of a type that JSON lacks; if given,
      keys of such types are converted by str().

  Raises TypeError if JSON lacks the type of a value, and `default` is None.
  """
  write = functools.partial(json.dumps, indent=indent, allow_nan=False)
  try:
    return write(value, default=default)
  except (TypeError, ValueError):  # a number or a key that JSON lacks
    return write(_to_finite(value, default))


def _to_finite(value: object, default: Callable[[object], object] | None):
  if isinstance(value, dict):
    return {
      _convert_key(k, default): _to_finite(x, default) for k, x in value.items()
    }
  if isinstance(value, list | tuple):
    return [_to_finite(each, default) for each in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if default and not isinstance(value, str | int | None):
    return _to_finite(default(value), default)
  return value


def _convert_key(
  key: object, default: Callable[[object], object] | None
) -> object:
  is_text = isinstance(key, float) and not math.isfinite(key)
  if default and not isinstance(key, str | int | float | None):
    is_text = True
  return str(key) if is_text else key


class NotFiniteError(ValueError):
  """A number in JSON, which the message has, is NaN or too large."""


def _read_number(text: str) -> float:
  number = float(text)
  if not math.isfinite(number):
    raise NotFiniteError(text)
  return number


# Refuses NaN, and a number such as 1e999, which `json_text` would make null.
STRICT_DECODER = json.JSONDecoder(
  parse_constant=_read_number, parse_float=_read_number
)


def dataclass_text(value: Any) -> str:
  """Returns a dataclass as JSON, which `read_dataclass` reads."""
  return json_text(dataclasses.asdict(value))


def read_dataclass(kind: type[T], text: str | bytes) -> T:
  """Returns the dataclass that `dataclass_text` wrote.

  Fields of `kind`, its class, are JSON values or dataclasses of JSON values. If
  a field may hold several dataclasses, its metadata "choices" have them by the
  value of their field of the same name (config/macros.py).
  """
  values = json.loads(text)
  for field in dataclasses.fields(kind):
    part, of_part = field.type, values[field.name]
    choices = field.metadata.get("choices")
    if choices and of_part:
      part = choices[of_part[field.name]]
    if of_part and dataclasses.is_dataclass(part):
      values[field.name] = part(**of_part)
  return kind(**values)


def named_text(value: Any) -> str:
  """Returns a dataclass as its class's name and JSON; `read_named` reads it."""
  return f"{type(value).__name__} {dataclass_text(value)}"


def read_named(kinds: Iterable[type[T]], text: str) -> T:
  """Returns the dataclass, of a class in `kinds`, that `named_text` wrote."""
  name, _, values = text.partition(" ")
  (kind,) = (x for x in kinds if x.__name__ == name)
  return read_dataclass(kind, values)
