# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses gin files and the command line into statements.

gin's own parser reads the text, but nothing is imported, bound or called: a
reference stays a name. Every statement keeps its origin, "file:line" or
"command line". gin_files.py merges and checks the statements.
"""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gin import config_parser

from palm_mtf.cli.gin_folder import find_include, shorten_path
from palm_mtf.errors import UserError
from palm_mtf.user_text import read_text

COMMAND_LINE = "command line"
_MOST_SHOWN = 200  # an error quotes no more characters of a line
_GINS_FUNCTIONS = {"constant", "macro", "singleton"}
_GINS_MACROS = {"gin.constant", "gin.macro"}  # @NAME/gin.macro() means %NAME
_PYTHON_WORDS = {"true": "True", "false": "False", "none": "None"}


@dataclasses.dataclass(frozen=True)
class Reference:
  """A reference to a function: `@scope/selector`, with `()` if `called`."""

  scope: str
  selector: str
  called: bool

  def __repr__(self):
    name = f"{self.scope}/{self.selector}" if self.scope else self.selector
    return f"@{name}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
  """A reference to a macro: `%NAME`."""

  name: str

  def __repr__(self):
    return f"%{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """The setting of a macro or of a parameter of a function.

  In a gin file a macro is `NAME = value`, which has an empty `selector`, and a
  parameter is `scope/selector.name = value`.
  """

  scope: str = ""
  selector: str = ""
  name: str
  value: object
  origin: str

  @property
  def key(self) -> str:
    """The text to the left of "=" in a gin file."""
    name = f"{self.selector}.{self.name}" if self.selector else self.name
    return f"{self.scope}/{name}" if self.scope else name

  @property
  def place(self) -> str:
    """The origin with "in" or "on" before it, for messages."""
    line = self.origin == COMMAND_LINE
    return "on the command line" if line else f"in {self.origin}"

  @property
  def cited(self) -> str:
    """The setting as text, with its origin, for the beginning of messages."""
    return f"{self} ({self.origin})"

  def __str__(self):
    return f"{self.key} = {format_value(self.value)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
  """An import, after which `name` in selectors stands for the dotted `path`."""

  statement: str
  name: str
  path: str
  module: str
  origin: str


Statement = Setting | Import


class _Names(config_parser.ParserDelegate):
  """Makes gin's parser keep names as `Reference` and `Macro`, unresolved."""

  def configurable_reference(self, scoped_configurable_name, evaluate):
    scope, selector = config_parser.parse_scoped_selector(
      scoped_configurable_name
    )
    selector = _complete_selector(selector)
    if selector in _GINS_MACROS and evaluate:  # the long form of %NAME
      return Macro(scope)
    return Reference(scope, selector, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


class _Parser(config_parser.ConfigParser):
  """gin's parser with an error for -%NAME, which gin itself reads as %NAME."""

  def parse_value(self):
    first = self.current_token
    value = super().parse_value()
    if first.string == "-" and isinstance(value, (Reference, Macro)):
      place = (None, first.start[0], first.start[1], first.line)
      raise SyntaxError("a minus sign before what is not a number", place)
    return value


def _complete_selector(selector: str) -> str:
  return f"gin.{selector}" if selector in _GINS_FUNCTIONS else selector


def format_value(value: object) -> str:
  """Formats a value for a gin file, strings in double quotes if possible."""
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


def leaves_of(value: object) -> Iterator[object]:
  """Yields the innermost items, and keys, of nested lists, tuples and dicts."""
  if isinstance(value, dict):
    value = [*value.items()]
  if isinstance(value, (list, tuple)):
    for item in value:
      yield from leaves_of(item)
  else:
    yield value


def names_in(value: object) -> Iterator[Reference | Macro]:
  """Yields every `Reference` and `Macro` inside a value."""
  return (x for x in leaves_of(value) if isinstance(x, (Reference, Macro)))


def read_file(path: Path, including: tuple[Path, ...] = ()) -> list[Statement]:
  """Returns a gin file's statements.

  The statements of an included file replace the `include` statement.
  `including` are the files that led to this file, each including the next.
  """
  # Check for circles, in which gin itself would recurse without end.
  if path in including:
    circle = " -> ".join(shorten_path(p) for p in (*including, path))
    raise UserError(f"{circle}: gin files include each other in a circle.")
  text = read_text(str(path), shorten_path(path), needed=None)
  # Accept the line ends that Python accepts, because gin's grammar is Python's.
  # A line may begin with a byte order mark where files were concatenated.
  text = text.replace("\r\n", "\n").replace("\r", "\n")
  text = text.replace("\n\ufeff", "\n")
  statements: list[Statement] = []
  for statement in _parse(text, lambda line: f"{shorten_path(path)}:{line}"):
    if isinstance(statement, config_parser.IncludeStatement):
      line = statement.location.line_num
      included = find_include(statement.filename, path, line)
      statements += read_file(included, (*including, path))
    else:
      origin = f"{shorten_path(path)}:{statement.location.line_num}"
      statements += _convert(statement, origin)
  return statements


def read_statements(text: str, name: str) -> list[Statement]:
  """Returns the statements of a gin file's text, which may not include files.

  `name` is the name of the file, for the statements' origins and for messages.
  """
  return [
    each
    for statement in _parse(text, lambda line: f"{name}:{line}")
    for each in _convert(statement, f"{name}:{statement.location.line_num}")
  ]


def read_command_line(bindings: Iterable[str]) -> list[Setting]:
  """Parses strings "NAME=VALUE", from flags --gin.NAME=VALUE, into settings."""
  settings: list[Setting] = []
  for binding in bindings:
    name, equals, value = binding.partition("=")
    if not equals or not re.fullmatch(r"[\w./]+", name):
      raise UserError(f"--gin.{binding}: write --gin.NAME=VALUE.")
    # Parse the string as a line of a gin file, so that flags and files accept
    # the same values.
    statements = _parse(f"{name} = {value}", lambda _: COMMAND_LINE, binding)
    if len(statements) != 1:
      raise UserError(f"--gin.{binding}: give one value.")
    settings += _convert(statements[0], COMMAND_LINE)
  return settings


def _parse(text: str, origin_of: Callable[[int], str], binding: str = ""):
  """Parses text with gin's parser, without resolving names.

  `origin_of` maps a line number to the line's origin. If the text is from the
  command line, `binding` is "NAME=VALUE".
  """
  try:
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
  except (StopIteration, TypeError, ValueError):  # as for {[1]: 2}
    line, message = 1, "cannot be read"
  except (RecursionError, MemoryError):
    line, message = (
      parser.current_token.start[0],
      "brackets are nested too deep",
    )
  lines = text.split("\n")
  content = lines[min(line, len(lines)) - 1].strip()[:_MOST_SHOWN]
  _check_unquoted(content, binding, origin_of(line))
  # Quote only the token in gin's message: the rest refers to gin's source code.
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
  """Raises UserError if a line's value is a word that lacks quotes."""
  content = re.sub(r"\s+#.*", "", content)
  name, equals, value = (part.strip() for part in content.partition("="))
  if not equals or not re.fullmatch(r"[\w./]+", name):
    return
  if not re.fullmatch(r"[^\s\"'\[\](){}@%#,\\]+", value):
    return
  try:
    ast.literal_eval(value)
    return  # the value is a Python value, so the fault is elsewhere in the line
  except (SyntaxError, ValueError):
    pass
  # The likeliest mistakes are missing quotes, and "true" instead of "True".
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


def _convert(statement, origin: str) -> list[Statement]:
  """Converts a statement of gin's parser; [] if the statement has no effect."""
  if isinstance(statement, config_parser.BindingStatement):
    scope, selector, name, value, _ = statement
    # In `a/NAME = value`, gin's parser splits the macro's name at "/".
    if not name:
      name, scope, selector = f"{scope}/{selector}".lstrip("/"), "", ""
    elif (_complete_selector(selector), name) == ("gin.macro", "value"):
      # `NAME/macro.value = value` is gin's long form of `NAME = value`.
      name, scope, selector = scope, "", ""
    return [
      Setting(
        scope=scope,
        selector=_complete_selector(selector),
        name=name,
        value=value,
        origin=origin,
      )
    ]
  if isinstance(statement, config_parser.ImportStatement):
    if statement.module == "__gin__.dynamic_registration":
      return []  # no effect, because dynamic registration is always on
    name = statement.bound_name()
    if statement.module.startswith("__gin__") or name == "gin":
      raise UserError(
        f"{origin}: {statement.format()}: the name is gin's own; import it as "
        "another."
      )
    is_whole = statement.is_from or statement.alias
    return [
      Import(
        statement=statement.format(),
        name=name,
        path=statement.module if is_whole else name,
        module=statement.module,
        origin=origin,
      )
    ]
  return []  # the head of a block, whose bindings follow as separate statements
