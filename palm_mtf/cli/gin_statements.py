# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What gin files and the command line say, statement by statement.

gin's own parser reads them, but nothing is imported, bound or called: a
reference stays a name, and every statement keeps its origin, "file:line" or
"command line". Includes are read in place. gin_files.py merges and judges.
"""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gin import config_parser

from palm_mtf.cli.gin_folder import find_include, shown
from palm_mtf.errors import UserError
from palm_mtf.user_text import read_text

COMMAND_LINE = "command line"
_MOST_SHOWN = 200  # characters of a line
_GINS_FUNCTIONS = {"constant", "macro", "singleton"}
_GINS_MACROS = {"gin.constant", "gin.macro"}  # @NAME/gin.macro() is %NAME
_PYTHON_WORDS = {"true": "True", "false": "False", "none": "None"}


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/selector` or, called, `@scope/selector()`."""

  scope: str
  selector: str
  called: bool

  def __repr__(self):
    name = f"{self.scope}/{self.selector}" if self.scope else self.selector
    return f"@{name}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME`."""

  name: str

  def __repr__(self):
    return f"%{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """`NAME = value` (selector "") or `scope/selector.name = value`."""

  scope: str = ""
  selector: str = ""
  name: str
  value: object
  origin: str

  @property
  def key(self) -> str:
    """The left-hand side, as it was written."""
    name = f"{self.selector}.{self.name}" if self.selector else self.name
    return f"{self.scope}/{name}" if self.scope else name

  @property
  def place(self) -> str:
    """The origin, in a sentence."""
    line = self.origin == COMMAND_LINE
    return "on the command line" if line else f"in {self.origin}"

  @property
  def cited(self) -> str:
    """The setting and its origin, to begin an error."""
    return f"{self} ({self.origin})"

  def __str__(self):
    return f"{self.key} = {format_value(self.value)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
  """An import: `name` stands for the dotted `path` in selectors."""

  statement: str
  name: str
  path: str
  module: str
  origin: str


Statement = Setting | Import


class _Names(config_parser.ParserDelegate):
  """Keeps references and macros as names."""

  def configurable_reference(self, scoped_configurable_name, evaluate):
    scope, selector = config_parser.parse_scoped_selector(
      scoped_configurable_name
    )
    selector = _whole_selector(selector)
    if selector in _GINS_MACROS and evaluate:  # the same at length
      return Macro(scope)
    return Reference(scope, selector, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


class _Parser(config_parser.ConfigParser):
  """gin's parser, but -%NAME is an error, where gin reads it as %NAME."""

  def parse_value(self):
    first = self.current_token
    value = super().parse_value()
    if first.string == "-" and isinstance(value, (Reference, Macro)):
      place = (None, first.start[0], first.start[1], first.line)
      raise SyntaxError("a minus sign before what is not a number", place)
    return value


def _whole_selector(selector: str) -> str:
  """Returns a selector with the module of gin's own functions."""
  return f"gin.{selector}" if selector in _GINS_FUNCTIONS else selector


def format_value(value: object) -> str:
  """Writes a value as gin reads it, with double quotes where that is easy."""
  if isinstance(value, (list, tuple)):
    inner = ", ".join(map(format_value, value))
    if isinstance(value, list):
      return f"[{inner}]"
    return f"({inner},)" if len(value) == 1 else f"({inner})"
  if isinstance(value, dict):
    pairs = (f"{format_value(k)}: {format_value(v)}" for k, v in value.items())
    return "{" + ", ".join(pairs) + "}"
  text = repr(value)
  if isinstance(value, str) and '"' not in text and "\\'" not in text:
    return f'"{text[1:-1]}"'
  return text


def names_in(value: object) -> Iterator[Reference | Macro]:
  """Yields every reference and macro inside a value."""
  if isinstance(value, (Reference, Macro)):
    yield value
  elif isinstance(value, dict):
    for item in value.items():
      yield from names_in(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from names_in(item)


def read_file(path: Path, including: tuple[Path, ...] = ()) -> list[Statement]:
  """Reads a gin file and, in place, everything that it includes."""
  # gin itself would recurse without end.
  if path in including:
    circle = " -> ".join(shown(p) for p in (*including, path))
    raise UserError(f"{circle}: gin files include each other in a circle.")
  text = read_text(str(path), shown(path), needed=None)
  # Lines end as in Python's own files, whose grammar gin has.
  text = text.replace("\r\n", "\n").replace("\r", "\n")
  text = text.replace("\n\ufeff", "\n")
  statements: list[Statement] = []
  for statement in _parse(text, lambda line: f"{shown(path)}:{line}"):
    if isinstance(statement, config_parser.IncludeStatement):
      line = statement.location.line_num
      included = find_include(statement.filename, path, line)
      statements += read_file(included, (*including, path))
    else:
      origin = f"{shown(path)}:{statement.location.line_num}"
      statements += _converted(statement, origin)
  return statements


def read_statements(text: str, name: str) -> list[Statement]:
  """Reads the text of a gin file that includes no other.

  Args:
    text: all of the file.
    name: name of the file, for origins and messages.
  """
  return [
    each
    for statement in _parse(text, lambda line: f"{name}:{line}")
    for each in _converted(statement, f"{name}:{statement.location.line_num}")
  ]


def read_command_line(bindings: Iterable[str]) -> list[Setting]:
  """Reads "NAME=VALUE" texts, as they follow "--gin."."""
  settings: list[Setting] = []
  for binding in bindings:
    name, equals, value = binding.partition("=")
    if not equals or not re.fullmatch(r"[\w./]+", name):
      raise UserError(f"--gin.{binding}: write --gin.NAME=VALUE.")
    # The line as a file would have it, so that both read values alike.
    statements = _parse(f"{name} = {value}", lambda _: COMMAND_LINE, binding)
    if len(statements) != 1:
      raise UserError(f"--gin.{binding}: give one value.")
    settings += _converted(statements[0], COMMAND_LINE)
  return settings


def _parse(text: str, origin_of: Callable[[int], str], binding: str = ""):
  """Parses `text`; the error for a bad line names the line and the fix."""
  try:
    # gin's own grammar; the delegate keeps names where gin would resolve them.
    parser = _Parser(io.StringIO(text), _Names())
    statements = []
    while (statement := parser.parse_statement()) is not None:
      statements.append(statement)
    return statements
  except SyntaxError as error:
    line, message = error.lineno or 1, error.msg
  except tokenize.TokenError as error:
    message, (line, _) = error.args
    if "EOF" in message:
      message = "a bracket or a quote is not closed"
  except (StopIteration, TypeError, ValueError):  # {[1]: 2} is a TypeError
    line, message = 1, "cannot be read"
  except (RecursionError, MemoryError):
    line, message = (
      parser.current_token.start[0],
      "brackets are nested too deep",
    )
  lines = text.split("\n")
  content = lines[min(line, len(lines)) - 1].strip()[:_MOST_SHOWN]
  _check_unquoted(content, binding, origin_of(line))
  # gin quotes the token; its own words would send the user to its source.
  token = re.search("Failed to parse token '(.*)'", message)
  message = (
    f"{token[1]} is not a Python value"
    if token
    else " ".join(message.split()).rstrip(".").lower()
  )
  if binding:
    raise UserError(
      f"--gin.{binding}: {message}; write a number, True, None, a quoted "
      "text or a list of these."
    )
  raise UserError(f"{origin_of(line)}: {content}: {message}.")


def _check_unquoted(content: str, binding: str, origin: str) -> None:
  """Raises the right error if the value is a word that lacks its quotes."""
  content = re.sub(r"\s+#.*", "", content)
  name, equals, value = (part.strip() for part in content.partition("="))
  if not equals or not re.fullmatch(r"[\w./]+", name):
    return
  if not re.fullmatch(r"[^\s\"'\[\](){}@%#,\\]+", value):
    return
  try:
    ast.literal_eval(value)
    return  # the value is right; something else in the line is not
  except (SyntaxError, ValueError):
    pass
  # The likeliest slips: a text without quotes, and true for True.
  right = _PYTHON_WORDS.get(value.lower(), f'"{value}"')
  if binding:
    quoted = f"'{right}'" if right.startswith('"') else right
    raise UserError(
      f"--gin.{binding}: {value} is not a Python value; write "
      f"--gin.{name}={quoted}"
    )
  raise UserError(
    f"{origin}: {name} = {value}: not a Python value; write {name} = {right}"
  )


def _converted(statement, origin: str) -> list[Statement]:
  """Turns one of gin's statements into none or one of ours."""
  if isinstance(statement, config_parser.BindingStatement):
    scope, selector, name, value, _ = statement
    if not name:  # NAME = value; a macro's scope is part of its name
      name, scope, selector = f"{scope}/{selector}".lstrip("/"), "", ""
    elif (_whole_selector(selector), name) == ("gin.macro", "value"):
      name, scope, selector = scope, "", ""  # the same at length
    return [
      Setting(
        scope=scope,
        selector=_whole_selector(selector),
        name=name,
        value=value,
        origin=origin,
      )
    ]
  if isinstance(statement, config_parser.ImportStatement):
    if statement.module == "__gin__.dynamic_registration":
      return []  # always on
    if statement.module.startswith("__gin__") or (
      statement.bound_name() == "gin"
    ):
      raise UserError(
        f"{origin}: {statement.format()}: the name is gin's own; import it as "
        "another."
      )
    return [_import(statement, origin)]
  return []  # a block's head; its bindings follow as statements of their own


def _import(statement: config_parser.ImportStatement, origin: str) -> Import:
  name = statement.bound_name()
  is_whole = statement.is_from or statement.alias
  return Import(
    statement=statement.format(),
    name=name,
    path=statement.module if is_whole else name,
    module=statement.module,
    origin=origin,
  )
