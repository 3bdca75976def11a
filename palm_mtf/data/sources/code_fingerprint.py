# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of functions, for fingerprints that outlive a process.

A description holds the source code of a function, its defaults, bound arguments
and closure. It does not see what the function calls, reads from globals or
files, or gets from gin.
"""

import functools
import inspect
import re
import types

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs in every process


def describe(value: object) -> str:
  """Returns a text that is the same in every process for the same code."""
  return _describe(value, ())


def _describe(value: object, within: tuple[int, ...]) -> str:
  if isinstance(value, _PLAIN):
    return repr(value)
  if id(value) in within:  # a recursive function closes over itself
    return "itself"
  parts = [f"{type(value).__module__}.{type(value).__qualname__}"]
  parts += [_describe(each, (*within, id(value))) for each in _inside(value)]
  return f"({', '.join(parts)})"


def _inside(value: object) -> list[object]:
  """Returns the parts of a value that is not plain."""
  if isinstance(value, (list, tuple)):
    return [*value]
  if isinstance(value, dict):
    return [part for pair in value.items() for part in pair]
  if isinstance(value, (set, frozenset)):
    return sorted(map(describe, value))  # sets have no order of their own
  if isinstance(value, functools.partial):
    return [value.func, value.args, value.keywords]
  if isinstance(value, types.MethodType):
    return [value.__func__]
  if isinstance(value, types.FunctionType):
    cells = [_content(cell) for cell in value.__closure__ or ()]
    return [_code(value), value.__defaults__, value.__kwdefaults__, cells]
  if isinstance(value, type):
    return [value.__module__, value.__qualname__, _code(value)]
  if isinstance(value, types.ModuleType):
    return [value.__name__]
  if callable(value) and hasattr(value, "__dict__"):
    return [type(value), vars(value)]
  return [_ADDRESS.sub("", repr(value))]


def _code(function: object) -> str:
  try:
    return inspect.getsource(function)
  except (OSError, TypeError):  # typed into a shell: bytecode instead
    code = getattr(function, "__code__", None)
    return _ADDRESS.sub("", repr(code and (code.co_code, code.co_consts)))


def _content(cell: types.CellType) -> object:
  try:
    return cell.cell_contents
  except ValueError:  # not assigned yet
    return None
