# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict gin: one effective configuration with the origin of every value.

Every field of `config.Config` is a macro. Its value is, later over earlier: the
field's default, what defaults/<command>.gin sets, the user's files in their
order, the command line. Whatever would have no effect is an error
(gin_checks.py). The result is one flat text: `--print_config` prints it, the
run keeps it as MODEL_DIR/config.gin, and it is a `--gin_file` that gives the
same again, to every command. How single files are read is in gin_statements.py.
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
from palm_mtf.cli.user_values import (
  check_characters,
  computed_data,
  import_modules,
)
from palm_mtf.config.macros import MISSING, from_macros, macros_of
from palm_mtf.errors import UserError
from palm_mtf.machine.activation_dtype import resolved
from palm_mtf.machine.cache_folder import (
  measured_hardware,
  read_cached,
  warn_once,
)
from palm_mtf.model_dir.layout import ModelDir
from palm_mtf.user_code import user_code

DEFAULT = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
  """What one command will do: read and checked by `load`, not yet built.

  Attributes:
    config_class: class in palm_mtf.config that the command takes.
    leaves_out: its parts that keep their defaults.
    imports: the user's modules, in order.
    macros: every macro that the command uses, by name.
    bindings: parameters of the user's own functions.
    asked: the command line, for the head of the text.
    implied: macros that follow from CHIP, which the user did not set.
  """

  config_class: type
  leaves_out: Collection[str]
  imports: tuple[Import, ...]
  macros: Mapping[str, Setting]
  bindings: tuple[Setting, ...]
  asked: str
  implied: Collection[str]

  def effective_text(self) -> str:
    """Returns one gin file that gives the same configuration again."""
    lines = [f"# {self.asked}".replace("\n", " "), *self._imports()]
    # Macros first: gin resolves names in any order, people read from the top.
    for group in (self.macros.values(), self.bindings):
      lines.append("")
      for each in group:
        # A comment: with another CHIP the file gives what follows from that.
        mark = "# " if each.name in self.implied else ""
        lines.append(f"{mark}{each}  # {each.origin}")
    return "\n".join(lines).rstrip() + "\n"

  def _imports(self) -> list[str]:
    statements = dict.fromkeys(each.statement for each in self.imports)
    return ["from __gin__ import dynamic_registration", *statements]

  def build(self) -> tuple[str, config.CorpusConfig]:
    """Imports the user's modules; returns MODEL_DIR and the configuration.

    Raises:
      UserError: an import, a name or a value in the user's files is wrong.
    """
    values = self._values()
    return values["MODEL_DIR"], from_macros(
      self.config_class, values, self.leaves_out
    )

  def config_files(self, **resolved: object) -> dict[str, str]:
    """What MODEL_DIR keeps of the configuration: file name -> text.

    `config.gin` is what was asked. `operative_config.gin` has values in place
    of references to macros, and of "auto".

    Args:
      **resolved: values that the command chose for macros that were "auto".
    """
    operative = self._operative()
    macros = dict(operative.macros)
    for name, value in resolved.items():
      if macros[name].value != value:
        origin = f"{macros[name].value}, {macros[name].origin}"
        macros[name] = Setting(name=name, value=value, origin=origin)
    operative = dataclasses.replace(operative, macros=macros)
    return {
      "config.gin": self.effective_text(),
      "operative_config.gin": operative.effective_text(),
    }

  def values_text(self) -> str:
    """Returns a gin file of the values alone, without where they were set."""
    settings = [
      x for x in self._operative().macros.values() if x.name not in self.implied
    ]
    lines = [*self._imports(), *map(str, [*settings, *self.bindings])]
    return "\n".join(lines) + "\n"

  def _operative(self) -> "Configuration":
    """Returns the same with values in the places of references to macros."""
    macros = {
      name: dataclasses.replace(setting, value=self._literal(setting.value))
      for name, setting in self.macros.items()
    }
    return dataclasses.replace(self, macros=macros)

  def located(self, message: str) -> str:
    """Adds where a macro was set to a message that begins "MACRO = "."""
    setting = self.macros.get(message.partition(" = ")[0])
    if (
      not setting
      or setting.origin == DEFAULT
      or message.startswith(setting.cited)  # and says so itself
    ):
      return message
    return f"{message} ({setting.name} is set {setting.place})"

  def check_values(self) -> None:
    """Computes the values that the user's own functions give, if any do.

    Raises:
      UserError: an import, a name or a function in the user's files is wrong.
    """
    if self._needs_gin:
      self._values()

  @property
  def _needs_gin(self) -> bool:
    # Only the user's own functions and constants are left to gin.
    return any(names_in([*self._literals().values()]))

  def _values(self) -> dict[str, object]:
    """Returns the value of every macro."""
    values = self._literals()
    parts = {x.name for x in dataclasses.fields(self.config_class)}
    reads_data = "data" in parts
    if self._needs_gin or reads_data:
      import_modules(self.imports)  # which makes tasks known, too
    if self._needs_gin or (reads_data and self.bindings):
      self._bind()
      computed = self._computed(values)
      values |= computed
      if "CHIP" in computed:  # which `load` did not know
        chip = chip_settings(computed["CHIP"])
        values |= {x: chip[x].value for x in chip.keys() & self.implied}
    for name, value in values.items():
      check_characters(self.macros[name], value)
    return values

  def _literals(self) -> dict[str, object]:
    """Returns every macro's value with those of other macros in their places.

    References and constants in it stay, for gin.
    """
    literals = {}
    for name, setting in self.macros.items():
      try:
        literals[name] = self._literal(setting.value)
      except TypeError:  # {%NAME: 1}, where NAME is a list
        raise UserError(
          f"{setting.cited}: a list or a dict cannot be the key of a dict."
        ) from None
    return literals

  def _literal(self, value: object) -> object:
    """Returns a value with the values of macros in their places."""
    if isinstance(value, Macro) and value.name in self.macros:
      return self._literal(self.macros[value.name].value)
    if isinstance(value, dict):
      pairs = value.items()
      return {self._literal(k): self._literal(v) for k, v in pairs}
    if isinstance(value, (list, tuple)):
      return type(value)(self._literal(each) for each in value)
    return value

  def _bind(self) -> None:
    """Lets gin read the configuration, in which it looks up every name."""
    import gin

    # gin's state is the process's: what an earlier command bound goes.
    gin.clear_config()
    for setting in [*self.macros.values(), *self.bindings]:
      if setting.name not in self.implied:
        with user_code(setting.cited):
          # gin looks up names among the imports of the same text.
          gin.parse_config([*self._imports(), str(setting)])

  def _computed(self, values: Mapping[str, object]) -> dict[str, object]:
    """Lets gin call the user's functions; returns the values that need it."""
    import gin

    computed, macro = {}, gin.get_configurable("gin.macro")
    fields = {"MODEL_DIR", *macros_of(self.config_class, self.leaves_out)}
    left = [self.macros[name] for name, x in values.items() if any(names_in(x))]
    # A macro with a function comes before macros that refer to it, so that an
    # error names the former.
    left.sort(
      key=lambda x: all(isinstance(y, Macro) for y in names_in(x.value))
    )
    for setting in left:
      # `%NAME` is gin.macro in the scope NAME.
      with user_code(setting.cited), gin.config_scope(setting.name):
        value = macro()
      if setting.name in fields:
        value = computed_data(setting, value)
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
    gin_files: the user's files, later over earlier.
    bindings: "NAME=VALUE" texts over all files, later over earlier.
    asked: the command line, to be kept at the head of the text.
    model_dir: MODEL_DIR of a training run, whose config.gin comes before
      `gin_files`; None for no run.
    trust_config: whether the run's config.gin may run code; otherwise it has to
      be data (gin_checks.check_runs_no_code).
    over: settings over all of these, such as the settings of one run of a
      sweep.

  Raises:
    UserError: the first thing that is wrong, in one line.
  """
  statements = read_file(defaults_file(command))
  if model_dir:
    of_run = _read_run(model_dir)
    if not trust_config:
      gin_checks.check_runs_no_code(of_run)
    statements += of_run
    # The folder may have moved; the prompts were for the end of training.
    bindings = [f"MODEL_DIR={model_dir!r}", "PROMPTS=[]", *bindings]
  for name in gin_files:
    statements += read_file(find_gin_file(name))
  statements += read_command_line(bindings)
  statements += over
  defaults = {"MODEL_DIR": MISSING, **macros_of(config.ConfigOfSweep)}
  # Every macro of every command is known: a file may serve several commands.
  given, foreign = gin_checks.split(statements, defaults)
  gin_checks.check_known(given, [*given.values(), *foreign], defaults)
  implied = {*macros_of(config.HardwareConfig)}.difference(given)
  chip = Macro("CHIP")
  for _ in given:  # no more steps than macros: macros may refer in a circle
    if isinstance(chip, Macro) and chip.name in given:
      chip = given[chip.name].value
  given = chip_settings(chip) | given
  config_class = getattr(config, COMMANDS[command].config)
  leaves_out = COMMANDS[command].leaves_out
  fields = macros_of(config_class, leaves_out)
  used = _add_defaults(given, {"MODEL_DIR": MISSING, **fields})
  gin_checks.check_required(used)
  # What their values refer to is used too.
  every = given | {
    name: setting
    for name, setting in _add_defaults(given, defaults).items()
    if setting.value is not MISSING
  }
  used |= gin_checks.reached([*used.values(), *foreign], every)
  return Configuration(
    config_class=config_class,
    leaves_out=leaves_out,
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


def _add_defaults(
  given: Mapping[str, Setting], defaults: Mapping[str, object]
) -> dict[str, Setting]:
  """Returns the setting of each macro of `defaults`: given, or the default."""
  return {
    name: given.get(name, Setting(name=name, value=value, origin=DEFAULT))
    for name, value in defaults.items()
  }


def _read_run(model_dir: str) -> list[Statement]:
  """Reads the config.gin of a training run."""
  file = ModelDir(model_dir).config
  if not os.path.isfile(file):
    raise UserError(
      f"--model_dir = {model_dir!r}: there is no config.gin in it; give the "
      "MODEL_DIR of a training run."
    )
  return read_file(Path(file).resolve())


def load_run(
  command: str,
  model_dir: str,
  macros: Mapping[str, object],
  trust_config: bool = False,
) -> tuple[str, config.Config]:
  """Returns MODEL_DIR and the settings of a command with --model_dir.

  ACTIVATION_DTYPE = "auto" is resolved for this machine.

  Args:
    command: name of the command.
    model_dir: MODEL_DIR of a training run.
    macros: values over the values of the run, by macro.
    trust_config: whether the run's config.gin may run code.

  Raises:
    UserError: the first thing that is wrong, in one line.
  """
  model_dir, settings = load(
    command,
    bindings=[f"{name}={value!r}" for name, value in macros.items()],
    model_dir=model_dir,
    trust_config=trust_config,
  ).build()
  model = resolved(settings.model, settings.mesh_layout)
  return model_dir, dataclasses.replace(settings, model=model)


def loader_of_runs(
  files: Sequence[str], bindings: Sequence[str]
) -> Callable[[str, Mapping[str, object]], tuple[config.Config, str]]:
  """Returns a function that makes the settings of one run of a sweep.

  Args:
    files: gin files of the sweep, later over earlier.
    bindings: "NAME=VALUE" texts over all files.

  Returns:
    A function of the place where macros were set, for messages, and of
    {macro: value} over the values of the sweep. It returns the settings of a
    training run, and a gin file that gives them again; it raises UserError
    where they do not fit together.

  Raises:
    UserError: a file is a pipe, which only one of the runs could read.
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
      raise UserError(configuration.located(str(error))) from error
    return settings, configuration.values_text()

  return load_one


def chip_settings(chip: object) -> dict[str, Setting]:
  """Returns the settings of a CHIP's file by macro, {} without a file."""
  if chip == "measured":
    return _measured_settings()
  path = gin_folder() / "hardware" / f"{chip}.gin"
  # CHIP may be any value that a gin file can hold, also a path.
  is_name = isinstance(chip, str) and re.fullmatch(r"\w{1,50}", chip)
  if not is_name or not path.is_file():
    return {}
  return {x.name: x for x in read_file(path) if isinstance(x, Setting)}


def _measured_settings() -> dict[str, Setting]:
  path = measured_hardware()
  content = read_cached(path)
  if content is None:
    return {}
  try:
    statements = read_statements(content.decode(), path)
  except (UserError, UnicodeDecodeError) as error:
    warn_once(
      f"{path} does not hold measured rates ({error}); measure them again: "
      "palm_mtf plan --calibrate"
    )
    return {}
  return {x.name: x for x in statements if isinstance(x, Setting)}


def hardware_of(chip: str) -> config.HardwareConfig:
  """Returns the rates of a chip of gin/hardware."""
  settings = chip_settings(chip).values()
  return config.HardwareConfig(**{x.name.lower(): x.value for x in settings})
