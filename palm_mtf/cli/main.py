# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `palm_mtf`: one verb, gin files, and macros over them.

  palm_mtf train --gin_file=recipes/quickstart.gin \
    --gin.MODEL_DIR='"runs/first"' --gin.TRAIN_STEPS=300

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 the
user's error (one line, no traceback), 1 ours, 130 interrupted. Nothing heavier
than argparse is imported before a verb needs it. How the configuration is made
is in gin_files.py.
"""

import argparse
import os
import select
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf import __version__
from palm_mtf.errors import UserError, did_you_mean


class Command(NamedTuple):
  """A verb that runs the entry point of runs/<verb>.gin.

  Attributes:
    summary: one line for `palm_mtf --help`.
    has_results: its entry point takes `as_json`, bool: print results as JSON,
      one object a line.
    keeps_config: its entry point takes `config_files`, a mapping from file
      name to text that is written into MODEL_DIR.
  """

  summary: str
  has_results: bool = False
  keeps_config: bool = False


COMMANDS = {
  "train": Command("train a model, or resume its training", keeps_config=True),
  "evaluate": Command(
    "print the validation loss of the newest checkpoint", has_results=True
  ),
  "generate": Command("continue the texts of PROMPTS", has_results=True),
  "vocab": Command("train, or find, the vocabulary of a run"),
}
_DOCTOR = "print versions and devices, and what to mend"
_NAMES = (*COMMANDS, "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit code."""
  arguments = sys.argv[1:] if arguments is None else list(arguments)
  try:
    code = _run(arguments)
    sys.stdout.flush()
    return code
  except UserError as error:
    message = str(error).replace("\n", "\\n")  # one line, whatever was given
    print(f"palm_mtf: {message}", file=sys.stderr)
    return 2
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
  name = arguments[0] if arguments else ""
  if not name:
    raise UserError(
      f"no command: give one of {', '.join(_NAMES)}; see palm_mtf --help"
    )
  if name.startswith("-"):
    return _run_without_command(arguments)
  if name not in _NAMES:
    raise UserError(
      f'unknown command "{name}"{did_you_mean(name, _NAMES)}. '
      f"Commands: {', '.join(_NAMES)}."
    )
  if name == "doctor":
    parser = _parser(name, _DOCTOR, has_results=True)
    options = _parse(parser, arguments[1:])
    from palm_mtf.cli import doctor

    return doctor.main(json=options.json)
  return _run_configured(name, arguments[1:])


def _run_configured(name: str, arguments: list[str]) -> int:
  """Runs a command that gin configures."""
  command = COMMANDS[name]
  parser = _parser(name, command.summary, command.has_results)
  _add_gin_flags(parser, name, arguments)
  macros = [each for each in arguments if each.startswith("--gin.")]
  rest = [each for each in arguments if not each.startswith("--gin.")]
  options = _parse(parser, rest)

  from palm_mtf.cli import gin_files

  configuration = gin_files.load(
    name,
    options.gin_file,
    [macro.removeprefix("--gin.") for macro in macros],
    asked=shlex.join(
      ["palm_mtf", name, *(x for x in arguments if x != "--print_config")]
    ),
  )
  if options.print_config:
    print(configuration.effective_text(), end="")
    return 0
  try:
    entry_point, keywords = configuration.build()
    if command.keeps_config:
      keywords["config_files"] = configuration.config_files()
    if command.has_results:
      keywords["as_json"] = options.json
    entry_point(**keywords)
  except UserError as error:
    raise UserError(configuration.located(str(error))) from error
  return 0


def _run_without_command(arguments: list[str]) -> int:
  width = max(map(len, _NAMES)) + 2
  summaries = {
    **{name: command.summary for name, command in COMMANDS.items()},
    "doctor": _DOCTOR,
  }
  parser = _Parser(
    prog="palm_mtf",
    usage="palm_mtf COMMAND [flags]",
    description="PaLM-style language models on Mesh TensorFlow, configured by "
    "gin files alone.",
    epilog="commands:\n"
    + "".join(f"  {x:{width}}{text}\n" for x, text in summaries.items())
    + "\npalm_mtf COMMAND --help says which macros a command needs.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "--version", action="version", version=f"palm_mtf {__version__}"
  )
  _parse(parser, arguments)
  raise UserError(f"{arguments[0]}: give the command before its flags")


def _parser(name: str, summary: str, has_results: bool) -> _Parser:
  parser = _Parser(
    prog=f"palm_mtf {name}",
    description=f"{summary[0].upper()}{summary[1:]}.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  if has_results:
    parser.add_argument(
      "--json", action="store_true", help="print one JSON object a line"
    )
  return parser


def _add_gin_flags(
  parser: _Parser, name: str, arguments: Sequence[str]
) -> None:
  """Adds the flags of gin, and to the help what the run file says of itself."""
  parser.usage = f"palm_mtf {name} [--gin_file=FILE ...] [--gin.NAME=VALUE ...]"
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
    from palm_mtf.cli.gin_folder import gin_folder, header

    lines = header(gin_folder() / "runs" / f"{name}.gin")
    parser.epilog = "\n".join(lines)


def _parse(parser: _Parser, arguments: list[str]) -> argparse.Namespace:
  """Parses; names the nearest flag for one that does not exist."""
  try:
    options, unknown = parser.parse_known_args(arguments)
  except SystemExit:  # help or version is printed
    sys.stdout.flush()
    raise
  if not unknown:
    return options
  flag = unknown[0].partition("=")[0]
  if not flag.startswith("-"):
    fix = f"; for a gin file, write --gin_file={flag}"
    raise UserError(f'unknown argument "{flag}"{fix}')
  flags = [x for x in parser._option_string_actions if x.startswith("--")]
  raise UserError(
    f"unknown flag {flag}{did_you_mean(flag, flags)}; see {parser.prog} --help"
  )


def _stdout_is_closed() -> bool:
  """Whether nobody reads stdout any more; keeps Python's exit quiet if so."""
  try:
    sys.stdout.flush()
    poll = select.poll()  # where stdout has no buffer that could fail again
    poll.register(sys.stdout.fileno(), 0)
    closed = bool(poll.poll(0))
  except BrokenPipeError:
    closed = True
  if closed:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return closed
