# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of the bench: cases, flags, worker processes and records."""

import argparse
import ast
import dataclasses
import fnmatch
import functools
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from palm_mtf.errors import UserError, check_choice, check_count

_FOLDER = Path(__file__).resolve().parent
_ENOUGH_ROUNDS = 6
CASES = sorted(path.stem for path in (_FOLDER / "cases").glob("*.py"))


@dataclasses.dataclass(frozen=True)
class Flag:
  """A flag of a case.

  Attributes:
    default: value if the flag is not given; None if there is no such value.
    help: text for --help.
    parse: the allowed texts, or a function of the flag's name and text that
      returns the value or raises UserError. Without `parse`, the value is a
      whole number of at least 1 if `default` is a number, otherwise a text.
    settings: further arguments of argparse's `add_argument`. Each of several
      values ("append", "nargs") is parsed separately.
  """

  default: int | str | None
  help: str
  parse: Callable[[str, str], Any] | Iterable[str] | None = None
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the flag to a parser."""
    default = self.default
    has_default = default not in (None, "")
    help_ = f"{self.help} (default {default})" if has_default else self.help
    parser.add_argument(name, default=default, help=help_, **self.settings)

  def read(self, name: str, given: Any) -> Any:
    """Returns the value of the text that argparse read."""
    parse = self.parse
    if parse is None and isinstance(self.default, int):
      parse = count()
    if parse is None or given is None:
      return given
    if not callable(parse):
      parse = choice(parse)
    if isinstance(given, list):
      return [parse(name, x) for x in given]
    return parse(name, str(given))


SEVERAL = {"action": "append"}  # settings of a flag that may be repeated
REQUIRED = {"required": True}


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> None:
    # argparse prints several lines and exits.
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
  parse = choice(among)
  return lambda name, text: [parse(name, x) for x in text.split(",") if x]


def numbers(example: str, kind: type = int) -> Callable[[str, str], list]:
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
  """Turns a UserError into a line on stderr and exit code 2, like palm_mtf."""
  # Do not use __module__, which is "__main__" for the tool that runs.
  name = Path(main.__code__.co_filename).stem

  @functools.wraps(main)
  def run(*arguments: Any) -> int:
    try:
      return main(*arguments) or 0
    except UserError as error:
      print(f"{name}: {error}", file=sys.stderr)
      return 2

  return run


def worker_command(
  case: str, *, folder: Path = _FOLDER, **arguments: object
) -> list[str]:
  """Returns the command line that calls `work(**arguments)` of a case.

  Args:
    case: one of CASES.
    folder: tools/bench in the checkout of palm_mtf that the worker uses.
    **arguments: values that JSON can represent.
  """
  return [sys.executable, str(folder), case, "--worker", json.dumps(arguments)]


def checkout(name: str, text: str) -> Path:
  """Returns tools/bench in the checkout `text`, the value of flag `name`."""
  folder = Path(text).expanduser().resolve() / "tools" / "bench"
  if not (folder / "__main__.py").is_file():
    raise UserError(
      f"{name} = {text}: there is no tools/bench; give a checkout of palm_mtf, "
      "such as a folder that `git worktree add` made."
    )
  return folder


def measure_apart(case: str, **arguments: object) -> Any:
  """Runs `work(**arguments)` of a case in a new process; returns its result.

  A new process has no memory, threads or compiled code from earlier work. If it
  fails, it prints the reason on stderr, and this process exits with its code.
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


def find_impossible(
  record: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]]
) -> Iterator[str]:
  """Yields a text for each figure that its own definition excludes.

  Args:
    record: figures by name; a value may be a record, or a list of values.
    bounds: {pattern of names, as for a shell: (least, largest value)}. The
      first pattern that matches counts. If a record has "low" and "high", they
      are the interval of its "ratio", over "rounds". The ratio is impossible
      only if its whole interval is out of bounds; fewer than _ENOUGH_ROUNDS
      have no interval of 95%.
  """
  for name, value in record.items():
    for each in value if isinstance(value, list) else [value]:
      if isinstance(each, Mapping):
        yield from find_impossible(each, bounds)
        continue
      found = (y for x, y in bounds.items() if fnmatch.fnmatchcase(name, x))
      least, most = next(found, (-math.inf, math.inf))
      low = high = each
      if name == "ratio" and "low" in record:
        if record["rounds"] < _ENOUGH_ROUNDS:
          continue
        low, high = record["low"], record["high"]
      if isinstance(each, float | int) and not (low <= most and high >= least):
        yield f"{name} = {each:g} is not from {least:g} to {most:g}"


def _print_cases() -> None:
  print("python -m tools.bench CASE [flags]; --help after a CASE explains it\n")
  for name in CASES:
    source = (_FOLDER / "cases" / f"{name}.py").read_text(encoding="utf-8")
    summary = ast.get_docstring(ast.parse(source)).partition("\n")[0]
    print(f"  {name:<16}{summary}")


def _read_flags(
  name: str, case: ModuleType, arguments: Sequence[str]
) -> argparse.Namespace:
  """Returns the values of a case's flags; `gin` has gin files and macros."""
  parser = _Parser(
    prog=f"python -m tools.bench {name}",
    description=case.__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  for flag_name, flag in case.FLAGS.items():
    flag.add_to(parser, flag_name)
  json_help = "print one JSON object per line"
  parser.add_argument("--json", action="store_true", help=json_help)
  takes_gin = hasattr(case, "RECIPE")
  if takes_gin:
    gin_help = f"default: {case.RECIPE}"
    parser.add_argument("--gin_file", action="append", help=gin_help)
  chosen, rest = parser.parse_known_args(arguments)
  for flag_name, flag in case.FLAGS.items():
    field = flag_name.removeprefix("--")
    setattr(chosen, field, flag.read(flag_name, getattr(chosen, field)))
  for word in rest:
    if not (takes_gin and word.startswith("--gin.") and "=" in word):
      hint = "; macros are --gin.NAME=VALUE" if takes_gin else ""
      raise UserError(f"{word}: no such flag{hint}.")
  if takes_gin:
    macros = [word.removeprefix("--gin.") for word in rest]
    files = chosen.gin_file or [case.RECIPE]
    chosen.gin = {"files": files, "macros": macros}
  return chosen


def _run_case(name: str, arguments: Sequence[str]) -> int:
  case = importlib.import_module(f"tools.bench.cases.{name}")
  if arguments[:1] == ["--worker"]:
    found = case.work(**json.loads(arguments[1]))
    if found is not None:
      print(json.dumps(found))
    return 0
  chosen = _read_flags(name, case, arguments)
  as_json = chosen.json or not hasattr(case, "row")
  records: list[dict] = []
  # Flush each line, because a case takes minutes, and stdout may be a file.
  for record in case.measure(chosen):
    if not records and not as_json and getattr(case, "HEAD", ""):
      print(case.HEAD, flush=True)
    records.append(record)
    print(json.dumps(record) if as_json else case.row(record), flush=True)
  wrong = [y for x in records for y in find_impossible(x, case.BOUNDS)]
  if wrong:
    print(f"bench {name}: impossible: {'; '.join(wrong)}", file=sys.stderr)
  return int(bool(wrong))


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
    return _run_case(name, arguments)
  except UserError as error:
    print(f"{says}: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print(f"{says}: interrupted", file=sys.stderr)
    return 130
