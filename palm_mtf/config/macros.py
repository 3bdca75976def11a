# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts configurations from and to macros: `num_layers` is NUM_LAYERS."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
  from _typeshed import DataclassInstance

MISSING = dataclasses.MISSING
_T = TypeVar("_T")


def macros_of(config_class: type) -> dict[str, object]:
  """Returns {macro: default, or MISSING if there is none} of a configuration.

  `config_class` is a dataclass whose fields are values or further dataclasses.
  """
  found: dict[str, object] = {}
  for field in dataclasses.fields(config_class):
    part = _part_of(field)
    of_part: dict[str, object] = (
      macros_of(part) if part else {field.name.upper(): field.default}
    )
    for name, default in of_part.items():
      # Two parts may read one macro, such as SEED. If their defaults differ,
      # the user must set the macro.
      if found.setdefault(name, default) != default:
        found[name] = MISSING
  return found


def from_macros(config_class: type[_T], values: Mapping[str, object]) -> _T:
  """Makes a configuration from {macro: value}; other fields keep defaults.

  Raises UserError if a value fails the checks of its dataclass.
  """
  settings: dict[str, object] = {}
  for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
    if part := _part_of(field):
      settings[field.name] = from_macros(part, values)
    elif field.name.upper() in values:
      settings[field.name] = values[field.name.upper()]
  return config_class(**settings)


def values_of(config: "DataclassInstance") -> dict[str, object]:
  """Returns {macro: value} of a configuration, or of a part of one."""
  found: dict[str, object] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    is_part = dataclasses.is_dataclass(value)
    found |= values_of(value) if is_part else {field.name.upper(): value}
  return found


def _part_of(field: dataclasses.Field[Any]) -> type | None:
  kind = field.type
  if isinstance(kind, type) and dataclasses.is_dataclass(kind):
    return kind
  return None
