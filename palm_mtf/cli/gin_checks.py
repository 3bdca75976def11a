# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes gin strict: a setting that would have no effect is an error.

The checks resolve names without importing modules. The user's code may call a
function that no gin file mentions, so a setting of a parameter outside palm_mtf
always counts as used. Commands that need the user's code import the user's
modules after these checks, and then check the values of the user's functions.
"""

import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from palm_mtf import config
from palm_mtf.cli.gin_folder import gin_folder
from palm_mtf.cli.gin_statements import (
  Import,
  Macro,
  Reference,
  Setting,
  Statement,
  format_value,
  leaves_of,
  names_in,
)
from palm_mtf.config.macros import MISSING, choices_of, macros_of
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.machine.process import is_owned
from palm_mtf.user_code import user_code

# End of the path of the function `programs` in tasks/code.py. Its parameter
# permits running programs that a model writes, so only the user may set it.
_PERMISSION = ".programs"


def is_own(path: str) -> bool:
  """Returns whether a dotted path is in palm_mtf but not in palm_mtf.tasks.

  Gin files may set parameters of palm_mtf.tasks, like those of the user's code.
  """
  return f"{path}.".startswith("palm_mtf.") and not (
    f"{path}.".startswith("palm_mtf.tasks.")
  )


def split(
  statements: Iterable[Statement], known: Collection[str]
) -> tuple[dict[str, Setting], tuple[Setting, ...]]:
  """Splits settings into macros and parameters of the user's own functions.

  A setting of a class of palm_mtf, such as `AdafactorConfig.learning_rate =
  0.01`, counts as the setting of its macro, LEARNING_RATE.

  Args:
    statements: statements of all files and of the command line, in order. If
      several statements set the same name, the last statement counts. A file in
      gin/models describes a whole model: settings of the model that precede the
      file do not count, even if the file does not set them.
    known: every macro of every command.

  Returns:
    {macro: setting}, and the settings of parameters.

  Raises:
    UserError: if a parameter of palm_mtf has no macro, or no import provides a
      name.
  """
  statements = list(statements)
  paths = _read_imports(statements)
  macros: dict[str, Setting] = {}
  bindings: dict[tuple[str, str], Setting] = {}
  file = ""
  for each in statements:
    if isinstance(each, Import):
      continue
    if (own_file := _find_own_file(each)) != file:
      file = own_file
      if file.startswith("models/"):
        for name in macros_of(config.ModelConfig):
          macros.pop(name, None)
    path = _find_path(each.selector, paths)
    names = [
      x.selector for x in names_in(each.value) if isinstance(x, Reference)
    ]
    roots = [x.partition(".")[0] for x in names]
    unknown = [x for x in roots if x not in ("gin", *paths)]
    if each.selector and not path:
      unknown.append(each.selector.partition(".")[0])
    if unknown:
      raise UserError(
        f'{each.cited}: no import provides "{unknown[0]}"'
        f"{did_you_mean(unknown[0], paths)}; import it, or "
        f"{_advise(each, known)}."
      )
    if path and not is_own(path):
      bindings[f"{each.scope}/{path}", each.name] = each
    elif not path:  # "NAME = value" sets a macro
      macros[each.name] = each
    elif not _is_of_an_earlier_version(each, paths):
      setting = _make_macro_setting(each, path, known)
      macros[setting.name] = setting
  return macros, tuple(bindings.values())


def _find_own_file(setting: Setting) -> str:
  """Returns the file of palm_mtf's gin folder with a setting; "" if none."""
  file = setting.origin.rpartition(":")[0]
  return file if _is_own_file(file) else ""


@functools.cache
def _is_own_file(file: str) -> bool:
  # An absolute path is that of a file of the user.
  return not os.path.isabs(file) and os.path.isfile(gin_folder() / file)


def _read_imports(statements: Iterable[Statement]) -> dict[str, str]:
  """Returns {name: dotted path} of the names that the files' imports define."""
  imports: dict[str, Import] = {}
  for new in statements:
    if not isinstance(new, Import):
      continue
    old = imports.setdefault(new.name, new)
    # A name may have two paths in palm_mtf, because a config.gin of an earlier
    # version may import palm_mtf's modules by old paths.
    if old.path != new.path and not (is_own(old.path) and is_own(new.path)):
      raise UserError(
        f'{new.origin}: {new.statement}: "{new.name}" is already {old.path} '
        f"({old.origin}); import it as another name."
      )
  return {name: each.path for name, each in imports.items()}


def _find_path(selector: str, paths: Mapping[str, str]) -> str:
  """Returns the dotted path for gin's name `selector`; "" if it is unknown."""
  root, dot, rest = selector.partition(".")
  if root == "gin":  # a function of gin itself, such as gin.singleton
    return selector
  if root in paths:
    return paths[root] + dot + rest
  # Classes in palm_mtf.config can be named without an import.
  name = selector.removeprefix("palm_mtf.").removeprefix("config.")
  return f"palm_mtf.config.{name}" if name in _classes_of_settings() else ""


@functools.cache
def _classes_of_settings() -> dict[str, tuple[str, frozenset[str]]]:
  """Returns {name of a class in palm_mtf.config: (place, macros it reads)}.

  The place is the field that holds the class; optimizers share one place.
  """

  def walk(
    settings: type, place: str
  ) -> Iterator[tuple[str, tuple[str, frozenset[str]]]]:
    fields = {x: choices_of(x) for x in dataclasses.fields(settings)}
    macros = frozenset(x.name.upper() for x, y in fields.items() if not y)
    yield settings.__name__, (place, macros)
    for field, parts in fields.items():
      for part in parts:
        yield from walk(part, field.name)

  return dict(walk(config.ConfigOfSweep, ""))


def _make_macro_setting(
  setting: Setting, path: str, known: Collection[str]
) -> Setting:
  """Converts a parameter's setting to the setting of the parameter's macro."""
  macro = setting.name.upper()
  classes = _classes_of_settings()
  readers = [name for name, (_, x) in classes.items() if macro in x]
  advice, given = _advise(setting, known), path.rpartition(".")[2]
  has_moved = setting.name in config.FORMERLY_OF_ADAFACTOR
  if given not in readers and not (has_moved and given == "AdafactorConfig"):
    raise UserError(f"{setting.cited}: is not bound in gin; {advice}.")
  if setting.scope:
    raise UserError(f"{setting.cited}: settings have no scopes; {advice}.")
  if len({classes[x][0] for x in readers}) > 1:
    raise UserError(
      f"{setting.cited}: {' and '.join(readers)} read {macro}; {advice}."
    )
  return Setting(name=macro, value=setting.value, origin=setting.origin)


def _is_of_an_earlier_version(
  setting: Setting, paths: Mapping[str, str]
) -> bool:
  """Returns whether only earlier versions wrote this setting to config.gin.

  Such a setting passes a macro or an object of palm_mtf to a parameter, for
  example `config.PalmConfig.d_ff = %D_FF` or `train.train.model =
  @config.PalmConfig()`. It has no effect today.
  """
  value = setting.value
  if isinstance(value, Reference):
    return is_own(_find_path(value.selector, paths))
  return isinstance(value, Macro) and value.name.lower() == setting.name


def _advise(setting: Setting, known: Collection[str]) -> str:
  """Returns advice on what to set instead of a parameter of palm_mtf."""
  macro = setting.name.upper()
  if setting.selector and macro in known:
    return f"set {macro} = {format_value(setting.value)} instead"
  # A reference (@...) gets no suggestion, because no macro holds an object.
  is_value = setting.selector and not isinstance(setting.value, Reference)
  return "set a macro instead" + (did_you_mean(macro, known) * bool(is_value))


def check_runs_no_code(statements: Iterable[Statement]) -> None:
  """Raises UserError if a run's config.gin can run its author's code.

  The file may set macros, and parameters of palm_mtf.tasks, to literals. It may
  not import modules outside palm_mtf (an import runs the module), refer to
  functions (gin calls them), name functions in ASSERTIONS, or set the parameter
  that permits running a model's programs.
  """
  statements = list(statements)
  paths = _read_imports(statements)
  for each in statements:
    if isinstance(each, Import):
      what, is_data = each.statement, f"{each.module}.".startswith("palm_mtf.")
    else:
      what, path = str(each), _find_path(each.selector, paths)
      is_data = not any(
        isinstance(x, Reference) or "." in x.name for x in names_in(each.value)
      )
      if path and is_own(path):
        is_data |= _is_of_an_earlier_version(each, paths)
      elif each.name == "ASSERTIONS":
        is_data &= all(
          isinstance(x, str) and "." not in x for x in leaves_of(each.value)
        )
      elif each.selector:
        is_data &= f"{path}.".startswith("palm_mtf.tasks.")
        is_data &= not path.endswith(_PERMISSION)
    if not is_data:
      raise UserError(
        f"{each.origin}: {what}: runs or permits code from the author of this "
        "run; if you trust the author, add --trust_config."
      )


def check_known(
  macros: Mapping[str, Setting],
  settings: Iterable[Setting],
  known: Collection[str],
) -> None:
  """Raises UserError for a macro that no command and no other setting reads.

  `settings` may refer to macros; `known` are the macros of all commands.
  """
  # A macro outside `known` has an effect only if a setting refers to it.
  asked = set(known)
  for setting in settings:
    names = list(names_in(setting.value))
    if Macro("gin.REQUIRED") in names or (
      Macro("REQUIRED") in names and "REQUIRED" not in macros
    ):
      raise UserError(
        f"{setting.cited}: leave the line out; a macro that is "
        "required and not set is reported."
      )
    asked |= {x.name for x in names if isinstance(x, Macro)}
  for name, setting in macros.items():
    if name not in asked:
      raise UserError(
        f"unknown macro {name}{did_you_mean(name, sorted(asked))} "
        f"{setting.place}; --print_config lists all of them"
      )


def check_optimizer(unused: Iterable[Setting], optimizer: str) -> None:
  """Raises UserError if the user gives settings that an optimizer lacks.

  Files of palm_mtf, such as gin/optim/palm.gin, may have such settings, because
  a file with another OPTIMIZER may follow them.

  Args:
    unused: settings of macros that the command does not use.
    optimizer: the value of OPTIMIZER.
  """
  own = macros_of(config.OPTIMIZERS[optimizer])
  others = {y for x in config.OPTIMIZERS.values() for y in macros_of(x)}
  for each in unused:
    if each.name not in others or each.name in own or _find_own_file(each):
      continue
    words = each.name.split("_")  # BETA2_EXPONENT is most like BETA2
    starts = ["_".join(words[:n]) for n in range(len(words), 0, -1)]
    nearest = [x for x in (did_you_mean(x, own) for x in starts) if x] + [""]
    raise UserError(
      f"{each.cited}: OPTIMIZER = {optimizer!r} has no such setting"
      f"{nearest[0]}; leave it out."
    )


def find_reached(
  settings: Iterable[Setting], macros: Mapping[str, Setting]
) -> dict[str, Setting]:
  """Returns the macros that `settings` use, directly or through other macros.

  Raises UserError if a macro is not set, or macros refer to each other in a
  circle.
  """
  found: dict[str, Setting] = {}

  # `circle` names the macros on the path from the first setting to `setting`.
  def follow(setting: Setting, circle: tuple[str, ...]) -> None:
    for each in names_in(setting.value):
      if isinstance(each, Reference) or "." in each.name:
        continue  # a function, or %module.NAME, a constant of that module
      if each.name in circle:
        raise UserError(
          f"{setting.cited}: macros refer to each other in a "
          f"circle: {' -> '.join((*circle, each.name))}."
        )
      if each.name not in macros:
        raise UserError(
          f"{setting.cited}: {each.name} is not set"
          f"{did_you_mean(each.name, macros)}; pass {_format_flag(each.name)}"
        )
      found[each.name] = macros[each.name]
      follow(macros[each.name], (*circle, each.name))

  for setting in settings:
    follow(setting, () if setting.selector else (setting.name,))
  return found


def check_required(macros: Mapping[str, Setting]) -> None:
  """Raises UserError if a macro without a default is not set."""
  unset = [name for name, x in macros.items() if x.value is MISSING]
  if len(unset) > 3:
    raise UserError(
      f"{', '.join(unset[:3])} and {len(unset) - 3} more are not set; start "
      "from a recipe, such as --gin_file=recipes/quickstart.gin"
    )
  if unset:
    raise UserError(
      f"{' and '.join(unset)} {'are' if len(unset) > 1 else 'is'} not set; "
      f"pass {' '.join(map(_format_flag, unset))}"
    )


def _format_flag(macro: str) -> str:
  is_text = macro.endswith(("_DIR", "_FILES"))
  return f"--gin.{macro}=" + ("'\"...\"'" if is_text else "...")


def import_modules(imports: Collection[Import]) -> None:
  """Imports the user's modules in the order of `imports`.

  Raises UserError if a module does not exist, or raises an exception.
  """
  # Find modules in the current folder. `python -m palm_mtf` adds this folder to
  # sys.path, but the script `palm_mtf` does not.
  if str(Path.cwd()) not in sys.path:
    sys.path.append(str(Path.cwd()))
  if imports and is_owned():
    # Import TensorFlow before the user's modules import it, because `_tf` hides
    # the notices that TensorFlow's import prints.
    import palm_mtf._tf  # noqa: F401

  for each in imports:
    where = f"{each.origin}: {each.statement}"
    with user_code(where):
      try:
        importlib.import_module(each.module)
      except ImportError as error:
        raise UserError(f"{where}: {error}; is it installed?") from error


def convert_to_data(setting: Setting, value: Any) -> Any:
  """Returns a macro's value as numbers, strings, None, lists, tuples, dicts.

  The checks of settings accept only these types, and the user's functions may
  return others. Arrays and numbers of NumPy, TensorFlow, JAX and PyTorch become
  lists and numbers. Paths become strings.

  Raises UserError if the value is, or contains, an object of another kind.
  """
  reference = setting.value
  if isinstance(reference, Reference) and not reference.called:
    raise UserError(
      f"{setting.cited}: is the function or class itself; write {reference}() "
      "to call it."
    )
  with user_code(setting.cited):
    try:
      return _convert(value, setting.cited)
    except RecursionError:
      raise UserError(f"{setting.cited}: contains itself.") from None


def check_characters(setting: Setting, value: Any) -> None:
  """Raises UserError if a string in `value` could be no path, as with a NUL."""
  for text in (x for x in leaves_of(value) if isinstance(x, str)):
    try:
      bad = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:
      bad = True
    if bad:
      raise UserError(
        f"{setting.cited}: {text!r} has a character that neither a path nor a "
        "text in UTF-8 can have; remove it."
      )


def _convert(value: Any, cited: str) -> Any:
  if hasattr(value, "numpy"):  # a tensor of TensorFlow or PyTorch
    value = value.numpy()
  if hasattr(value, "tolist"):  # an array or a number of any library
    value = value.tolist()
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, os.PathLike):
    return _convert(os.fspath(value), cited)
  if isinstance(value, dict):
    return {_convert(k, cited): _convert(x, cited) for k, x in value.items()}
  if isinstance(value, list | tuple):
    items = [_convert(each, cited) for each in value]
    return tuple(items) if isinstance(value, tuple) else items
  for kind in (int, float, str):  # an IntEnum, for example, becomes an int
    if isinstance(value, kind):
      return kind(value)
  raise UserError(
    f"{cited}: gives a {type(value).__name__}; return a number, a text, None, "
    "or a list, tuple or dict of these."
  )
