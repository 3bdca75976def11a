# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures what the dispatch of traced programs costs (Pathways, 5.1).

python -m tools.bench dispatch
python -m tools.bench dispatch --servers 2 --figures 5 --rounds 40 --json
"""

# Servers are processes on this machine with one device each; a slice has all of
# them. The figures are those of the Pathways paper:
#
#   5  seconds per operation in a chain of operations: op_by_op (a call each),
#      chained (one call), fused (one call of one compiled function). An
#      operation adds up one number per device, and adds 1. A fused operation
#      only multiplies and adds, because devices cannot communicate in a
#      function that XLA compiles on CPUs.
#   6  operations of growing size, op_by_op against chained. The break-even is
#      the time of the smallest operation for which op_by_op reaches 90% of the
#      rate of chained, interpolated. Larger operations are not measured.
#   7  a chain of programs on one server after another: parallel dispatch sends
#      all programs at once, sequential dispatch sends each program after the
#      previous program has ended.
#
# Kinds take turns within a round. A turn repeats a chain for a while; it counts
# unless other processes took more than a tenth of the cores meanwhile. If fewer
# than _MIN_TURNS turns count, all turns count, and the number is called
# disturbed. Numbers are medians over turns.

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from tools.bench.command import Flag, choices, measure_apart, numbers
from tools.bench.pairs import (
  OTHERS_SHARE,
  POSITIVE,
  Turn,
  ratio_fields,
  take_turns,
  time_call,
)

FLAGS = {
  "--servers": Flag("1,2,4,8", "numbers of servers", numbers("1,2,4")),
  "--figures": Flag("5,6,7", "of the paper", choices(["5", "6", "7"])),
  "--length": Flag(128, "operations in a chain"),
  "--rounds": Flag(20, "timed rounds"),
}
# op_by_op computes the same as chained in more calls; 2% are noise.
BOUNDS = {"secs": POSITIVE, "ratio": (0, 1.02)}
HEAD = "figure  servers  kind                            ms per operation"
_SIDE = 256  # rows and columns of the matrices in operations of figure 6
_PRODUCTS = (1, 4, 16, 64, 256, 1024)  # per operation
_OPERATIONS = 8  # per chain of figure 6
_ENOUGH = 0.9  # share of the rate of chained
_TURN_SECS, _MIN_TURNS = 0.3, 5


def _take_turns(
  kinds: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[Turn]]:
  """Returns the turns of each kind; "secs" are those of one call."""
  repeats: dict[str, int] = {}
  for kind, call in kinds.items():
    warm = [time_call(call) for _ in range(5)]
    repeats[kind] = max(1, round(_TURN_SECS / min(warm)))

  def repeat(kind: str) -> None:
    for _ in range(repeats[kind]):
      kinds[kind]()

  turns = take_turns(
    {kind: lambda _, kind=kind: repeat(kind) for kind in kinds}, 0, rounds
  )
  return {
    kind: [dataclasses.replace(x, secs=x.secs / repeats[kind]) for x in found]
    for kind, found in turns.items()
  }


def _record(
  figure: int, servers: int, kind: str, turns: Sequence[Turn], n: int
) -> dict:
  """Returns the record of a kind whose calls have `n` operations."""
  quiet = [x for x in turns if x.others <= OTHERS_SHARE]
  is_disturbed = len(quiet) < _MIN_TURNS
  secs = [x.secs / n for x in (turns if is_disturbed else quiet)]
  return {
    "figure": figure,
    "servers": servers,
    "kind": kind,
    "secs": statistics.median(secs),
    "turns": len(secs),
    "is_disturbed": is_disturbed,
  }


def _chain(client, function, slice_, length: int, dispatch: str):
  """Returns a call that applies a function `length` times, and waits."""

  @client.program(dispatch=dispatch)
  def chain(x):
    for _ in range(length):
      x = function.on(slice_)(x)
    return x

  x = function.on(slice_)(np.ones(len(slice_.devices), np.float32))
  return lambda: chain(x).wait()


def _measure_rates(client, servers: int, length: int, rounds: int) -> list:
  from palm_mtf import runtime

  (slice_,) = client.slices(str(servers))
  communicate = runtime.function(lambda x: runtime.all_sum(x) + 1, "sum")
  compute = runtime.function(lambda x: 0.5 * x + 1, "local")
  kinds = {
    dispatch: _chain(client, function, slice_, length, dispatch)
    for dispatch, function in (
      ("op_by_op", communicate),
      ("chained", communicate),
      ("fused", compute),
    )
  }
  return [
    _record(5, servers, kind, found, length)
    for kind, found in _take_turns(kinds, rounds).items()
  ]


def _measure_sizes(client, servers: int, rounds: int) -> list:
  from palm_mtf import runtime
  from palm_mtf._tf import tf

  (slice_,) = client.slices(str(servers))
  records: list[dict] = []
  ratios = []
  for products in _PRODUCTS:

    def work(x, products=products):
      y = tf.fill([_SIDE, _SIDE], x[0] / _SIDE)
      for _ in range(products):
        y = tf.linalg.matmul(y, y)
      return runtime.all_sum(x) + y[0, :1]

    function = runtime.function(work)
    found = _take_turns(
      {
        dispatch: _chain(client, function, slice_, _OPERATIONS, dispatch)
        for dispatch in ("op_by_op", "chained")
      },
      rounds,
    )
    records += [
      _record(6, servers, f"{products} products, {kind}", x, _OPERATIONS)
      for kind, x in found.items()
    ]
    ratio = ratio_fields(found["chained"], found["op_by_op"])
    records[-1] |= {x: ratio[x] for x in ("ratio", "low", "high", "rounds")}
    ratios.append((records[-1]["secs"], ratio["ratio"]))
    if ratios[-1][1] >= _ENOUGH:
      break
  break_even = {"figure": 6, "servers": servers, "kind": "break-even"}
  return [*records, {**break_even, "secs": find_break_even(ratios)}]


def find_break_even(ratios: list[tuple[float, float]]) -> float | None:
  """Returns the seconds of an operation at which the rate is enough.

  Args:
    ratios: for operations of growing size, the seconds of the operation, and
      the rate of op_by_op as a share of that of chained.
  """
  for i, (secs, ratio) in enumerate(ratios):
    if ratio >= _ENOUGH:
      if not i:
        return secs
      before, less = ratios[i - 1]
      share = (_ENOUGH - less) / (ratio - less)
      return before * math.exp(share * math.log(secs / before))
  return None


def _measure_stages(client, servers: int, rounds: int) -> list:
  from palm_mtf import runtime

  slices = client.slices(*["1"] * servers)
  add = runtime.function(lambda x: x + 1, "add")
  first = np.ones(1, np.float32)

  def run(is_parallel: bool) -> None:
    x = first
    for slice_ in slices:
      x = add.on(slice_)(x)
      if not is_parallel:
        x.wait()
    x.wait()

  kinds = {"parallel": lambda: run(True), "sequential": lambda: run(False)}
  return [
    _record(7, servers, kind, found, servers)
    for kind, found in _take_turns(kinds, rounds).items()
  ]


def work(servers: int, figures: list[str], length: int, rounds: int) -> list:
  """Starts a number of servers; returns their records."""
  from palm_mtf import runtime

  records = []
  with runtime.connect(servers, devices=1) as client:
    if "5" in figures:
      records += _measure_rates(client, servers, length, rounds)
    if "6" in figures:
      records += _measure_sizes(client, servers, rounds)
    if "7" in figures:
      records += _measure_stages(client, servers, rounds)
  return records


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per figure, number of servers and kind."""
  for servers in chosen.servers:
    yield from measure_apart(
      "dispatch",
      servers=servers,
      figures=chosen.figures,
      length=chosen.length,
      rounds=chosen.rounds,
    )


def row(record: dict) -> str:
  """Returns a line of the table."""
  secs = record["secs"]
  number = "not reached" if secs is None else f"{1e3 * secs:10.4f}"
  disturbed = " (disturbed)" if record.get("is_disturbed") else ""
  return (
    f"{record['figure']:<8}{record['servers']:<9}{record['kind']:<32}{number}"
    f"{disturbed}"
  )
