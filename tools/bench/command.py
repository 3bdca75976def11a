# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of the bench: cases, flags, worker processes and records."""

import argparse
import ast
import dataclasses
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from palm_mtf.cli import gin_files
from palm_mtf.config import Config
from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.machine.activation_dtype import resolved

_FOLDER = Path(__file__).resolve().parent
CASES = sorted(path.stem for path in (_FOLDER / "cases").glob("*.py"))


class Flags(argparse.ArgumentParser):
  """The flags of a case; wrong values raise UserError with one line."""

  def __init__(self, case: str, description: str):
    super().__init__(
      prog=f"python -m tools.bench {case}",
      description=description,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    self._parsers: dict[str, Callable[[str], Any]] = {}

  def add(
    self,
    name: str,
    help: str,
    default: object = None,
    parse: Callable[[str, str], Any] | None = None,
    **settings: Any,
  ) -> None:
    """Adds a flag.

    Args:
      name: name with its dashes, "--rounds".
      help: text for --help.
      default: value without the flag, a text or a number.
      parse: function of name and text that returns the flag's value or raises
        UserError; by default the value is the text.
      **settings: further arguments of `add_argument`. Each of several values
        (`action="append"` or `nargs`) is parsed separately.
    """
    if default is not None:
      help += f" (by default {default})"
    self.add_argument(name, help=help, default=default, **settings)
    if parse:
      self._parsers[name] = functools.partial(parse, name)

  def read(
    self, arguments: Sequence[str]
  ) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags' values, and the arguments that are no known flag."""
    chosen, rest = self.parse_known_args(arguments)
    for name, parse in self._parsers.items():
      field = name.removeprefix("--")
      given = getattr(chosen, field)
      if isinstance(given, list):
        given = [parse(x) for x in given]
      elif given is not None:
        given = parse(str(given))
      setattr(chosen, field, given)
    return chosen, rest

  def error(self, message: str) -> None:
    """Raises UserError, where argparse prints several lines and exits."""
    raise UserError(f"{message}.")


def count(minimum: int = 1) -> Callable[[str, str], int]:
  """Returns a parser of whole numbers of at least `minimum`."""

  def parse(name: str, text: str) -> int:
    try:
      number = int(text)
    except ValueError:
      raise UserError(
        f"{name} = {text}: give a whole number of at least {minimum}."
      ) from None
    check_count(name, number, minimum=minimum)
    return number

  return parse


def choice(choices: Iterable[str]) -> Callable[[str, str], str]:
  """Returns a parser of texts that are among `choices`."""

  def parse(name: str, text: str) -> str:
    check_choice(name, text, choices)
    return text

  return parse


def choices(among: Iterable[str]) -> Callable[[str, str], list[str]]:
  """Returns a parser of comma-separated texts among `among`, or of ""."""
  parse_one = choice(among)
  return lambda name, text: [parse_one(name, x) for x in text.split(",") if x]


def numbers(kind: type, example: str) -> Callable[[str, str], list]:
  """Returns a parser of comma-separated numbers, which are counts if ints."""

  def parse(name: str, text: str) -> list:
    try:
      found = [kind(x) for x in text.split(",")]
    except ValueError:
      raise UserError(
        f"{name} = {text}: give numbers, as in {example}."
      ) from None
    for number in found if kind is int else []:
      check_count(name, number)
    return found

  return parse


def one_line_errors(main: Callable[..., int | None]) -> Callable[..., int]:
  """Makes a UserError one line on stderr and exit code 2, as palm_mtf does."""
  # Not __module__, which is "__main__" for the tool that runs.
  name = Path(main.__code__.co_filename).stem

  @functools.wraps(main)
  def run(*arguments: Any) -> int:
    try:
      return main(*arguments) or 0
    except UserError as error:
      print(f"{name}: {error}", file=sys.stderr)
      return 2

  return run


def worker_command(case: str, **arguments: object) -> list[str]:
  """Returns the command line that calls `work(**arguments)` of a case.

  Args:
    case: one of CASES.
    **arguments: values that JSON can hold.
  """
  return [sys.executable, str(_FOLDER), case, "--worker", json.dumps(arguments)]


def measure_apart(case: str, **arguments: object) -> Any:
  """Returns what `work(**arguments)` of a case returns in a new process.

  A new process has no memory, threads or compiled code of earlier work. If it
  fails, it has said why on stderr, and this process exits with its code.
  """
  done = subprocess.run(
    worker_command(case, **arguments),
    stdout=subprocess.PIPE,
    check=False,
    text=True,
  )
  if done.returncode:
    sys.exit(done.returncode)
  return json.loads(done.stdout)


def train_config(files: Sequence[str], macros: Sequence[str]) -> Config:
  """Returns the settings of `palm_mtf train`, ACTIVATION_DTYPE resolved.

  Args:
    files: gin files.
    macros: texts "NAME=VALUE", which override the files.

  Raises:
    UserError: if a file or macro is wrong.
  """
  # A recipe leaves MODEL_DIR to the user; no case writes there.
  macros = ["MODEL_DIR='none'", *macros]
  _, config = gin_files.load("train", files, macros).build()
  model = resolved(config.model, config.mesh_layout)
  return dataclasses.replace(config, model=model)


def _print_cases() -> None:
  print("python -m tools.bench CASE [flags]; --help after a CASE explains it\n")
  for name in CASES:
    source = (_FOLDER / "cases" / f"{name}.py").read_text(encoding="utf-8")
    summary = ast.get_docstring(ast.parse(source)).partition("\n")[0]
    print(f"  {name:<16}{summary}")


def _read_flags(
  name: str, case: ModuleType, arguments: Sequence[str]
) -> argparse.Namespace:
  """Returns the flags of a case; `files` and `macros` if it has gin flags."""
  flags = Flags(name, case.__doc__)
  case.add_flags(flags)
  flags.add("--json", "print one JSON object per line", action="store_true")
  takes_gin = hasattr(case, "RECIPE")
  if takes_gin:
    flags.add("--gin_file", f"default: {case.RECIPE}", action="append")
  chosen, rest = flags.read(arguments)
  for flag in rest:
    if not (takes_gin and flag.startswith("--gin.") and "=" in flag):
      hint = "; macros are --gin.NAME=VALUE" if takes_gin else ""
      raise UserError(f"{flag}: no such flag{hint}.")
  if takes_gin:
    chosen.files = chosen.gin_file or ([case.RECIPE] if case.RECIPE else [])
    chosen.macros = [flag.removeprefix("--gin.") for flag in rest]
  return chosen


def _run_case(name: str, arguments: Sequence[str]) -> None:
  case = importlib.import_module(f"tools.bench.cases.{name}")
  if arguments[:1] == ["--worker"]:
    found = case.work(**json.loads(arguments[1]))
    if found is not None:
      print(json.dumps(found))
    return
  chosen = _read_flags(name, case, arguments)
  as_json = chosen.json or not hasattr(case, "row")
  records: list[dict] = []
  # Lines are flushed: a case takes minutes, and its stdout may be a file.
  for record in case.measure(chosen):
    if not records and not as_json and getattr(case, "HEAD", ""):
      print(case.HEAD, flush=True)
    records.append(record)
    print(json.dumps(record) if as_json else case.row(record), flush=True)
  if hasattr(case, "finish"):
    text = case.finish(records, chosen)
    if not as_json:
      print(text)


def main() -> int:
  """Runs the case that the command line names, or lists all cases."""
  name, *arguments = sys.argv[1:] or ["--help"]
  if name in ("-h", "--help"):
    _print_cases()
    return 0
  says = "bench"
  try:
    check_choice("CASE", name, CASES)
    says = f"bench {name}"
    _run_case(name, arguments)
  except UserError as error:
    print(f"{says}: {error}", file=sys.stderr)
    return 2
  return 0
