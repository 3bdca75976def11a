# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks values of keys of config.json, which any program may have written."""

import math
from collections.abc import Mapping

from palm_mtf.config.model import MAX_SIZE
from palm_mtf.errors import UserError, shorten

Json = Mapping[str, object]


def parse_size(
  config: Json,
  key: str,
  default: int | None = None,
  *,
  null: int | None = None,
  most: int = MAX_SIZE,
) -> int:
  """Returns a size; `default` for a missing key, and `null` for null.

  Raises:
    UserError: the value is no whole number from 1 to `most`.
  """
  value = config.get(key, default)
  value = null if value is None else value
  if type(value) is not int or not 1 <= value <= most:
    raise UserError(
      f"{key} = {shorten(value)}: give a whole number from 1 to {most:,}."
    )
  return value


def parse_number(config: Json, key: str, default: float) -> float:
  """Returns a number above 0; `default` for a missing key.

  Raises:
    UserError: the value is no such number.
  """
  value = config.get(key, default)
  is_number = type(value) in (int, float) and 0 < value < 2**53
  if not is_number:
    raise UserError(f"{key} = {shorten(value)}: give a number above 0.")
  return float(value)


def is_same(value: object, ours: object) -> bool:
  """Returns whether a value has the type and value that we compute with."""
  if isinstance(ours, float):
    # A float may not represent an int of 2**53 or more exactly.
    is_number = type(value) is float or (
      type(value) is int and abs(value) < 2**53
    )
    return is_number and math.isclose(value, ours, rel_tol=1e-6)
  return type(value) is type(ours) and value == ours
