# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Merges gin files and flags into one configuration.

Every field of `config.Config` is a macro. Its default, defaults/<command>.gin,
the user's files in order and the command line can set the macro; the last
setting counts. Every value keeps its origin. A setting without an effect is an
error (gin_checks.py). The result is one flat gin file: `--print_config` prints
it, a run stores it as MODEL_DIR/config.gin, and passing it as `--gin_file` to
any command gives the same configuration.
"""

import dataclasses
import importlib.util  # noqa: F401 (gin 0.5.0 uses it without importing it)
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from palm_mtf import config
from palm_mtf.cli import gin_checks
from palm_mtf.cli.command_table import COMMANDS
from palm_mtf.cli.gin_folder import defaults_file, find_gin_file, gin_folder
from palm_mtf.cli.gin_statements import (
  Import,
  Macro,
  Setting,
  Statement,
  names_in,
  read_command_line,
  read_file,
  read_statements,
)
from palm_mtf.config.macros import MISSING, from_macros, macros_of
from palm_mtf.config.tpu_slice import chip_of
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.machine import cache_folder
from palm_mtf.machine.activation_dtype import resolve_dtype
from palm_mtf.model_dir.atomic_files import check_model_dir
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.user_code import user_code

DEFAULT = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
  """The settings of one command, which `load` has read and checked."""

  # Class in palm_mtf.config; the command takes an object of it.
  config_class: type
  imports: tuple[Import, ...]  # imports of the user's modules, in order
  # {name: setting} of every macro that the command uses.
  macros: Mapping[str, Setting]
  # Settings of parameters of the user's own functions.
  bindings: tuple[Setting, ...]
  # The command line as the user gave it, for the first line of config.gin.
  asked: str
  # Macros for a chip's rates, such as FLOP/s, that the user has not set.
  # `format_effective` comments them out, so that a command that reads the
  # config.gin with another CHIP gets the rates of that chip.
  implied: Collection[str]

  def format_effective(self) -> str:
    """Returns the text of a single gin file with this configuration."""
    lines = [f"# {self.asked}".replace("\n", " "), *self._format_imports()]
    for group in (self.macros.values(), self.bindings):
      lines.append("")
      for each in group:
        mark = "# " if each.name in self.implied else ""
        lines.append(f"{mark}{each}  # {each.origin}")
    return "\n".join(lines).rstrip() + "\n"

  def _format_imports(self) -> list[str]:
    statements = dict.fromkeys(each.statement for each in self.imports)
    return ["from __gin__ import dynamic_registration", *statements]

  def build(self) -> tuple[str, config.CorpusConfig]:
    """Returns MODEL_DIR and the configuration; runs the user's code if needed.

    Raises UserError if an import, name or value in the user's files is wrong.
    """
    values = self._compute_values()
    settings = from_macros(self.config_class, values)
    if self._reads_data:  # all commands but `plan`, which has no MODEL_DIR
      check_model_dir(values["MODEL_DIR"])
    return values["MODEL_DIR"], settings

  def config_files(self, **resolved: object) -> dict[str, str]:
    """Returns {name: text} of the gin files that training writes to MODEL_DIR.

    `config.gin` has the values as the user gave them. `operative_config.gin`
    has the values that replace references to macros and "auto".

    Args:
      **resolved: values that the command chose for macros that were "auto".
    """
    operative = self._make_operative()
    macros = dict(operative.macros)
    for name, value in resolved.items():
      if macros[name].value != value:
        origin = f"{macros[name].value}, {macros[name].origin}"
        macros[name] = Setting(name=name, value=value, origin=origin)
    operative = dataclasses.replace(operative, macros=macros)
    return {
      "config.gin": self.format_effective(),
      "operative_config.gin": operative.format_effective(),
    }

  def format_values(self) -> str:
    """Returns the text of a gin file that a run of a sweep is compared with.

    The file has values in place of references to macros, and no origins.
    """
    settings = [*self._make_operative().macros.values(), *self.bindings]
    given = [str(x) for x in settings if x.name not in self.implied]
    lines = [*self._format_imports(), *given]
    return "\n".join(lines) + "\n"

  def _make_operative(self) -> "Configuration":
    """Returns a copy in which values replace references to macros, %NAME."""
    values = self._resolve_all()
    macros = {
      name: dataclasses.replace(setting, value=values[name])
      for name, setting in self.macros.items()
    }
    return dataclasses.replace(self, macros=macros)

  def add_location(self, message: str) -> str:
    """Appends where macros are set with which `message` begins.

    It begins "MACRO = value: " or "MACRO = value and OTHER = value: ".
    """
    first, equals, rest = message.partition(": ")[0].partition(" = ")
    if not equals or first not in self.macros:
      return message
    names = [first, *re.findall(r" ([A-Z][A-Z0-9_]*) = ", rest)]
    found = [self.macros[x] for x in names if x in self.macros]
    if any(message.startswith(x.cited) for x in found):  # it says where
      return message
    places = ", ".join(
      f"{x.name} is set {x.place}" for x in found if x.origin != DEFAULT
    )
    return f"{message} ({places})" if places else message

  def check_values(self) -> None:
    """Calls the user's functions, if any, to check the values that they return.

    Raises UserError if an import, name or function in the user's files fails.
    """
    if self._needs_gin:
      self._compute_values()

  @property
  def _needs_gin(self) -> bool:
    # After `_resolve_all`, the only names left are of the user's functions and
    # constants, which only gin can replace by values.
    return any(names_in([*self._resolve_all().values()]))

  @property
  def _reads_data(self) -> bool:
    return issubclass(self.config_class, config.CorpusConfig)

  def _compute_values(self) -> dict[str, object]:
    """Returns {macro: value}, after calling the user's functions."""
    values = self._resolve_all()
    # A command that reads data imports the user's modules even if gin calls no
    # function in them, because the modules may register SeqIO tasks.
    if self._needs_gin or self._reads_data:
      gin_checks.import_modules(self.imports)
    if self._needs_gin or (self._reads_data and self.bindings):
      self._bind()
      computed = self._call_functions(values)
      values |= computed
      # If a function of the user names the chip, `load` did not know the chip,
      # so read the chip's rates now.
      if "CHIP" in computed:
        chip = read_chip(computed["CHIP"])
        values |= {x: chip[x].value for x in chip.keys() & self.implied}
    for name, value in values.items():
      gin_checks.check_characters(self.macros[name], value)
    return values

  def _resolve_all(self) -> dict[str, object]:
    """Returns {macro: value} after resolving the references to macros."""
    literals = {}
    for name, setting in self.macros.items():
      try:
        literals[name] = self._resolve_macros(setting.value)
      except TypeError:  # such as {%NAME: 1}, if NAME is a list
        raise UserError(
          f"{setting.cited}: a list or a dict cannot be the key of a dict."
        ) from None
    return literals

  def _resolve_macros(self, value: object) -> object:
    if isinstance(value, Macro) and value.name in self.macros:
      return self._resolve_macros(self.macros[value.name].value)
    if isinstance(value, dict):
      pairs = value.items()
      return {
        self._resolve_macros(k): self._resolve_macros(v) for k, v in pairs
      }
    if isinstance(value, (list, tuple)):
      return type(value)(self._resolve_macros(each) for each in value)
    return value

  def _bind(self) -> None:
    """Binds the settings in gin, so that gin can call the user's functions."""
    import gin

    # gin's state is global, so remove an earlier command's settings.
    gin.clear_config()
    for setting in [*self.macros.values(), *self.bindings]:
      if setting.name not in self.implied:
        with user_code(setting.cited):
          # Repeat the imports: gin resolves only names that the text imports.
          gin.parse_config([*self._format_imports(), str(setting)])

  def _call_functions(self, values: Mapping[str, object]) -> dict[str, object]:
    """Returns {macro: value} of macros that refer to functions or constants."""
    import gin

    computed, macro = {}, gin.get_configurable("gin.macro")
    fields = {"MODEL_DIR", *macros_of(self.config_class)}
    left = [self.macros[name] for name, x in values.items() if any(names_in(x))]
    # First compute the macros that name functions, and last those that only
    # refer to other macros, so that the error for a function that fails cites
    # the macro that names the function.
    left.sort(
      key=lambda x: all(isinstance(y, Macro) for y in names_in(x.value))
    )
    for setting in left:
      # For gin, `%NAME` means to call gin.macro in the scope NAME.
      with user_code(setting.cited), gin.config_scope(setting.name):
        value = macro()
      if setting.name in fields:
        value = gin_checks.convert_to_data(setting, value)
      computed[setting.name] = value
    return computed


def load(
  command: str,
  gin_files: Iterable[str] = (),
  bindings: Iterable[str] = (),
  *,
  asked: str = "",
  model_dir: str | None = None,
  trust_config: bool = False,
  over: Iterable[Setting] = (),
) -> Configuration:
  """Reads, merges and checks the configuration of one command.

  Args:
    command: name of a command that gin configures, such as "data cache".
    gin_files: the user's files; a later file overrides an earlier one.
    bindings: "NAME=VALUE" strings, which override all files.
    asked: the command line, for the first line of config.gin.
    model_dir: MODEL_DIR of a training run, whose config.gin is read before
      `gin_files`; None for no run.
    trust_config: whether config.gin may run code (`check_runs_no_code`).
    over: settings that override all others, such as those of a sweep's run.

  Raises:
    UserError: if anything is wrong; the message is about the first fault.
  """
  statements, of_run = read_file(defaults_file(command)), []
  if model_dir:
    file = ModelDir(model_dir).config
    if not os.path.isfile(file):
      raise UserError(
        f"--model_dir = {model_dir!r}: there is no config.gin in it; give the "
        "MODEL_DIR of a training run."
      )
    of_run = read_file(Path(file).resolve())
    statements += of_run
    # Override two macros of the run: its folder may have been renamed, and its
    # PROMPTS are for the end of training, not for `generate`.
    bindings = [f"MODEL_DIR={model_dir!r}", "PROMPTS=[]", *bindings]
  for name in gin_files:
    statements += read_file(find_gin_file(name))
  statements += read_command_line(bindings)
  statements += over
  defaults = {"MODEL_DIR": MISSING, **macros_of(config.ConfigOfSweep)}
  # Accept macros of other commands too, because commands may share a file.
  given, foreign = gin_checks.split(statements, defaults)
  _check_function(command, given)
  if not trust_config:
    gin_checks.check_runs_no_code(of_run)
  given = _find_chip(given) | given
  gin_checks.check_known(given, [*given.values(), *foreign], defaults)
  implied = {*macros_of(config.HardwareConfig)}.difference(given)
  given = read_chip(_follow("CHIP", given)) | given
  config_class = getattr(config, COMMANDS[command].config)
  optimizer = _find_optimizer(given)
  fields = {"MODEL_DIR": MISSING, **macros_of(config_class, optimizer)}
  if left_out := COMMANDS[command].leaves_out:
    for name in macros_of(getattr(config, left_out)):
      del fields[name]
  used = _add_defaults(given, fields)
  gin_checks.check_required(used)
  every = given | {
    name: setting
    for name, setting in _add_defaults(given, defaults).items()
    if setting.value is not MISSING
  }
  used |= gin_checks.find_reached([*used.values(), *foreign], every)
  unused = [x for x in given.values() if x.name not in used]
  gin_checks.check_optimizer(unused, optimizer["OPTIMIZER"])
  return Configuration(
    config_class=config_class,
    imports=tuple(
      each
      for each in statements
      if isinstance(each, Import) and not gin_checks.is_own(each.path)
    ),
    macros=used,
    bindings=foreign,
    asked=asked or f"palm_mtf {command}",
    implied=implied,
  )


def _check_function(command: str, given: Mapping[str, Setting]) -> None:
  function = _follow("MODEL_FUNCTION", given)
  if isinstance(function, Macro) or not function:
    return
  if not COMMANDS[command].takes_functions:
    raise UserError(
      f"{given['MODEL_FUNCTION'].cited}: `{command}` knows only PaLM's block; "
      "palm_mtf only trains such a model: read its weights by TensorFlow, from "
      "MODEL_DIR/checkpoints."
    )


def _follow(name: str, given: Mapping[str, Setting]) -> object:
  """Returns the value of a macro that may refer to other macros."""
  value: object = Macro(name)
  # Macros may refer to each other in a circle, so `while` might not end.
  for _ in given:
    if isinstance(value, Macro) and value.name in given:
      value = given[value.name].value
  return value


def _find_chip(given: Mapping[str, Setting]) -> dict[str, Setting]:
  """Returns {"CHIP": setting} of the chip of TPU, or {} without TPU."""
  tpu = _follow("TPU", given)
  if not isinstance(tpu, str) or not tpu:
    return {}
  value = chip_of(tpu)
  return {"CHIP": dataclasses.replace(given["TPU"], name="CHIP", value=value)}


def _find_optimizer(given: Mapping[str, Setting]) -> dict[str, str]:
  """Returns {"OPTIMIZER": its value}, which decides what other macros exist."""
  value = _follow("OPTIMIZER", given)
  if isinstance(value, Macro):  # not set; if it should be, others say so
    return {"OPTIMIZER": next(iter(config.OPTIMIZERS))}
  if value not in [*config.OPTIMIZERS]:
    raise UserError(
      f"{given['OPTIMIZER'].cited}: choose one of "
      f"{', '.join(map(repr, config.OPTIMIZERS))}"
      f"{did_you_mean(str(value), config.OPTIMIZERS)}."
    )
  return {"OPTIMIZER": str(value)}


def _add_defaults(
  given: Mapping[str, Setting], defaults: Mapping[str, object]
) -> dict[str, Setting]:
  return {
    name: given.get(name, Setting(name=name, value=value, origin=DEFAULT))
    for name, value in defaults.items()
  }


def load_run(
  command: str,
  model_dir: str,
  macros: Mapping[str, object],
  trust_config: bool = False,
) -> tuple[str, config.Config]:
  """Returns MODEL_DIR and the settings of a command that has --model_dir.

  `macros` override the run's values. ACTIVATION_DTYPE = "auto" becomes
  "bfloat16" if this machine multiplies bfloat16 natively, else "float32".

  Raises UserError if anything is wrong; the message is about the first fault.
  """
  model_dir, settings = load(
    command,
    bindings=[f"{name}={value!r}" for name, value in macros.items()],
    model_dir=model_dir,
    trust_config=trust_config,
  ).build()
  model = resolve_dtype(settings.model, settings.mesh_layout)
  return model_dir, dataclasses.replace(settings, model=model)


def make_run_loader(
  files: Sequence[str], bindings: Sequence[str]
) -> Callable[[str, Mapping[str, object]], tuple[config.Config, str]]:
  """Returns a function that makes the settings of one run of a sweep.

  Returns:
    A function with two arguments: a string for messages, which says where
    macros were set, and {macro: value} that override the sweep's values. It
    returns the settings of a training run and the text of a gin file with the
    same settings, or raises UserError if the settings do not fit together.

  Raises:
    UserError: if a file is a pipe, which only one of the runs could read.
  """
  for name in files:
    if not os.path.isfile(find_gin_file(name)):
      raise UserError(
        f"--gin_file={name}: is a pipe, and a sweep reads its gin files for "
        "every run; write it to a file."
      )

  def load_one(
    origin: str, macros: Mapping[str, object]
  ) -> tuple[config.Config, str]:
    configuration = load(
      "train",
      files,
      bindings,
      over=[
        Setting(name=name, value=value, origin=origin)
        for name, value in macros.items()
      ],
    )
    try:
      _, settings = configuration.build()
    except UserError as error:
      raise UserError(configuration.add_location(str(error))) from error
    return settings, configuration.format_values()

  return load_one


def read_chip(chip: object) -> dict[str, Setting]:
  """Returns {macro: setting} of a chip's rates; {} if it has no gin file."""
  statements: list[Statement] = []
  if chip == "measured":
    statements = _read_measured_chip()
  # Check the name, because CHIP may have any value, even a path.
  elif isinstance(chip, str) and re.fullmatch(r"\w{1,50}", chip):
    path = gin_folder() / "hardware" / f"{chip}.gin"
    statements = read_file(path) if path.is_file() else []
  return {x.name: x for x in statements if isinstance(x, Setting)}


def _read_measured_chip() -> list[Statement]:
  path = cache_folder.measured_hardware()
  content = cache_folder.read_cached(path)
  try:
    return [] if content is None else read_statements(content.decode(), path)
  except (UserError, UnicodeDecodeError) as error:
    cache_folder.warn_once(
      f"{path} does not hold measured rates ({error}); measure them again: "
      "palm_mtf plan --calibrate"
    )
    return []
