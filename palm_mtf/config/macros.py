# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts configurations from and to macros: `num_layers` is NUM_LAYERS."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from palm_mtf.errors import check_choice

if TYPE_CHECKING:
  from _typeshed import DataclassInstance

MISSING = dataclasses.MISSING
_T = TypeVar("_T")


def macros_of(
  config_class: type, values: Mapping[str, object] | None = None
) -> dict[str, object]:
  """Returns {macro: default, or MISSING if there is none} of a configuration.

  Args:
    config_class: a dataclass whose fields are values or further dataclasses.
    values: {macro: value}, which choose the dataclass of a field that has
      several choices. If None, the result has the macros of all choices.
  """
  found: dict[str, object] = {}
  for field in dataclasses.fields(config_class):
    of_part: dict[str, object] = {}
    parts = choices_of(field)
    if parts and values is not None:
      parts = [_choose(field, values)]
    for part in parts:
      of_part = macros_of(part, values) | of_part
    for name, default in (
      of_part if parts else {field.name.upper(): field.default}
    ).items():
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
    if choices_of(field):
      settings[field.name] = from_macros(_choose(field, values), values)
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


def choices_of(field: dataclasses.Field[Any]) -> list[type]:
  """Returns the dataclasses that a field may hold; [] for a plain value.

  A field with several choices has the metadata "choices", {name: dataclass}.
  The macro with the name of the field, such as OPTIMIZER, says which it holds.
  """
  kind = field.type
  if choices := field.metadata.get("choices"):
    return [*choices.values()]
  if isinstance(kind, type) and dataclasses.is_dataclass(kind):
    return [kind]
  return []


def _choose(
  field: dataclasses.Field[Any], values: Mapping[str, object]
) -> type:
  kinds, macro = choices_of(field), field.name.upper()
  if macro not in values or len(kinds) == 1:
    return kinds[0]
  check_choice(macro, values[macro], tuple(field.metadata["choices"]))
  chosen: type = field.metadata["choices"][values[macro]]
  return chosen
