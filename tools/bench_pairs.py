# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that stay up and take turns, and the ratios of their times."""

# Machines are shared, and their speed changes from minute to minute: only turns
# next to each other are compared. A round is one turn of each program, in an
# order that rotates; its ratios are of the turns of the round. A round is left
# out where other processes, this machine's or its host's, took more than a
# tenth of the cores in one of its turns; where fewer than MIN_ROUNDS are left,
# all count, and the ratio is called disturbed. Both are fixed beforehand.
# Programs take their turns by peers/turns.py. It imports no other file of this
# folder, as bench_command.py.

import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import largest_resident_bytes

OTHERS_SHARE = 0.1
MIN_ROUNDS = 30
_TICKS = os.sysconf("SC_CLK_TCK")
# Threads of the program before look for work a while.
_SETTLE_SECS = 0.05


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn of a program: its seconds, and what it printed of itself."""

  secs: float
  others: float  # share of the cores that other processes took meanwhile
  values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """Seconds of one program over those of another."""

  median: float
  low: float  # of an interval that has the median in 95 of 100 series
  high: float
  rounds: int  # that count
  left_out: int
  is_disturbed: bool  # the machine was in use


class Program:
  """A program that waits for its turns; a context manager that ends it."""

  def __init__(self, name: str, command: Sequence[str]):
    """Starts the program, which takes turns, and waits until it is warm."""
    self.name = name
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.facts = self._read()

  def __enter__(self) -> "Program":
    return self

  def __exit__(self, *unused: object) -> None:
    self._process.stdin.close()  # ends it
    try:
      self._process.wait(10)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def turn(self) -> Turn:
    """Lets the program take one turn."""
    return turn_of(self._process.pid, self._take_turn)

  def _take_turn(self) -> dict[str, float]:
    print(file=self._process.stdin, flush=True)
    values = self._read()
    return {"peak_bytes": largest_resident_bytes(self._process.pid), **values}

  def _read(self) -> dict[str, float]:
    line = self._process.stdout.readline()
    if not line:
      raise UserError(f"{self.name} ended before its turn; see above.")
    return json.loads(line)


def turn_of(pid: int, take: Callable[[], dict[str, float]]) -> Turn:
  """Takes a turn, and finds out what other processes did meanwhile.

  Args:
    pid: process that does the work, with its children.
    take: does it; returns its "secs" and further numbers.
  """
  time.sleep(_SETTLE_SECS)
  busy, own = _busy_secs(), sum(processor_secs(pid).values())
  values = take()
  secs = values.pop("secs")
  own = sum(processor_secs(pid).values()) - own
  others = _busy_secs() - busy - own
  return Turn(secs, max(0.0, others) / secs / os.cpu_count(), values)


def processor_secs(pid: int) -> dict[int, float]:
  """Returns seconds of processor time of a process and of its children.

  They are by number, the process itself first.
  """
  secs = {pid: 0.0}
  for path in Path("/proc").glob("[0-9]*/stat"):
    try:
      fields = path.read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
      continue
    each = int(path.parent.name)
    if pid in (each, int(fields[1])):
      secs[each] = (int(fields[11]) + int(fields[12])) / _TICKS
  return secs


def _busy_secs() -> float:
  """Returns the seconds of all cores that were not idle, steal included."""
  with open("/proc/stat") as file:
    user, nice, system, _, _, irq, softirq, steal = map(
      int, file.readline().split()[1:9]
    )
  return (user + nice + system + irq + softirq + steal) / _TICKS


def alternate(
  programs: Sequence[Program], rounds: int
) -> dict[str, list[Turn]]:
  """Returns the turns of each program, a turn a round."""
  turns: dict[str, list[Turn]] = {each.name: [] for each in programs}
  for number in range(rounds):
    first = number % len(programs)
    for program in [*programs[first:], *programs[:first]]:
      turns[program.name].append(program.turn())
  return turns


def race(
  commands: Mapping[tuple[str, str], Sequence[str]], rounds: int
) -> dict[tuple[str, str], list[Turn]]:
  """Returns the turns of programs that stay up while all take turns.

  Args:
    commands: command line of each program, by its name and dtype.
    rounds: turns of each.

  Raises:
    UserError: a program ended, or has another number of parameters than the
      first: their speed cannot be compared.
  """
  with contextlib.ExitStack() as stack:
    programs = []
    for key, command in commands.items():
      name = " ".join(key)
      programs.append(stack.enter_context(Program(name, command)))
      counts = [x.facts["parameters"] for x in (programs[0], programs[-1])]
      if counts[0] != counts[1]:
        raise UserError(
          f"{name} has {counts[1]:,} parameters, {programs[0].name} "
          f"{counts[0]:,}: their speed cannot be compared."
        )
      print(f"{name} is warm", file=sys.stderr, flush=True)
    turns = alternate(programs, rounds)
    return dict(zip(commands, turns.values(), strict=True))


def ratio(turns: Sequence[Turn], to: Sequence[Turn]) -> Ratio:
  """Returns how much longer the turns of a program take than another's."""
  pairs = list(zip(turns, to, strict=True))
  quiet = [(x, y) for x, y in pairs if max(x.others, y.others) <= OTHERS_SHARE]
  is_disturbed = len(quiet) < MIN_ROUNDS
  ratios = sorted(
    x.secs / y.secs for x, y in (pairs if is_disturbed else quiet)
  )
  n = len(ratios)
  # By order statistics: binomial, as a normal distribution.
  margin = 1.96 * math.sqrt(n) / 2
  low, high = math.floor(n / 2 - margin), math.ceil(n / 2 + margin) - 1
  return Ratio(
    statistics.median(ratios),
    ratios[max(0, low)],
    ratios[min(n - 1, high)],
    n,
    len(pairs) - n,
    is_disturbed,
  )


def rows(
  turns: Mapping[tuple[str, str], Sequence[Turn]], tokens: int
) -> list[dict[str, object]]:
  """Returns the speed of each program, and how much faster the first one is.

  And the most resident bytes that it has had ("peak_bytes").

  Args:
    turns: turns of each program, by its name and dtype.
    tokens: tokens of a turn.
  """
  ours = next(iter(turns))
  found = []
  for key, own in turns.items():
    row: dict[str, object] = dict(zip(("program", "dtype"), key, strict=True))
    secs = statistics.median(turn.secs for turn in own)
    row["tokens_per_sec"] = tokens / secs
    row["peak_bytes"] = max(turn.values["peak_bytes"] for turn in own)
    if key != ours:
      compared = dataclasses.asdict(ratio(own, turns[ours]))
      row |= {"ratio": compared.pop("median"), **compared}
    found.append(row)
  return found
