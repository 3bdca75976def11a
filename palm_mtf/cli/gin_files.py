# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict gin: one effective configuration with the origin of every value.

A command starts from runs/<command>.gin; the user's files follow in their
order, then the command line, and the last value of a name holds. Whatever would
have no effect is an error (gin_checks.py), found before anything but pure
modules is imported. The result is one flat text: gin reads it, `--print_config`
prints it, the run keeps it as MODEL_DIR/config.gin, and it is a `--gin_file`
that gives the same again, to every command. A run file may set macros of its
command alone, for those who do not. Library code has no gin decorators: the
text's imports register what it names. How single files are read is in
gin_statements.py.
"""

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from palm_mtf.cli import gin_checks
from palm_mtf.cli.gin_checks import Binding, Symbols
from palm_mtf.cli.gin_folder import find_gin_file, gin_folder
from palm_mtf.cli.gin_statements import (
  Import,
  Setting,
  Statement,
  names_in,
  read_command_line,
  read_file,
)
from palm_mtf.errors import UserError

_GIN_ERRORS = (AttributeError, NameError, SyntaxError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
  """What one command will do: made by `load`, checked, not yet imported.

  Attributes:
    entry_point: dotted path of the function that runs the command.
    imports: what the text imports, in order.
    macros: the macros that the command uses, by name.
    bindings: the parameters that the command uses.
    asked: the command line, for the head of the text.
  """

  entry_point: str
  imports: tuple[Import, ...]
  macros: Mapping[str, Setting]
  bindings: tuple[Setting, ...]
  asked: str

  def effective_text(self) -> str:
    """The configuration as one gin file that gives the same again."""
    imports = dict.fromkeys(each.statement for each in self.imports)
    lines = [f"# {self.asked}".replace("\n", " ")]
    lines += ["from __gin__ import dynamic_registration", *imports, ""]
    lines += [_with_origin(setting) for setting in self.macros.values()]
    selector = None
    for setting in self.bindings:
      if setting.selector != selector:
        lines.append("")
      selector = setting.selector
      lines.append(_with_origin(setting))
    return "\n".join(lines) + "\n"

  def build(self) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Imports, binds and builds: the entry point and its arguments.

    Raises:
      UserError: an import, a name or a value in the user's files is wrong.
    """
    import importlib.util  # gin 0.5.0 uses it without importing it

    import gin

    gin.clear_config()
    self._import_modules()
    module, _, name = self.entry_point.rpartition(".")
    entry_point = getattr(importlib.import_module(module), name)
    text = self.effective_text()
    try:
      gin.parse_config(text)
    except _GIN_ERRORS as error:
      message = str(error).splitlines()[0].rstrip(".")
      line = re.search(r"bindings string line (\d+)", str(error))
      where = text.splitlines()[int(line[1]) - 1] if line else self.asked
      raise UserError(f"{where}: {message}.") from error
    try:
      return entry_point, gin.get_bindings(entry_point)
    except UserError as error:  # gin appends where it was called
      message = str(error).partition("\n  In call to")[0]
      raise UserError(message) from None

  def config_files(self, **resolved: object) -> dict[str, str]:
    """What MODEL_DIR keeps of the configuration: file name -> text.

    `config.gin` is what was asked, `operative_config.gin` what gin gave to
    every class that `build` made, defaults included.

    Args:
      **resolved: the values that the command found for macros that left it the
        choice, for `config.gin`.
    """
    import gin

    macros = dict(self.macros)
    for name, value in resolved.items():
      if macros[name].value != value:
        origin = f"{macros[name].value}, {macros[name].origin}"
        macros[name] = Setting(name=name, value=value, origin=origin)
    return {
      "config.gin": dataclasses.replace(self, macros=macros).effective_text(),
      "operative_config.gin": gin.operative_config_str(),
    }

  def located(self, message: str) -> str:
    """Adds where a macro was set to a message that begins "MACRO = "."""
    name = message.partition(" = ")[0]
    if name not in self.macros:
      return message
    return f"{message} ({name} is set {self.macros[name].place})"

  def _import_modules(self) -> None:
    """Imports what the text imports; an import that fails is the user's."""
    if str(Path.cwd()) not in sys.path:
      sys.path.append(str(Path.cwd()))  # where the user's own modules lie
    for each in self.imports:
      try:
        importlib.import_module(each.module)
      except ImportError as error:
        if gin_checks.is_own(each.path):
          raise
        raise UserError(
          f"{each.origin}: {each.statement}: {error}; is it installed?"
        ) from error


def load(
  command: str,
  gin_files: Iterable[str] = (),
  bindings: Iterable[str] = (),
  asked: str = "",
) -> Configuration:
  """Reads, merges and checks the configuration of one command.

  Args:
    command: names runs/<command>.gin in the gin folder.
    gin_files: the user's files, later over earlier.
    bindings: "NAME=VALUE" texts over all files, later over earlier.
    asked: the command line, to be kept at the head of the text.

  Raises:
    UserError: the first thing that is wrong, in one line.
  """
  runs = {
    path.stem: read_file(path)
    for path in sorted((gin_folder() / "runs").glob("*.gin"))
  }
  user: list[Statement] = []
  for name in gin_files:
    user += read_file(find_gin_file(name))
  user += read_command_line(bindings)

  symbols = Symbols([*runs.values(), user])
  shipped = {
    symbols.key_of(each): each
    for statements in runs.values()
    for each in _bindings(statements)
  }
  merged = {symbols.key_of(each): each for each in _bindings(runs[command])}
  common = [symbols.key_of(each) for each in _bindings(runs["settings"])]
  entry_point = _entry_point(merged, common)
  # A run file may set macros that are its command's alone.
  macros = {x.name: x for x in _settings(runs[command]) if not x.selector}
  for setting in _settings(user):
    if not setting.selector:
      macros[setting.name] = setting
      continue
    setting = symbols.of_today(setting)
    if not symbols.same(setting, shipped):  # a run's own line, repeated
      gin_checks.check_parameter(setting, shipped, symbols)
      merged[symbols.key_of(setting)] = setting

  gin_checks.check_known_macros(macros, shipped, merged)
  use = gin_checks.reach(entry_point, merged, macros, symbols)
  gin_checks.check_reached(use, merged, shipped)
  gin_checks.check_all_set(use, shipped)
  return Configuration(
    entry_point=entry_point,
    imports=_used_imports(runs[command], user, use.bindings.values()),
    macros={name: macros[name] for name in use.macros if name in macros},
    bindings=tuple(use.bindings.values()),
    asked=asked or f"palm_mtf {command}",
  )


def _settings(statements: Iterable[Statement]) -> list[Setting]:
  return [each for each in statements if isinstance(each, Setting)]


def _bindings(statements: Iterable[Statement]) -> list[Setting]:
  return [each for each in _settings(statements) if each.selector]


def _entry_point(merged: Iterable[Binding], settings: Iterable[Binding]) -> str:
  """The configurable that a run file binds over those of settings.gin."""
  (entry_point,) = {key.path for key in merged} - {key.path for key in settings}
  return entry_point


def _used_imports(
  run: list[Statement], user: list[Statement], bindings: Iterable[Setting]
) -> tuple[Import, ...]:
  """Imports in order; the package's own ones only where a binding needs them.

  The user's imports stay in any case, for what importing them registers.
  """
  roots = set()
  for setting in bindings:
    roots.add(setting.selector.partition(".")[0])
    for name in names_in(setting.value):
      roots.add(getattr(name, "selector", "").partition(".")[0])
  return tuple(
    each
    for each in (*run, *user)
    if isinstance(each, Import)
    and (each.name in roots or not gin_checks.is_own(each.path))
  )


def _with_origin(setting: Setting) -> str:
  return f"{setting}  # {setting.origin}"
