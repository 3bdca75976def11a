# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What makes gin strict: a setting that would have no effect is an error.

Names are followed without importing anything. Code outside palm_mtf may call
its own functions where no gin file shows it, so bindings to it always count as
used.
"""

from collections.abc import Collection, Iterable, Mapping

from palm_mtf.cli.gin_statements import (
  Import,
  Macro,
  Reference,
  Setting,
  Statement,
  format_value,
  names_in,
)
from palm_mtf.config.macros import MISSING
from palm_mtf.errors import UserError, did_you_mean

# tasks/code.py has the parameter that allows programs that a model writes.
_PERMISSION = ".programs"


def is_own(path: str) -> bool:
  """Whether a dotted path lies in palm_mtf; its tasks are as outside code."""
  return f"{path}.".startswith("palm_mtf.") and not (
    f"{path}.".startswith("palm_mtf.tasks.")
  )


def split(
  statements: Iterable[Statement], known: Collection[str]
) -> tuple[dict[str, Setting], tuple[Setting, ...]]:
  """Splits settings into macros and parameters of the user's own functions.

  Args:
    statements: statements of all files in their order, and the command line.
    known: every macro of every command.

  Returns:
    {macro: its last setting}, and the last setting of each parameter.

  Raises:
    UserError: a parameter is one of ours, or of what no import provides.
  """
  statements = list(statements)
  paths = _imported_paths(statements)
  macros: dict[str, Setting] = {}
  bindings: dict[tuple[str, str], Setting] = {}
  for each in statements:
    if isinstance(each, Import):
      continue
    refers_to = [
      _path(x.selector, paths, each, known)
      for x in names_in(each.value)
      if isinstance(x, Reference)
    ]
    # "NAME = value" sets a macro, "module.function.name = value" a parameter.
    if not each.selector:
      macros[each.name] = each
      continue
    path = _path(each.selector, paths, each, known)
    if not is_own(path):
      bindings[f"{each.scope}/{path}", each.name] = each
    elif not _is_of_an_earlier_version(each, refers_to):
      raise UserError(
        f"{each} ({each.origin}): is not bound in gin; {_instead(each, known)}."
      )
  return macros, tuple(bindings.values())


def _imported_paths(statements: Iterable[Statement]) -> dict[str, str]:
  """Returns what the imports of all files let selectors begin with."""
  imports: dict[str, Import] = {}
  for new in statements:
    if not isinstance(new, Import):
      continue
    old = imports.setdefault(new.name, new)
    # Runs of earlier versions import our modules from where they lay then.
    if old.path != new.path and not (is_own(old.path) and is_own(new.path)):
      raise UserError(
        f'{new.origin}: {new.statement}: "{new.name}" is already {old.path} '
        f"({old.origin}); import it as another name."
      )
  return {name: each.path for name, each in imports.items()}


def _path(
  selector: str,
  paths: Mapping[str, str],
  setting: Setting,
  known: Collection[str],
) -> str:
  """Returns the dotted path that `selector` stands for in any file."""
  root, dot, rest = selector.partition(".")
  if root == "gin":  # gin.singleton and its like
    return selector
  if root not in paths:
    raise UserError(
      f'{setting} ({setting.origin}): no import provides "{root}"'
      f"{did_you_mean(root, paths)}; import it, or {_instead(setting, known)}."
    )
  return paths[root] + dot + rest


def _is_of_an_earlier_version(
  setting: Setting, refers_to: Collection[str]
) -> bool:
  """Whether a run's config.gin had this line when macros were bound in gin.

  Its macro says the same today: `config.PalmConfig.d_ff = %D_FF`, or
  `train.train.model = @config.PalmConfig()`.
  """
  if isinstance(setting.value, Macro):
    return setting.value.name.lower() == setting.name
  return isinstance(setting.value, Reference) and all(map(is_own, refers_to))


def _instead(setting: Setting, known: Collection[str]) -> str:
  """Returns what to write instead of a parameter of ours."""
  macro = setting.name.upper()
  if setting.selector and macro in known:
    return f"set {macro} = {format_value(setting.value)} instead"
  # A reference stands for a part of ours, which no macro replaces.
  is_value = setting.selector and not isinstance(setting.value, Reference)
  return "set a macro instead" + (did_you_mean(macro, known) * bool(is_value))


def check_runs_no_code(statements: Iterable[Statement]) -> None:
  """Raises UserError unless a run's config.gin is data.

  It may set macros and parameters of palm_mtf.tasks to literals. An import runs
  a module, a reference calls a function of any module, and a parameter permits
  programs that the model writes.

  Args:
    statements: statements of the file, which may be a stranger's.
  """
  statements = list(statements)
  paths = _imported_paths(statements)
  for each in statements:
    if isinstance(each, Import):
      path, what = f"{each.module}.", each.statement
      if path.startswith("palm_mtf."):
        continue
    else:
      root, _, rest = each.selector.partition(".")
      path, what = f"{paths.get(root, root)}.{rest}", str(each)
      refers = any(
        isinstance(x, Reference) or "." in x.name for x in names_in(each.value)
      )
      if not each.selector:
        is_data = not refers
      elif is_own(path):  # nothing is bound by it
        is_data = True
      else:
        is_data = path.startswith("palm_mtf.tasks.") and not refers
        is_data &= not path.endswith(_PERMISSION)
      if is_data:
        continue
    raise UserError(
      f"{each.origin}: {what}: runs or permits code of whoever wrote this run; "
      "if you trust them, add --trust_config."
    )


def check_known(
  macros: Mapping[str, Setting],
  settings: Iterable[Setting],
  known: Collection[str],
) -> None:
  """Raises UserError for a macro that nothing reads.

  Args:
    macros: the macros that are set.
    settings: whatever may refer to a macro.
    known: every macro of every command.
  """
  # A macro of the user's own is known where something refers to it.
  asked = set(known)
  for setting in settings:
    names = list(names_in(setting.value))
    if Macro("gin.REQUIRED") in names or (
      Macro("REQUIRED") in names and "REQUIRED" not in macros
    ):
      raise UserError(
        f"{setting} ({setting.origin}): leave the line out; a macro that is "
        "required and not set is reported."
      )
    asked |= {x.name for x in names if isinstance(x, Macro)}
  for name, setting in macros.items():
    if name not in asked:
      raise UserError(
        f"unknown macro {name}{did_you_mean(name, sorted(asked))} "
        f"{setting.place}; --print_config lists all of them"
      )


def reached(
  settings: Iterable[Setting], macros: Mapping[str, Setting]
) -> dict[str, Setting]:
  """Returns the macros that the values of `settings` refer to.

  Raises:
    UserError: a macro is not set, or macros refer to each other in a circle.
  """
  found: dict[str, Setting] = {}

  def follow(setting: Setting, circle: tuple[str, ...]) -> None:
    for each in names_in(setting.value):
      if isinstance(each, Reference) or "." in each.name:
        continue  # %module.NAME is a constant of that module
      if each.name in circle:
        raise UserError(
          f"{setting} ({setting.origin}): macros refer to each other in a "
          f"circle: {' -> '.join((*circle, each.name))}."
        )
      if each.name not in macros:
        raise UserError(
          f"{setting} ({setting.origin}): {each.name} is not set"
          f"{did_you_mean(each.name, macros)}; pass {_flag(each.name)}"
        )
      found[each.name] = macros[each.name]
      follow(macros[each.name], (*circle, each.name))

  # Depth first: `circle` is the path from the setting that asked.
  for setting in settings:
    follow(setting, () if setting.selector else (setting.name,))
  return found


def check_required(macros: Mapping[str, Setting]) -> None:
  """Raises UserError for macros without a default that nothing sets."""
  unset = [name for name, x in macros.items() if x.value is MISSING]
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
