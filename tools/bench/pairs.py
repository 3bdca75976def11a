# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that stay up and take turns, and the ratios of their times."""

# Machines are shared, and their speed changes from minute to minute. So only
# turns next to each other are compared: in a round, each program takes one
# turn, in an order that rotates; the round gives one ratio. A round is left out
# if, in one of its turns, processes other than the program took more than a
# tenth of the cores, on this machine or on its host. If fewer than MIN_ROUNDS
# remain, all rounds count and the ratio is called disturbed. Both limits were
# fixed before the first measurement. tools/peers/turns.py makes programs take
# turns.

import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import largest_resident_bytes

OTHERS_SHARE = 0.1
MIN_ROUNDS = 30
POSITIVE = (0.0, math.inf)
# The possible figures of a record of speeds and ratios, see command.py.
BOUNDS = dict.fromkeys(("ratio", "*secs", "*per_sec", "peak_bytes"), POSITIVE)
_TICKS = os.sysconf("SC_CLK_TCK")
# After its turn, a program's threads look for work this long; wait for them.
_SETTLE_SECS = 0.05


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn of a program: its seconds, and the values that it printed."""

  secs: float
  others: float  # share of the cores that other processes took
  values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """Seconds of one program divided by seconds of another program."""

  median: float
  low: float  # from low to high: the 95% confidence interval of the median
  high: float
  rounds: int  # number of rounds that count
  left_out: int  # number of rounds that were left out
  is_disturbed: bool  # other processes used the machine in too many rounds


class Program:
  """A program that waits for its turns; a context manager that ends it."""

  def __init__(self, name: str, command: Sequence[str]):
    """Starts the program and waits until it is warm."""
    self.name = name
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _, _, model = " ".join(command).partition("--model=")
    self.facts = self._read(
      f"read {model.split()[0]}" if model else "warmed up"
    )

  def __enter__(self) -> "Program":
    return self

  def __exit__(self, *unused: object) -> None:
    self._process.stdin.close()  # ends the process
    try:
      self._process.wait(10)
    except subprocess.TimeoutExpired:
      self._process.terminate()  # so that it can end its processes
      self._process.wait()

  def turn(self) -> Turn:
    """Lets the program take one turn."""
    return measure_turn(self._process.pid, self._take_turn)

  def _take_turn(self) -> dict[str, float]:
    print(file=self._process.stdin, flush=True)
    values = self._read("took a turn")
    return {"peak_bytes": largest_resident_bytes(self._process.pid), **values}

  def _read(self, doing: str) -> dict[str, float]:
    line = self._process.stdout.readline()
    if not line:
      end = describe_end(self.name, self._process.wait(), doing)
      raise UserError(f"{end}; its messages, if any, are above.")
    return json.loads(line)


def describe_end(name: str, code: int, doing: str) -> str:
  """Returns how a program ended, e.g. "x ended by SIGSEGV while it read y".

  Args:
    name: name of the program.
    code: exit code of the process, negative if a signal ended it.
    doing: what the program did then.
  """
  how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
  return f"{name} ended {how} while it {doing}"


def time_call(function: Callable[..., object], *arguments: object) -> float:
  """Returns the wall-clock seconds of one call."""
  start = time.perf_counter()
  function(*arguments)
  return time.perf_counter() - start


def measure_turn(pid: int, take: Callable[[], dict[str, float]]) -> Turn:
  """Takes a turn, and measures what other processes did at the same time.

  Args:
    pid: process that does the work of `take`, together with its children.
    take: takes the turn; returns its "secs" and further numbers.
  """
  time.sleep(_SETTLE_SECS)
  busy, own = _read_busy_secs(), sum(processor_secs(pid).values())
  values = take()
  secs = values.pop("secs")
  own = sum(processor_secs(pid).values()) - own
  others = _read_busy_secs() - busy - own
  return Turn(secs, max(0.0, others) / secs / os.cpu_count(), values)


def take_turns(
  kinds: Mapping[str, Callable[[int], object]],
  num_warm_up: int,
  num_rounds: int,
  title: str = "",
) -> dict[str, list[Turn]]:
  """Lets kinds of steps of this process take turns; returns their turns.

  Args:
    kinds: for each kind, a function that runs the step of a given number.
    num_warm_up: rounds before the timed rounds.
    num_rounds: timed rounds, in each of which every kind runs a step.
    title: beginning of the line that reports a round on stderr; without it,
      there is no line.
  """
  turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
  # Begin with step 1, because at step 0 the moments are 0.
  for number in range(1, 1 + num_warm_up + num_rounds):
    for kind, run in kinds.items():
      turn = measure_turn(
        os.getpid(),
        lambda run=run, number=number: {"secs": time_call(run, number)},
      )
      turns[kind].append(turn)
    if title:
      secs = (f"{kind} {x[-1].secs:.3f} s" for kind, x in turns.items())
      print(f"{title}: {'  '.join(secs)}", file=sys.stderr)
  return {kind: x[num_warm_up:] for kind, x in turns.items()}


def processor_secs(pid: int) -> dict[int, float]:
  """Returns processor seconds of a process and of its children, by pid.

  The process itself comes first.
  """
  secs = {pid: 0.0}
  for path in Path("/proc").glob("[0-9]*/stat"):
    try:
      fields = path.read_text().rpartition(")")[2].split()
    except OSError:  # the process has just ended
      continue
    found = int(path.parent.name)
    if pid in (found, int(fields[1])):
      secs[found] = (int(fields[11]) + int(fields[12])) / _TICKS
  return secs


def _read_busy_secs() -> float:
  """Returns the seconds in which cores were not idle, including steal."""
  with open("/proc/stat") as file:
    user, nice, system, _, _, irq, softirq, steal = map(
      int, file.readline().split()[1:9]
    )
  return (user + nice + system + irq + softirq + steal) / _TICKS


def alternate(
  programs: Sequence[Program], rounds: int
) -> dict[str, list[Turn]]:
  """Returns the turns of each program, one turn per round."""
  turns: dict[str, list[Turn]] = {x.name: [] for x in programs}
  for number in range(rounds):
    first = number % len(programs)
    for program in [*programs[first:], *programs[:first]]:
      turns[program.name].append(program.turn())
  return turns


def race(
  commands: Mapping[Any, Sequence[str]], rounds: int, *, tolerance: float = 0.0
) -> dict[Any, list[Turn]]:
  """Returns the turns of programs that stay up while all of them take turns.

  Args:
    commands: command line of each program; a key is the program's name, or a
      tuple of the words of its name.
    rounds: number of turns of each program.
    tolerance: share by which the programs' numbers of parameters may differ.

  Raises:
    UserError: if a program ended, or if its number of parameters differs from
      that of the first program that has any, so that speeds cannot be compared.
  """
  with contextlib.ExitStack() as stack:
    programs: list[Program] = []
    for key, command in commands.items():
      name = key if isinstance(key, str) else " ".join(key)
      programs.append(stack.enter_context(Program(name, command)))
      models = [x for x in programs if "parameters" in x.facts]
      if models:
        first, own = (models[i].facts["parameters"] for i in (0, -1))
        if abs(own - first) > tolerance * first:
          raise UserError(
            f"{name} has {own:,} parameters, {models[0].name} {first:,}: their "
            "speed cannot be compared."
          )
      print(f"{name} is warm", file=sys.stderr, flush=True)
    turns = alternate(programs, rounds)
    return dict(zip(commands, turns.values(), strict=True))


def ratio(turns: Sequence[Turn], to: Sequence[Turn]) -> Ratio:
  """Returns how many times as long `turns` take as `to`, another's turns."""
  pairs = list(zip(turns, to, strict=True))
  quiet = [(x, y) for x, y in pairs if max(x.others, y.others) <= OTHERS_SHARE]
  is_disturbed = len(quiet) < MIN_ROUNDS
  ratios = sorted(
    x.secs / y.secs for x, y in (pairs if is_disturbed else quiet)
  )
  n = len(ratios)
  # Order statistics: the normal distribution approximates the binomial one.
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


def describe_ratio(record: Mapping[str, Any], digits: int = 2) -> str:
  """Returns "1.22 (1.18 to 1.27, 33 rounds)" from a record with "ratio"."""
  middle, low, high = (
    f"{record[x]:.{digits}f}" for x in ("ratio", "low", "high")
  )
  disturbed = ", disturbed" if record["is_disturbed"] else ""
  return f"{middle} ({low} to {high}, {record['rounds']} rounds{disturbed})"


def ratio_fields(turns: Sequence[Turn], to: Sequence[Turn]) -> dict[str, Any]:
  """Returns the fields of a Ratio for a record; the median is "ratio"."""
  fields = dataclasses.asdict(ratio(turns, to))
  return {"ratio": fields.pop("median"), **fields}


def speed_records(
  turns: Mapping[tuple[str, str], Sequence[Turn]], tokens: int
) -> list[dict[str, Any]]:
  """Returns a record per program: its speed, its peak and its ratio.

  "ratio" says how many times as fast the first program is; "peak_bytes" is the
  largest number of resident bytes.

  Args:
    turns: turns of each program, by its name and dtype.
    tokens: number of tokens in a turn.
  """
  first, records = next(iter(turns)), []
  for key, own in turns.items():
    record: dict[str, Any] = dict(zip(("program", "dtype"), key, strict=True))
    secs = statistics.median(turn.secs for turn in own)
    record["tokens_per_sec"] = tokens / secs
    record["peak_bytes"] = max(turn.values["peak_bytes"] for turn in own)
    if key != first:
      record |= ratio_fields(own, turns[first])
    records.append(record)
  return records


# A case may have further columns between the two parts.
SPEEDS_HEAD = (
  f"{'program':<14} {'dtype':<9} {'tokens/s':>9} {'peak, MB':>9}",
  "  ratio of ours to it",
)


def speeds_row(record: Mapping[str, Any], further: str = "") -> str:
  """Returns a line of the table of speeds, with further columns."""
  line = (
    f"{record['program']:<14} {record['dtype']:<9} "
    f"{record['tokens_per_sec']:>9,.0f} {record['peak_bytes'] / 1e6:>9,.0f}"
    f"{further}"
  )
  return f"{line}  {describe_ratio(record)}" if "ratio" in record else line
