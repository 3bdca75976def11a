# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Dataclasses of settings, whose values are checked against the fields' types.

  norm: Literal["layer_norm", "rms_norm"]               one of these strings
  clean_subset: bool                                    True or False
  num_layers: Annotated[int, whole(maximum=10_000)]     values the check accepts
  top_k: Count | None                                   the same, or None

A check takes the name and the value of a macro, and raises UserError if the
value is wrong. Fields of other types are not checked here.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
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

  If `none` says what None means, such as "for no clipping", the error message
  offers None too.
  """

  def check(name: str, value: object) -> None:
    try:
      check_real(name, value, low, high)
    except UserError as error:
      if not none:
        raise
      raise UserError(f"{str(error)[:-1]}, or None {none}.") from None

  return check


def _accept(is_right: Callable[[object], bool], wanted: str) -> _Check:
  def check(name: str, value: object) -> None:
    if not is_right(value):
      raise UserError(f"{name} = {value!r}: give {wanted}.")

  return check


def text(what: str) -> _Check:
  """Returns a check for a nonempty string; errors ask for `what`."""
  return _accept(lambda x: isinstance(x, str) and x != "", what)


def text_or_empty(what: str) -> _Check:
  """Returns a check for a string, which may be ""; errors ask for `what`."""
  return _accept(lambda x: isinstance(x, str), what)


def texts(what: str) -> _Check:
  """Returns a check for a list of nonempty strings; errors ask for `what`."""
  return _accept(are_texts, f"a list of {what}, or [] for none")


def texts_by_task(example: str) -> _Check:
  """Returns a check that a value is {task: string}; errors show `example`."""

  def is_right(value: object) -> bool:
    return isinstance(value, Mapping) and all(
      isinstance(x, str) and x for each in value.items() for x in each
    )

  return _accept(is_right, f"texts by task, such as {example}")


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
    for name, macro, check in _checks_of(type(self)):  # type: ignore[arg-type]
      check(macro, getattr(self, name))


def refuse_unused(
  settings: Checked, names: Iterable[str], given: str, use: str
) -> None:
  """Raises UserError if fields `names` differ from their defaults.

  `given` is the setting because of which they have no effect, and `use` is the
  setting with which they would have an effect.
  """
  defaults = {x.name: x.default for x in dataclasses.fields(settings)}  # type: ignore[arg-type]
  unused = [
    f"{x.upper()} = {getattr(settings, x)!r}"
    for x in names
    if getattr(settings, x) != defaults[x]
  ]
  if unused:
    raise UserError(
      f"{', '.join(unused)} and {given}: has no effect; leave it out, or set "
      f"{use}."
    )


# A search of layouts makes thousands of settings, so each class is read once.
@functools.cache
def _checks_of(settings: type) -> list[tuple[str, str, _Check]]:
  """Returns name, macro and check of each field that has a check."""
  checks = [
    (field.name, field.name.upper(), _check_of(field.type))
    for field in dataclasses.fields(settings)
  ]
  return [(name, macro, check) for name, macro, check in checks if check]


def _check_of(kind: object) -> _Check | None:
  """Returns the check of a field's type, or None if any value will do."""
  origin, arguments = get_origin(kind), get_args(kind)
  if kind is bool:
    return _accept(lambda x: isinstance(x, bool), "True or False")
  if origin is Literal:
    return lambda name, value: check_choice(name, value, arguments)
  if origin is Annotated:
    is_optional = type(None) in get_args(arguments[0])
    return _check_unless_none(arguments[1:2]) if is_optional else arguments[1]
  if origin in (Union, types.UnionType):
    return _check_unless_none([x for x in map(_check_of, arguments) if x])
  return None


def _check_unless_none(checks: Sequence[_Check]) -> _Check:
  def check(name: str, value: object) -> None:
    if value is not None:
      for each in checks:
        each(name, value)

  return check
