# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the step time of two pods over links of set bandwidth and delay.

  python -m tools.bench dcn_sweep
  python -m tools.bench dcn_sweep --mbits 1000,100 --delays_ms 0

Needs the rights of root, and iproute2.
"""

# The pods are servers of `palm_mtf pods serve` in two network namespaces of
# this machine (linked_namespaces.py), each with half of its cores. The client
# is `palm_mtf train` in the first namespace. The link changes while the client
# trains. The table has the median step time over each link, and the prediction
# of accounting/communication.py from the step time over a link without limits.

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from palm_mtf.accounting.communication import Link, dcn_bytes, step_secs
from palm_mtf.config import PodsConfig
from palm_mtf.errors import check_real
from palm_mtf.report.plans import write_png
from palm_mtf.runtime.client.local_servers import cores_of_pods
from tools.bench.command import Flag, choices, numbers, train_config
from tools.linked_namespaces import ADDRESSES, LinkedNamespaces, end_with_parent

PORT = 2222  # port of both servers, which are in different namespaces
TIMEOUT_SECS = 240  # limit for the start, and for a few steps over any link
# One step runs while the link changes; the other steps settle at the new pace.
SETTLING_STEPS = 6
_RECIPE = "recipes/quickstart.gin"


HEAD = (
  f"{'DCN_DTYPE':<9} {'bandwidth':>11} {'delay':>8} {'measured':>10} "
  f"{'predicted':>10} {'ratio':>6}"
)


def _parse_reals(low: float, high: float) -> Callable[[str, str], list[float]]:
  def parse(name: str, text: str) -> list[float]:
    values = numbers("200,50", float)(name, text)
    for value in values:
      check_real(name, value, low, high)
    return values

  return parse


FLAGS = {
  "--mbits": Flag(
    "10000,1000,200", "bandwidths, 10^6 bits/s", _parse_reals(1, 1e6)
  ),
  "--delays_ms": Flag("0,10,50", "each way", _parse_reals(0, 1e4)),
  "--dtypes": Flag(
    "float32,bfloat16", "of DCN_DTYPE", choices(["float32", "bfloat16"])
  ),
  "--steps": Flag(5, "measured steps per link"),
  "--picture": Flag(None, "draw the table into this PNG file"),
}


def client_command(model_dir: Path, dtype: str) -> list[str]:
  """Returns the command line of a run that only trains and logs each step."""
  texts = Path(os.__file__).parent / "*.py"  # the standard library's files
  macros = {
    "MODEL_DIR": str(model_dir),
    "TEXT_FILES": str(texts),
    "TRAIN_STEPS": 100_000,
    "LOG_STEPS": 1,
    "EVAL_STEPS": 100_000,
    "EVAL_BATCHES": 1,
    "CHECKPOINT_STEPS": 100_000,
    "FINGERPRINT_STEPS": 100_000,
    "SAMPLE_STEPS": None,
    "CHIP": "a100",  # only MFU depends on it
    "DCN_DTYPE": dtype,
    "CLIENT_ADDRESS": ADDRESSES[0],
    "ISLANDS": [[f"{address}:{PORT}"] for address in ADDRESSES],
  }
  return [
    *[sys.executable, "-m", "palm_mtf", "train"],
    *[f"--gin_file={_RECIPE}", "--gin_file=pods/cluster.gin"],
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ]


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, cores=None) -> Iterator:
  """Runs a program during the `with` block, with its output in a file."""

  # Runs in the child process before the program, so that the program ends when
  # this process ends, and runs only on `cores`.
  def prepare() -> None:
    end_with_parent()
    if cores:
      os.sched_setaffinity(0, cores)

  with log.open("w") as file:
    process = subprocess.Popen(
      command, stdout=file, stderr=file, preexec_fn=prepare
    )
    try:
      yield process
    finally:
      process.kill()
      process.wait()


class Client:
  """A training run whose step times are read from metrics.jsonl."""

  def __init__(self, process: subprocess.Popen, log: Path, model_dir: Path):
    """Keeps the process, the path of its output, and its MODEL_DIR."""
    self._process, self._log = process, log
    self._metrics = model_dir / "metrics.jsonl"

  def step_secs(self, count: int) -> list[float]:
    """Returns the seconds of `count` steps that begin from now on."""
    first = len(self._lines()) + SETTLING_STEPS
    end = time.monotonic() + TIMEOUT_SECS
    while len(lines := self._lines()) < first + count:
      if self._process.poll() is not None or time.monotonic() > end:
        said = self._log.read_text().splitlines()[-5:]
        raise RuntimeError("the client makes no steps: " + " / ".join(said))
      time.sleep(0.02)
    return [json.loads(line)["step_secs"] for line in lines[first:][:count]]

  def _lines(self) -> list[str]:
    if not self._metrics.exists():
      return []
    # Drop the text after the last line end, which is half a line or "".
    *whole, _ = self._metrics.read_text().split("\n")
    return whole


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per dtype and link; each dtype begins without limits."""
  links = [
    Link(bits_per_sec=1e6 * mbits, delay_secs=delay / 1000)
    for delay in chosen.delays_ms
    for mbits in chosen.mbits
  ]
  # SIGTERM raises an exception, so that servers, client and namespaces end.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  with (
    tempfile.TemporaryDirectory() as name,
    LinkedNamespaces(has_delay=any(chosen.delays_ms)) as namespaces,
    contextlib.ExitStack() as servers,
  ):
    folder, link_kind = Path(name), namespaces.kind
    print(f"two network namespaces, joined by {link_kind}", file=sys.stderr)
    # Give pods equally many threads, so that they hold the same bits.
    cores = cores_of_pods(len(ADDRESSES))
    for side, address in enumerate(ADDRESSES):
      serve = ["-m", "palm_mtf", "pods", "serve"]
      serve += [f"--listen={address}:{PORT}", f"--threads={len(cores[side])}"]
      command = namespaces.command(side, sys.executable, *serve)
      servers.enter_context(
        running(command, folder / f"server_{side}", cores[side])
      )
    for dtype in chosen.dtypes:
      (folder / "run/metrics.jsonl").unlink(missing_ok=True)
      # The first step builds and compiles over a link without limits.
      namespaces.set_link(math.inf, 0.0)
      command = namespaces.command(0, *client_command(folder / "run", dtype))
      log = folder / "client"
      with running(command, log) as process:
        client = Client(process, log, folder / "run")
        yield from _sweep(client, namespaces, links, dtype, chosen.steps)


def _sweep(
  client: Client,
  namespaces: LinkedNamespaces,
  links: Sequence[Link],
  dtype: str,
  steps: int,
) -> Iterator[dict]:
  config = train_config([_RECIPE], [])
  model, mesh = config.model, config.mesh_layout
  pods = PodsConfig(num_pods=2, dcn_dtype=dtype)
  for link in [Link(), *links]:
    namespaces.set_link(link.bits_per_sec, link.delay_secs)
    median = statistics.median(client.step_secs(steps))
    if link == Link():
      compute_secs = median  # the base of the predictions for other links
    predicted = step_secs(model, mesh, pods, compute_secs, link)
    unlimited = link.bits_per_sec == math.inf
    yield {
      "dcn_dtype": dtype,
      "dcn_bytes": dcn_bytes(model, mesh, pods),
      "mbits_per_sec": None if unlimited else link.bits_per_sec / 1e6,
      "delay_ms": 1000 * link.delay_secs,
      "step_secs": round(median, 4),
      "predicted_secs": round(predicted, 4),
      "ratio": round(median / predicted, 3),
    }


def row(record: dict) -> str:
  """Returns a line of the table; ratio is measured / predicted."""
  mbits = record["mbits_per_sec"]
  bandwidth = "no limit" if mbits is None else f"{mbits:,.0f} Mb/s"
  return (
    f"{record['dcn_dtype']:<9} {bandwidth:>11} {record['delay_ms']:>5.0f} ms "
    f"{record['step_secs']:>10.3f} {record['predicted_secs']:>10.3f} "
    f"{record['ratio']:>6.2f}"
  )


def draw(records: Sequence[dict], path: str) -> None:
  """Draws step time by bandwidth: lines are predicted, marks measured."""
  from matplotlib.figure import Figure

  dtypes = list(dict.fromkeys(each["dcn_dtype"] for each in records))
  figure = Figure(figsize=(4.6 * len(dtypes), 3.6), layout="constrained")
  all_axes = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
  for axes, dtype in zip(all_axes, dtypes, strict=True):
    own = [each for each in records if each["dcn_dtype"] == dtype]
    limited = [each for each in own if each["mbits_per_sec"] is not None]
    axes.axhline(own[0]["step_secs"], color="0.6", linestyle=":")
    axes.annotate(
      "no limit",
      (0.5, own[0]["step_secs"]),
      va="top",
      ha="center",
      xycoords=("axes fraction", "data"),
      color="0.4",
      fontsize=8,
    )
    for number, delay in enumerate(sorted({x["delay_ms"] for x in limited})):
      points = sorted(
        (x["mbits_per_sec"], x["predicted_secs"], x["step_secs"])
        for x in limited
        if x["delay_ms"] == delay
      )
      mbits, predicted, measured = zip(*points, strict=True)
      color = f"C{number}"
      axes.plot(mbits, predicted, color=color, linewidth=1)
      axes.plot(
        mbits, measured, "o", color=color, label=f"{delay:g} ms each way"
      )
    axes.set(xscale="log", xlabel="bandwidth each way, Mb/s", title=dtype)
    axes.set_xticks(mbits, [f"{each:,.0f}" for each in mbits])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
  all_axes[0].set_ylabel("seconds per step")
  all_axes[-1].legend(frameon=False, title="marks measured, lines predicted")
  write_png(figure, path, dpi=120)
