# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every field of a configuration is a gin macro: `num_layers` is NUM_LAYERS."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
  from _typeshed import DataclassInstance

MISSING = dataclasses.MISSING
_T = TypeVar("_T")


def macros_of(
  config_class: type, leaves_out: Collection[str] = ()
) -> dict[str, object]:
  """Returns {macro: default, or MISSING if there is none} of a configuration.

  Args:
    config_class: dataclass whose fields are values or further dataclasses.
    leaves_out: names of fields whose macros are not returned.
  """
  found: dict[str, object] = {}
  for field in _fields(config_class, leaves_out):
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


def from_macros(
  config_class: type[_T],
  values: Mapping[str, object],
  leaves_out: Collection[str] = (),
) -> _T:
  """Makes a configuration from the values of its macros.

  Args:
    config_class: dataclass whose fields are values or further dataclasses.
    values: {macro: value}, with every macro that `macros_of` returns.
    leaves_out: names of fields that keep their defaults.

  Raises:
    UserError: if a value fails the checks of its dataclass.
  """
  return config_class(
    **{
      field.name: from_macros(part, values)
      if (part := _part_of(field))
      else values[field.name.upper()]
      for field in _fields(config_class, leaves_out)
    }
  )


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


def _fields(
  config_class: type, leaves_out: Collection[str]
) -> Iterator[dataclasses.Field[Any]]:
  return (
    field
    for field in dataclasses.fields(config_class)
    if field.name not in leaves_out
  )
