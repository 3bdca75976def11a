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
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.report.plans import write_png
from tools.bench.command import Flag, choices, measure_apart, numbers
from tools.bench.pairs import OTHERS_SHARE, Turn, measure_turn, time_call

FLAGS = {
  "--servers": Flag("1,2,4,8", "numbers of servers", numbers("1,2,4")),
  "--figures": Flag("5,6,7", "of the paper", choices(["5", "6", "7"])),
  "--length": Flag(128, "operations in a chain"),
  "--rounds": Flag(20, "timed rounds"),
  "--picture": Flag(None, "draw the table into this PNG file"),
}
HEAD = "figure  servers  kind                            ms per operation"
_SIDE = 256  # rows and columns of the matrices in operations of figure 6
_PRODUCTS = (1, 4, 16, 64, 256, 1024)  # per operation
_OPERATIONS = 8  # per chain of figure 6
_ENOUGH = 0.9  # share of the rate of chained
_TURN_SECS, _MIN_TURNS = 0.3, 5


def _take_turns(
  kinds: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, dict]:
  """Returns, by kind, the seconds of a call and whether it was disturbed."""
  repeats, turns = {}, {kind: [] for kind in kinds}
  for kind, call in kinds.items():
    warm = [time_call(call) for _ in range(5)]
    repeats[kind] = max(1, round(_TURN_SECS / min(warm)))

  def take(kind: str) -> dict[str, float]:
    begin = time.perf_counter()
    for _ in range(repeats[kind]):
      kinds[kind]()
    return {"secs": time.perf_counter() - begin}

  for _ in range(rounds):
    for kind in kinds:
      turn = measure_turn(os.getpid(), lambda kind=kind: take(kind))
      turns[kind].append(turn)
  return {
    kind: _summarize(found, repeats[kind]) for kind, found in turns.items()
  }


def _summarize(turns: Sequence[Turn], repeats: int) -> dict:
  quiet = [x for x in turns if x.others <= OTHERS_SHARE]
  is_disturbed = len(quiet) < _MIN_TURNS
  secs = [x.secs / repeats for x in (turns if is_disturbed else quiet)]
  return {
    "secs": statistics.median(secs),
    "turns": len(secs),
    "is_disturbed": is_disturbed,
  }


def _record(figure: int, servers: int, kind: str, found: dict, n: int) -> dict:
  """Returns the record of a kind whose calls have `n` operations."""
  record = {"figure": figure, "servers": servers, "kind": kind}
  return {**record, **found, "secs": found["secs"] / n}


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
    chained, op_by_op = (found[x]["secs"] for x in ("chained", "op_by_op"))
    ratios.append((chained / _OPERATIONS, chained / op_by_op))
    records += [
      _record(6, servers, f"{products} products, {kind}", x, _OPERATIONS)
      for kind, x in found.items()
    ]
    records[-1]["ratio"] = ratios[-1][1]
    if ratios[-1][1] >= _ENOUGH:
      break
  found = {"secs": find_break_even(ratios)}
  records.append(
    {"figure": 6, "servers": servers, "kind": "break-even"} | found
  )
  return records


def draw(records: Sequence[dict], path: str) -> None:
  """Draws a panel per figure of the paper."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10.8, 3.4), layout="constrained")
  rates, sizes, stages = figure.subplots(1, 3)
  servers = sorted({x["servers"] for x in records})
  for axes, number, of, scale in (
    (rates, 5, "operations", "log"),
    (stages, 7, "programs", "linear"),
  ):
    own = [x for x in records if x["figure"] == number]
    for kind in dict.fromkeys(x["kind"] for x in own):
      secs = {x["servers"]: x["secs"] for x in own if x["kind"] == kind}
      axes.plot([*secs], [1 / x for x in secs.values()], "o-", label=kind)
    axes.set(xscale="log", yscale=scale, xlabel="servers")
    axes.set(ylabel=f"{of} per second", ylim=(0 if number == 7 else None, None))
    axes.set_xticks(servers, servers)
    axes.minorticks_off()
  measured = [x for x in records if "ratio" in x]
  for number in sorted({x["servers"] for x in measured}):
    own = [x for x in measured if x["servers"] == number]
    sizes.plot(
      [1e3 * x["secs"] for x in own],
      [x["ratio"] for x in own],
      "o-",
      label=f"{number} server{'s' if number > 1 else ''}",
    )
  sizes.axhline(_ENOUGH, color="0.6", linestyle=":")
  sizes.set(xscale="log", ylim=(0, 1.1), xlabel="ms per operation, chained")
  sizes.set_ylabel("rate of op_by_op / rate of chained")
  titles = ("rate by dispatch", "break-even size", "dispatch of a chain")
  for axes, number, title in zip(
    (rates, sizes, stages), (5, 6, 7), titles, strict=True
  ):
    axes.set_title(f"Figure {number}: {title}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
  write_png(figure, path, dpi=120)


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
