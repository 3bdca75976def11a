# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `palm_mtf`: its name, gin files, and macros over them.

  palm_mtf train --gin_file=recipes/quickstart.gin \
    --gin.MODEL_DIR='"runs/first"' --gin.TRAIN_STEPS=300

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 the
user's error (one line, no traceback), 1 ours, 128 + the signal's number when
stopped: 129 after SIGHUP, 130 after SIGINT, 143 after SIGTERM. Nothing heavier
than argparse is imported before a command needs it. Which commands there are is
in command_table.py, how the configuration is made in gin_files.py.
"""

import argparse
import importlib
import os
import select
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from palm_mtf import __version__
from palm_mtf.cli.command_table import (
  COMMANDS,
  Command,
  commands_in,
  split_name,
)
from palm_mtf.console import configure_logging, escaped, results_on_stdout
from palm_mtf.errors import StoppedError, UserError, did_you_mean
from palm_mtf.machine.compiled_code import keep_compiled_code
from palm_mtf.machine.own_process import own_process


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit code."""
  configure_logging()
  arguments = sys.argv[1:] if arguments is None else list(arguments)
  with results_on_stdout():
    return _exit_code(arguments)


def _exit_code(arguments: list[str]) -> int:
  """Runs one command; returns the exit code of its end."""
  try:
    code = _run(arguments)
    # Here, where a closed pipe is still caught, and not at Python's exit.
    sys.stdout.flush()
    return code
  except UserError as error:
    # One line, whatever was given.
    message = escaped(str(error).replace("\n", "\\n"))
    print(f"palm_mtf: {message}", file=sys.stderr)
    return 2
  except StoppedError as stopped:  # which has said so
    return stopped.exit_code
  except KeyboardInterrupt:
    print("palm_mtf: interrupted", file=sys.stderr)
    return 130
  except BrokenPipeError:
    if not _stdout_is_closed():
      raise
    return 0  # whoever reads the results has read enough


class _Parser(argparse.ArgumentParser):
  """Says in one line what is wrong."""

  def error(self, message):
    raise UserError(f"{message}; see {self.prog} --help")


def _run(arguments: list[str]) -> int:
  if not arguments:
    raise UserError(
      f"no command: give one of {', '.join(COMMANDS)}; see palm_mtf --help"
    )
  name, rest = split_name(arguments)
  if name not in COMMANDS:
    return _run_without_command(name, rest)
  # What gin configures has its flags too, but for --gin_file and --gin.NAME.
  if COMMANDS[name].config:
    return _run_configured(name, rest)
  return _run_with_flags(name, rest)


def _run_with_flags(name: str, arguments: list[str]) -> int:
  """Runs a command that has flags of its own."""
  command = COMMANDS[name]
  parser = _parser(name)
  # The table holds the keywords of argparse as they are.
  for flag, keywords in command.flags.items():
    parser.add_argument(flag, **keywords)
  keywords = vars(_parse(parser, arguments))
  _ready_for_tensorflow()
  return _function(command.entry_point)(**keywords) or 0


def _ready_for_tensorflow() -> None:
  """Makes the settings of a process that TensorFlow reads at its import."""
  keep_compiled_code()
  own_process()


def _function(path: str) -> Callable[..., int | None]:
  module, _, function = path.rpartition(".")
  return getattr(importlib.import_module(module), function)


def _run_configured(name: str, arguments: list[str]) -> int:
  """Runs a command that gin configures."""
  command = COMMANDS[name]
  parser = _parser(name)
  _add_gin_flags(parser, name, arguments)
  if command.takes_model_dir:
    parser.add_argument(
      "--model_dir",
      metavar="PATH",
      help="of a training run: its config.gin, without its PROMPTS",
    )
    parser.add_argument(
      "--trust_config",
      action="store_true",
      help="run the modules and functions that this config.gin names",
    )
  own = [
    parser.add_argument(flag, **keywords).dest
    for flag, keywords in command.flags.items()
  ]
  for flag, (_, text) in command.alone.items():
    parser.add_argument(flag, action="store_true", help=text)
  # argparse cannot know the names behind "--gin.": they go to gin.
  macros = [each for each in arguments if each.startswith("--gin.")]
  rest = [each for each in arguments if not each.startswith("--gin.")]
  options = _parse(parser, rest)

  from palm_mtf.cli import gin_files

  if _run_alone(command, options):
    return 0
  bindings = [macro.removeprefix("--gin.") for macro in macros]
  configuration = gin_files.load(
    name,
    options.gin_file,
    bindings,
    asked=f"palm_mtf {name} "
    + shlex.join(x for x in arguments if x != "--print_config"),
    model_dir=getattr(options, "model_dir", None),
    trust_config=getattr(options, "trust_config", False),
  )
  _ready_for_tensorflow()  # the user's modules may import it
  if options.print_config:
    configuration.check_values()
    print(configuration.effective_text(), end="")
    return 0
  try:
    model_dir, settings = configuration.build()
    keywords = {name: getattr(options, name) for name in own}
    if command.keeps_config:
      keywords["config_files"] = configuration.config_files
    if command.starts_runs:
      keywords["load_run"] = gin_files.loader_of_runs(
        options.gin_file, bindings
      )
    if command.has_results:
      keywords["as_json"] = options.as_json
    entry_point = _function(command.entry_point)
    entry_point(model_dir=model_dir, config=settings, **keywords)
  except UserError as error:
    # Checks know macros by name; where one was set is known here alone.
    raise UserError(configuration.located(str(error))) from error
  return 0


def _run_alone(command: Command, options: argparse.Namespace) -> bool:
  """Runs a flag that needs no configuration; returns whether one was given."""
  for flag, (path, _) in command.alone.items():
    if getattr(options, flag.removeprefix("--")):
      from palm_mtf.cli.gin_files import hardware_of

      _ready_for_tensorflow()
      _function(path)(hardware_of=hardware_of, as_json=options.as_json)
      return True
  return False


def _run_without_command(group: str, arguments: list[str]) -> int:
  """Answers flags without a command; `group` is its first word, if any."""
  within = commands_in(group)
  program = f"palm_mtf {group}".rstrip()
  parser = _Parser(
    prog=program,
    usage=f"{program} COMMAND [flags]",
    description="PaLM-style language models on Mesh TensorFlow, configured by "
    "gin files alone.",
    epilog=_listed(within)
    + "\npalm_mtf COMMAND --help says what a command needs.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  if not group:
    parser.add_argument(
      "--version", action="version", version=f"palm_mtf {__version__}"
    )
  _parse(parser, arguments)
  if arguments:
    raise UserError(f"{arguments[0]}: give the command before its flags")
  raise UserError(
    f"{group} is not a command by itself: give one of {', '.join(within)}; "
    f"see {program} --help"
  )


def _parser(name: str) -> _Parser:
  command = COMMANDS[name]
  parser = _Parser(
    prog=f"palm_mtf {name}",
    description=f"{command.summary[0].upper()}{command.summary[1:]}.",
    epilog=_listed(commands_in(name)),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  if command.has_results:
    parser.add_argument(
      "--json",
      dest="as_json",
      action="store_true",
      help="print one JSON object a line",
    )
  return parser


def _listed(commands: Mapping[str, Command]) -> str:
  """Returns the lines of a help that list `commands`."""
  width = max(map(len, commands), default=0) + 2
  lines = [f"  {x:{width}}{each.summary}\n" for x, each in commands.items()]
  return "".join(["commands:\n", *lines]) if lines else ""


def _add_gin_flags(
  parser: _Parser, command: str, arguments: Sequence[str]
) -> None:
  """Adds the flags of gin, and to the help what the run file says of itself."""
  parser.usage = f"{parser.prog} [--gin_file=FILE ...] [--gin.NAME=VALUE ...]"
  parser.add_argument(
    "--gin_file",
    action="append",
    default=[],
    metavar="FILE",
    help="a gin file, searched here and then in the package's gin folder; "
    "may be repeated, later over earlier",
  )
  parser.add_argument(
    "--gin.NAME",
    metavar="VALUE",
    help="a macro's value over all files, a Python literal: "
    "--gin.TRAIN_STEPS=300 or --gin.MODEL_DIR='\"runs/first\"'",
  )
  parser.add_argument(
    "--print_config",
    action="store_true",
    help="print the configuration with the origin of every value, and stop",
  )
  if "--help" in arguments or "-h" in arguments:
    from palm_mtf.cli.gin_folder import defaults_file, header

    parser.epilog = "\n".join(header(defaults_file(command)))


def _parse(parser: _Parser, arguments: list[str]) -> argparse.Namespace:
  """Parses; names the nearest flag for one that does not exist."""
  see = f"; see {parser.prog} --help"
  # argparse has no public list of the flags that it knows.
  flags = parser._option_string_actions
  for flag in (each.partition("=")[0] for each in arguments):
    # First of all: a misspelt flag is not a missing one; "-" is stdin.
    if flag.startswith("-") and flag not in (*flags, "-"):
      guess = did_you_mean(flag, (x for x in flags if x.startswith("--")))
      raise UserError(f"unknown flag {flag}{guess}{see}")
  try:
    options, unknown = parser.parse_known_args(arguments)
  except SystemExit:  # help or version is printed
    sys.stdout.flush()
    raise
  if unknown:
    if "--gin_file" in flags:
      see = f"; for a gin file, write --gin_file={unknown[0]}"
    raise UserError(f'unknown argument "{unknown[0]}"{see}')
  return options


def _stdout_is_closed() -> bool:
  """Whether nobody reads stdout any more; keeps Python's exit quiet if so."""
  try:
    sys.stdout.flush()
    # POLLERR and POLLHUP are reported without being asked for.
    poll = select.poll()  # where stdout has no buffer that could fail again
    poll.register(sys.stdout.fileno(), 0)
    closed = bool(poll.poll(0))
  except BrokenPipeError:
    closed = True
  if closed:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return closed
