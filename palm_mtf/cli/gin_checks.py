# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What makes gin strict: a setting that would have no effect is an error.

From the entry point, every binding, reference and macro that a command uses is
followed by name alone; nothing is imported. What the user set outside of that
is misspelt or idle. Code outside palm_mtf may call its own configurables where
no gin file shows it, so bindings to it always count as used.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from palm_mtf.cli.earlier_versions import part_of_today
from palm_mtf.cli.gin_statements import (
  Import,
  Macro,
  Reference,
  Setting,
  Statement,
  format_value,
  names_in,
)
from palm_mtf.errors import UserError, did_you_mean

_REQUIRED = Macro("gin.REQUIRED")


class Binding(NamedTuple):
  """A parameter, whatever its file calls the module; path "" for a macro."""

  scope: str
  path: str
  name: str


class Symbols:
  """What the imports of all files let selectors begin with."""

  def __init__(self, files: Iterable[Iterable[Statement]]):
    self._imports: dict[str, Import] = {}
    for statements in files:
      for each in statements:
        if isinstance(each, Import):
          self._add(each)

  def _add(self, new: Import) -> None:
    old = self._imports.setdefault(new.name, new)
    if old.path != new.path:
      raise UserError(
        f'{new.origin}: {new.statement}: "{new.name}" is already {old.path} '
        f"({old.origin}); import it as another name."
      )

  def path_of(self, selector: str, setting: Setting) -> str:
    """The dotted path that `selector` stands for in any file."""
    root, dot, rest = selector.partition(".")
    if root == "gin":  # gin.singleton and its like
      return selector
    if root not in self._imports:
      raise UserError(
        f'{setting} ({setting.origin}): no import provides "{root}"'
        f"{did_you_mean(root, self._imports)}; import it, or set a macro of "
        "runs/settings.gin instead."
      )
    return self._imports[root].path + dot + rest

  def key_of(self, setting: Setting) -> Binding:
    """The parameter that `setting` sets."""
    path = self.path_of(setting.selector, setting) if setting.selector else ""
    return Binding(setting.scope, path, setting.name)

  def same(self, setting: Setting, shipped: Mapping[Binding, Setting]) -> bool:
    """Whether a run file has this very line."""
    other = shipped.get(self.key_of(setting))
    return other is not None and self._text(other) == self._text(setting)

  def of_today(self, setting: Setting) -> Setting:
    """Returns what the line of an earlier version says today."""
    key = self.key_of(setting)
    part = part_of_today(key.path, key.name)
    if not part:
      return setting
    return dataclasses.replace(setting, selector="config.Config", name=part)

  def _text(self, setting: Setting) -> str:
    """Returns its value, whatever its file calls the module it refers to."""
    value = setting.value
    if isinstance(value, Reference):
      path = self.path_of(value.selector, setting)
      value = dataclasses.replace(value, selector=path)
    return repr(value)


@dataclasses.dataclass(frozen=True)
class Use:
  """What a command uses.

  Attributes:
    bindings: parameters, those of one configurable together.
    macros: names of macros and the setting that first asks for each.
    unset: those of them that nothing sets.
    scopes: scopes in which something is called.
  """

  bindings: dict[Binding, Setting] = dataclasses.field(default_factory=dict)
  macros: dict[str, Setting] = dataclasses.field(default_factory=dict)
  unset: list[str] = dataclasses.field(default_factory=list)
  scopes: set[str] = dataclasses.field(default_factory=set)


def is_own(path: str) -> bool:
  """Whether a dotted path lies in palm_mtf; its tasks are as outside code."""
  return f"{path}.".startswith("palm_mtf.") and not (
    f"{path}.".startswith("palm_mtf.tasks.")
  )


def check_parameter(
  setting: Setting, shipped: Mapping[Binding, Setting], symbols: Symbols
) -> None:
  """Raises UserError unless `setting` may set its parameter directly."""
  path = symbols.key_of(setting).path
  known = {key.name: each for key, each in shipped.items() if key.path == path}
  if not known:
    return
  where = f"{setting} ({setting.origin})"
  if setting.name not in known:
    raise UserError(
      f"{where}: {setting.selector} has no parameter "
      f'"{setting.name}"{did_you_mean(setting.name, known)}. '
      f"Parameters: {', '.join(known)}."
    )
  macro = known[setting.name].value
  if isinstance(macro, Macro) and not setting.scope:
    raise UserError(
      f"{where}: this parameter has a macro; set "
      f"{macro.name} = {format_value(setting.value)} instead."
    )


def check_known_macros(
  macros: Mapping[str, Setting],
  shipped: Mapping[Binding, Setting],
  merged: Mapping[Binding, Setting],
) -> None:
  """Raises UserError for a macro that nothing refers to."""
  settings = [*shipped.values(), *merged.values(), *macros.values()]
  asked = {
    name.name
    for setting in settings
    for name in names_in(setting.value)
    if isinstance(name, Macro)
  }
  for setting in [*macros.values(), *merged.values()]:
    if _REQUIRED in names_in(setting.value):
      raise UserError(
        f"{setting} ({setting.origin}): leave the line out; a macro that is "
        "required and not set is reported."
      )
  for name, setting in macros.items():
    if name not in asked:
      raise UserError(
        f"unknown macro {name}{did_you_mean(name, sorted(asked))} "
        f"{setting.place}; see gin/runs/settings.gin"
      )


def reach(
  entry_point: str,
  merged: Mapping[Binding, Setting],
  macros: Mapping[str, Setting],
  symbols: Symbols,
) -> Use:
  """Follows bindings, references and macros from the entry point."""
  use = Use()
  seen = set()
  waiting = [entry_point]
  waiting += [key.path for key in merged if not is_own(key.path)]

  def follow(setting: Setting, circle: tuple[str, ...]) -> None:
    for name in names_in(setting.value):
      if isinstance(name, Reference):
        use.scopes.add(name.scope)
        waiting.append(symbols.path_of(name.selector, setting))
      elif name.name in circle:
        raise UserError(
          f"{setting} ({setting.origin}): macros refer to each other in a "
          f"circle: {' -> '.join((*circle, name.name))}."
        )
      elif "." not in name.name:  # %module.NAME is a constant of that module
        use.macros.setdefault(name.name, setting)
        if name.name in macros:
          follow(macros[name.name], (*circle, name.name))
        elif name.name not in use.unset:
          use.unset.append(name.name)

  while waiting:
    path = waiting.pop(0)
    if path in seen:
      continue
    seen.add(path)
    for key, setting in merged.items():
      if key.path == path:
        use.bindings[key] = setting
        follow(setting, ())
  return use


def check_reached(
  use: Use,
  merged: Mapping[Binding, Setting],
  shipped: Mapping[Binding, Setting],
) -> None:
  """Raises UserError for a binding that the command never comes to.

  What another command's run file binds may be set for that command's sake.
  """
  shipped_paths = {key.path for key in shipped}
  for key, setting in merged.items():
    active = not key.scope or any(
      f"{scope}/".startswith(f"{key.scope}/") for scope in use.scopes
    )
    if key in use.bindings and active:
      continue
    if key.path in shipped_paths and active:
      continue
    known = {each.selector: None for each in shipped.values()}
    guess = did_you_mean(setting.selector, known)
    what = f"{setting.selector}{guess}" if active else f'scope "{key.scope}"'
    raise UserError(
      f"{setting} ({setting.origin}): has no effect, because nothing in this "
      f"run uses {what}."
    )


def check_all_set(use: Use, shipped: Mapping[Binding, Setting]) -> None:
  """Raises UserError for macros that the command needs and nothing sets."""
  unset = use.unset
  own = {each.origin for each in shipped.values()}
  for name in unset:
    by = use.macros[name]
    if by.origin not in own:
      raise UserError(
        f"{by} ({by.origin}): {name} is not set"
        f"{did_you_mean(name, use.macros.keys() - set(unset))}; "
        f"pass {_flag(name)}"
      )
  if len(unset) > 3:
    raise UserError(
      f"{', '.join(unset[:3])} and {len(unset) - 3} more are not set; start "
      "from a recipe, such as --gin_file=recipes/quickstart.gin"
    )
  if unset:
    raise UserError(
      f"{' and '.join(unset)} {'are' if len(unset) > 1 else 'is'} not set; "
      f"pass {' '.join(map(_flag, unset))}"
    )


def _flag(macro: str) -> str:
  is_text = macro.endswith(("_DIR", "_FILES"))
  return f"--gin.{macro}=" + ("'\"...\"'" if is_text else "...")
