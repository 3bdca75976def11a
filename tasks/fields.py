# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that a record has the fields that a prompt reads.

@reads(question=str, choices={"text": [str]}, label=int)
def my_prompt(record: dict) -> Iterator[Choice]: ...
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.user_text import check_text, short_json

# The noun of each kind of value, for messages.
_WANTED = {int: "a whole number", list: "a list", dict: "a JSON object"}
_FIX = "mend the record"


def reads(**kinds: object) -> Callable[[Callable], Callable]:
  """Returns a decorator for prompts; it checks the fields of each record.

  Args:
    **kinds: kind of each field that the prompt reads; see `check_fields`.
  """

  def decorate(prompt: Callable) -> Callable:
    @functools.wraps(prompt)
    def checked(record: Mapping[str, Any]) -> Any:
      check_fields(record, kinds)
      return prompt(record)

    return checked

  return decorate


def check_fields(
  record: Mapping[str, Any], kinds: Mapping[str, object], within: str = ""
) -> None:
  """Raises UserError unless a record has fields of these kinds.

  Args:
    record: a record, or an object in one.
    kinds: kind of each field by its name: `str` for a text, `int` for a whole
      number or a truth value, [kind] for a list, {name: kind} for an object,
      `object` for any value.
    within: for an object in a record, the name of the object and a dot.
  """
  for name, kind in kinds.items():
    if name not in record:
      raise UserError(
        f"no field '{within}{name}'{did_you_mean(name, record)}; {_FIX}."
      )
    _check(record[name], kind, f"{within}{name}")


def _check(value: object, kind: object, name: str) -> None:
  if kind is str:
    check_text(value, f"field '{name}'", _FIX)
    return
  wanted = kind if isinstance(kind, type) else type(kind)
  if not isinstance(value, wanted):
    raise UserError(
      f"field '{name}' is {short_json(value)}, not {_WANTED[wanted]}; {_FIX}."
    )
  if wanted is list:
    for number, each in enumerate(value):
      _check(each, kind[0], f"{name}[{number}]")
  elif wanted is dict:
    check_fields(value, kind, f"{name}.")
