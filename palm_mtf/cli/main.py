# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line `palm_mtf COMMAND [gin files] [macros] [flags]`.

  palm_mtf train --gin_file=recipes/quickstart.gin \
    --gin.MODEL_DIR='"runs/first"' --gin.TRAIN_STEPS=300

Results go to stdout, everything else to stderr. Exit codes: 0 for success, 2
for an error of the user (one line, no traceback), 1 for a bug, or if `lineage`
misses a model, 128 + the signal's number after a signal: 129 for SIGHUP, 130
for SIGINT, 143 for SIGTERM.
Modules heavier than argparse are imported only when a command needs them.
command_table.py lists the commands; gin_files.py makes the configuration.
"""

import argparse
import os
import pkgutil
import select
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from palm_mtf import __version__
from palm_mtf.cli.command_table import (
  COMMANDS,
  commands_in,
  entry_point,
  split_name,
)
from palm_mtf.console import configure_logging, escape, results_on_stdout
from palm_mtf.errors import StoppedError, UserError, did_you_mean
from palm_mtf.machine.compiled_code import keep_compiled_code
from palm_mtf.machine.process import own_process

_WITHOUT_NEIGHBOURS = "generate", "serve", "export", "plan", "index build"


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit code."""
  given = sys.argv[1:] if arguments is None else list(arguments)
  return run_command(lambda: _run(given))


def run_command(run: Callable[[], int]) -> int:
  """Returns the exit code of `run`, or the exit code for its exception.

  A UserError is printed to stderr as one line.
  """
  configure_logging()
  try:
    with results_on_stdout():
      code = run()
      # Flush here, because at Python's exit the error of a closed pipe cannot
      # be caught.
      sys.stdout.flush()
    return code
  except UserError as error:
    # Escape line ends, because the message may quote a string of several lines.
    message = escape(str(error).replace("\n", "\\n"))
    print(f"palm_mtf: {message}", file=sys.stderr)
    return 2
  except StoppedError as stopped:  # the command has logged the reason
    return stopped.exit_code
  except KeyboardInterrupt:
    print("palm_mtf: interrupted", file=sys.stderr)
    return 130
  except BrokenPipeError:
    if not _stdout_is_closed():
      raise
    return 0  # the reader of the pipe, such as `head`, has read enough


class FlagParser(argparse.ArgumentParser):
  """An argparse parser that raises UserError instead of ending the process."""

  def error(self, message: str) -> NoReturn:
    """Raises UserError for wrong flags."""
    raise UserError(f"{message}; see {self.prog} --help")


def _run(arguments: list[str]) -> int:
  if not arguments:
    raise UserError(
      f"no command: give one of {', '.join(COMMANDS)}; see palm_mtf --help"
    )
  name, rest = split_name(arguments)
  if name not in COMMANDS:
    return _run_without_command(name, rest)
  command = COMMANDS[name]
  summary = f"{command.summary[0].upper()}{command.summary[1:]}."
  parser = _make_parser(name, summary)
  if command.has_results:
    parser.add_argument(
      "--json",
      dest="as_json",
      action="store_true",
      help="print one JSON object per line",
    )
  if command.config:
    _add_gin_flags(parser, name, rest)
  own = ["as_json"] if command.has_results else []
  for flag, keywords in command.flags.items():
    own.append(parser.add_argument(flag, **keywords).dest)
  for flag, (_, text) in command.standalone.items():
    parser.add_argument(flag, action="store_true", help=text)
  if command.config:
    # Hide the flags --gin.NAME=VALUE, whose names argparse does not know.
    flags = [x for x in rest if not x.startswith("--gin.")]
    return _run_configured(name, rest, parse_flags(parser, flags), own) or 0
  options = parse_flags(parser, rest)
  _prepare_for_tensorflow()
  function = pkgutil.resolve_name(entry_point(name))
  return function(**{x: getattr(options, x) for x in own}) or 0


def _prepare_for_tensorflow() -> None:
  """Sets what TensorFlow's import reads: XLA's cache and the log level."""
  keep_compiled_code()
  own_process()


def _run_configured(
  name: str,
  arguments: list[str],
  options: argparse.Namespace,
  own: list[str],
) -> int | None:
  """Runs a command that gin configures.

  `options` are the parsed flags, and `own` names the flags that the entry point
  takes as keywords.
  """
  command = COMMANDS[name]
  for flag, (path, _) in command.standalone.items():
    if getattr(options, flag.removeprefix("--")):
      if other := {x.partition("=")[0] for x in arguments} & {*command.flags}:
        raise UserError(
          f"{flag} and {min(other)}: {flag} plans nothing; give one of them."
        )
      _prepare_for_tensorflow()
      return pkgutil.resolve_name(path)(as_json=options.as_json)
  _prepare_for_tensorflow()  # the user's modules may import TensorFlow
  if name == "generate" and not options.print_config:
    from palm_mtf.machine import tensorflow_c

    tensorflow_c.preload()  # while this thread imports the rest
  from palm_mtf.cli import gin_files

  shown = shlex.join(x for x in arguments if x != "--print_config")
  bindings = [
    x.removeprefix("--gin.") for x in arguments if x.startswith("--gin.")
  ]
  configuration = gin_files.load(
    name,
    options.gin_file,
    bindings,
    asked=f"palm_mtf {name} {shown}",
    model_dir=getattr(options, "model_dir", None),
    trust_config=getattr(options, "trust_config", False),
  )
  if options.print_config:
    configuration.check_values()
    print(configuration.format_effective(), end="")
    return 0
  try:
    model_dir, settings = configuration.build()
    if name in _WITHOUT_NEIGHBOURS:
      from palm_mtf.config.neighbours import refuse_neighbours

      refuse_neighbours(settings.model, f"palm_mtf {name}")
    keywords = {each: getattr(options, each) for each in own}
    if command.keeps_config:
      keywords["config_files"] = configuration.config_files
    if command.starts_runs:
      keywords["load_run"] = gin_files.make_run_loader(
        options.gin_file, bindings
      )
    function = pkgutil.resolve_name(entry_point(name))
    return function(model_dir=model_dir, config=settings, **keywords)
  except UserError as error:
    # The message names only the macro, so add where the macro was set.
    raise UserError(configuration.add_location(str(error))) from error


def _run_without_command(group: str, arguments: list[str]) -> int:
  """Handles flags without a command, such as in `palm_mtf data --help`."""
  parser = _make_parser(
    group,
    "PaLM-style language models on Mesh TensorFlow, configured only by gin "
    "files.",
  )
  parser.usage = f"{parser.prog} COMMAND [flags]"
  parser.epilog += "\npalm_mtf COMMAND --help explains a command."
  if not group:
    parser.add_argument(
      "--version", action="version", version=f"palm_mtf {__version__}"
    )
  parse_flags(parser, arguments)
  if arguments:
    raise UserError(f"{arguments[0]}: give the command before its flags")
  raise UserError(
    f"{group} is not a command by itself: give one of "
    f"{', '.join(commands_in(group))}; see {parser.prog} --help"
  )


def _make_parser(name: str, description: str) -> FlagParser:
  """Returns a parser without flags for the command or group `name`.

  The help lists the group's commands; if `name` is "", all commands.
  """
  commands = commands_in(name)
  width = max(map(len, commands), default=0) + 2
  lines = [f"  {x:{width}}{each.summary}\n" for x, each in commands.items()]
  return FlagParser(
    prog=f"palm_mtf {name}".rstrip(),
    description=description,
    epilog="".join(["commands:\n", *lines]) if lines else "",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )


def _add_gin_flags(
  parser: FlagParser, command: str, arguments: Sequence[str]
) -> None:
  """Adds gin's flags and, to the help, the header of the defaults file."""
  parser.usage = f"{parser.prog} [--gin_file=FILE ...] [--gin.NAME=VALUE ...]"
  parser.add_argument(
    "--gin_file",
    action="append",
    default=[],
    metavar="FILE",
    help="a gin file, in the current folder or the package's gin folder; "
    "may be repeated: a later file overrides an earlier one",
  )
  parser.add_argument(
    "--gin.NAME",
    metavar="VALUE",
    help="a macro's value, a Python literal, which overrides all files: "
    "--gin.TRAIN_STEPS=300 or --gin.MODEL_DIR='\"runs/first\"'",
  )
  parser.add_argument(
    "--print_config",
    action="store_true",
    help="print the configuration with the origin of every value, and stop",
  )
  if COMMANDS[command].takes_model_dir:
    parser.add_argument(
      "--model_dir",
      metavar="PATH",
      help="of a training run, whose config.gin is used, without its PROMPTS",
    )
    parser.add_argument(
      "--trust_config",
      action="store_true",
      help="run the modules and functions that this config.gin names",
    )
  if "--help" in arguments or "-h" in arguments:
    from palm_mtf.cli.gin_folder import defaults_file, read_header

    parser.epilog = "\n".join(read_header(defaults_file(command)))


def parse_flags(parser: FlagParser, arguments: list[str]) -> argparse.Namespace:
  """Parses flags; the error for an unknown flag suggests a similar one."""
  see = f"; see {parser.prog} --help"
  # Read a private attribute, because argparse has no public list of flags.
  flags = parser._option_string_actions
  for flag in (each.partition("=")[0] for each in arguments):
    # Check before argparse does, because for a misspelt required flag argparse
    # only says that the flag is missing. The argument "-" means stdin.
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
  """Returns whether stdout is a pipe that nobody reads any more.

  If so, redirects stdout, so that Python's flush at exit prints no error.
  """
  try:
    sys.stdout.flush()
    # The mask 0 asks for no events: poll then reports only POLLERR and POLLHUP.
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    closed = bool(poll.poll(0))
  except BrokenPipeError:
    closed = True
  if closed:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return closed
