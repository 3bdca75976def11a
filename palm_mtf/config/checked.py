# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Dataclasses of settings, whose values are checked against the fields' types.

  norm: Literal["layer_norm", "rms_norm"]               one of these texts
  clean_subset: bool                                    True or False
  num_layers: Annotated[int, whole(maximum=10_000)]     values the check accepts
  top_k: Count | None                                   the same, or None

A check takes the name and the value of a macro, and raises UserError if the
value is wrong. Fields of other types are not checked here.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
  Annotated,
  Literal,
  TypeGuard,
  Union,
  get_args,
  get_origin,
)

from palm_mtf.errors import (
  UserError,
  are_texts,
  check_choice,
  check_count,
  check_globs,
  check_real,
)

_Check = Callable[[str, object], None]


def whole(minimum: int = 1, maximum: int = 2**63 - 1) -> _Check:
  """Returns a check that a value is a whole number in the given range."""
  return lambda name, value: check_count(name, value, minimum, maximum)


def real(low: float, high: float, none: str = "") -> _Check:
  """Returns a check that a value is a number from `low` to `high`.

  If `none` is not "", it says what None means, such as "for no clipping", and
  the error message offers None too.
  """

  def check(name: str, value: object) -> None:
    try:
      check_real(name, value, low, high)
    except UserError as error:
      if not none:
        raise
      raise UserError(f"{str(error)[:-1]}, or None {none}.") from None

  return check


def text(what: str) -> _Check:
  """Returns a check that a value is a text, not ""; errors ask for `what`."""

  def check(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
      raise UserError(f"{name} = {value!r}: give {what}.")

  return check


def texts(what: str) -> _Check:
  """Returns a check that a value is a list of texts; errors ask for `what`."""

  def check(name: str, value: object) -> None:
    if not are_texts(value):
      raise UserError(
        f"{name} = {value!r}: give a list of {what}, or [] for none."
      )

  return check


def texts_by_task(example: str) -> _Check:
  """Returns a check that a value is {task: text}; errors show `example`."""

  def check(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(
      isinstance(x, str) and x for each in value.items() for x in each
    ):
      raise UserError(
        f"{name} = {value!r}: give texts by task, such as {example}."
      )

  return check


def are_pairs(value: object) -> TypeGuard[Sequence[Sequence[int]]]:
  """Returns whether `value` is a list or tuple of pairs of whole numbers."""
  return isinstance(value, (list, tuple)) and all(
    isinstance(pair, (list, tuple))
    and len(pair) == 2
    and all(type(number) is int for number in pair)
    for pair in value
  )


Count = Annotated[int, whole()]
Globs = Annotated[str | list[str] | tuple[str, ...] | None, check_globs]


class Checked:
  """Base class of settings; `__post_init__` checks the value of every field."""

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):  # type: ignore[arg-type]
      _check(field.name.upper(), getattr(self, field.name), field.type)


def _check(name: str, value: object, kind: object) -> None:
  origin, arguments = get_origin(kind), get_args(kind)
  if kind is bool and not isinstance(value, bool):
    raise UserError(f"{name} = {value!r}: give True or False.")
  if origin is Literal:
    check_choice(name, value, arguments)
  elif origin is Annotated:
    is_optional = type(None) in get_args(arguments[0])
    if value is not None or not is_optional:
      arguments[1](name, value)
  elif origin in (Union, types.UnionType) and value is not None:
    for each in arguments:
      _check(name, value, each)
