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
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from palm_mtf.accounting.communication import Link, dcn_bytes, step_secs
from palm_mtf.accounting.work import Work
from palm_mtf.cli import gin_files
from palm_mtf.config import PodsConfig
from palm_mtf.errors import check_real
from palm_mtf.machine.activation_dtype import resolve_dtype
from palm_mtf.runtime.client.local_servers import cores_of_pods
from tools.bench import pairs
from tools.bench.command import Flag, choices, numbers
from tools.linked_namespaces import ADDRESSES, LinkedNamespaces, end_with_parent

PORT = 2222  # port of both servers, which are in different namespaces
TIMEOUT_SECS = 240  # limit for the start, and for a few steps over any link
# One step runs while the link changes; the other steps settle at the new pace.
SETTLING_STEPS = 6
_RECIPE = "recipes/quickstart.gin"
# Half of the bytes cross the link in each direction. Bytes that the link's
# token bucket and queue let pass at once are 5% of a step at most.
BOUNDS = {**pairs.BOUNDS, "link_share": (0, 1.05)}
HEAD = (
  f"{'DCN_DTYPE':<9} {'bandwidth':>11} {'delay':>8} {'measured':>10} "
  f"{'predicted':>10} {'ratio':>6}"
)


def _parse_reals(name: str, text: str) -> list[float]:
  values = numbers("200,50", float)(name, text)
  for value in values:
    check_real(name, value, 0 if name == "--delays_ms" else 1, 1e6)
  return values


FLAGS = {
  "--mbits": Flag("10000,1000,200", "bandwidths, 10^6 bits/s", _parse_reals),
  "--delays_ms": Flag("0,10,50", "each way", _parse_reals),
  "--dtypes": Flag(
    "float32,bfloat16", "of DCN_DTYPE", choices(["float32", "bfloat16"])
  ),
  "--steps": Flag(5, "measured steps per link"),
}


def client_command(
  model_dir: Path, files: Sequence[str], **settings: object
) -> list[str]:
  """Returns the command line of a run that only trains and logs each step.

  Args:
    model_dir: its MODEL_DIR.
    files: gin files of the run.
    **settings: macros in place of those of a sweep.
  """
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
    "CLIENT_ADDRESS": ADDRESSES[0],
    "ISLANDS": [[f"{address}:{PORT}"] for address in ADDRESSES],
    **settings,
  }
  return [
    *[sys.executable, "-m", "palm_mtf", "train"],
    *(f"--gin_file={file}" for file in files),
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ]


@contextlib.contextmanager
def running(
  command: Sequence[str], log: Path, cores: set[int] | None = None
) -> Iterator:
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


@contextlib.contextmanager
def linked_servers(has_delay: bool) -> Iterator[tuple]:
  """Yields (folder, namespaces) with a pod's server in each namespace.

  Each server has half of the cores. `has_delay`: see LinkedNamespaces.
  """
  # SIGTERM raises an exception, so that servers, client and namespaces end.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  with (
    tempfile.TemporaryDirectory() as name,
    LinkedNamespaces(has_delay) as namespaces,
    contextlib.ExitStack() as servers,
  ):
    print(
      f"two network namespaces, joined by {namespaces.kind}", file=sys.stderr
    )
    # Give pods equally many threads, so that they hold the same bits.
    cores = cores_of_pods(len(ADDRESSES))
    for side, address in enumerate(ADDRESSES):
      serve = ["-m", "palm_mtf", "pods", "serve"]
      serve += [f"--listen={address}:{PORT}", f"--threads={len(cores[side])}"]
      command = namespaces.command(side, sys.executable, *serve)
      servers.enter_context(
        running(command, Path(name) / f"server_{side}", cores[side])
      )
    yield Path(name), namespaces


def _median_secs(process: subprocess.Popen, folder: Path, count: int) -> float:
  """Returns the median seconds of `count` steps that begin from now on."""
  metrics = folder / "run" / "metrics.jsonl"

  def read_lines() -> list[str]:
    # Drop the text after the last line end, which is half a line or "".
    return metrics.read_text().split("\n")[:-1] if metrics.exists() else []

  first = len(read_lines()) + SETTLING_STEPS
  end = time.monotonic() + TIMEOUT_SECS
  while len(lines := read_lines()) < first + count:
    if process.poll() is not None or time.monotonic() > end:
      said = (folder / "client").read_text().splitlines()[-5:]
      raise RuntimeError("the client makes no steps: " + " / ".join(said))
    time.sleep(0.02)
  return statistics.median(
    json.loads(line)["step_secs"] for line in lines[first:][:count]
  )


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per dtype and link; each dtype begins without limits."""
  links = [
    Link(bits_per_sec=1e6 * mbits, delay_secs=delay / 1000)
    for delay in chosen.delays_ms
    for mbits in chosen.mbits
  ]
  with linked_servers(any(chosen.delays_ms)) as (folder, namespaces):
    for dtype in chosen.dtypes:
      (folder / "run/metrics.jsonl").unlink(missing_ok=True)
      # The first step builds and compiles over a link without limits.
      namespaces.set_link(math.inf, 0.0)
      files = [_RECIPE, "pods/cluster.gin"]
      client = client_command(folder / "run", files, DCN_DTYPE=dtype)
      command = namespaces.command(0, *client)
      with running(command, folder / "client") as client:
        for link in [Link(), *links]:
          namespaces.set_link(link.bits_per_sec, link.delay_secs)
          secs = _median_secs(client, folder, chosen.steps)
          if link == Link():
            compute_secs = secs  # the base of the predictions for other links
          yield _record(dtype, link, secs, compute_secs)


def _record(dtype: str, link: Link, secs: float, compute_secs: float) -> dict:
  pods = PodsConfig(num_pods=2, dcn_dtype=dtype)
  # A recipe leaves MODEL_DIR to the user; nothing is written there.
  loaded = gin_files.load("train", [_RECIPE], ["MODEL_DIR='none'"])
  _, config = loaded.build()
  model = resolve_dtype(config.model, config.mesh_layout)
  config = dataclasses.replace(config, model=model, pods=pods)
  work = Work.of(config, config.run.batch_sizes.largest)
  predicted, sent = step_secs(work, compute_secs, link), dcn_bytes(work)
  is_limited = link.bits_per_sec < math.inf
  return {
    "dcn_dtype": dtype,
    "dcn_bytes": sent,
    "mbits_per_sec": link.bits_per_sec / 1e6 if is_limited else None,
    "delay_ms": 1000 * link.delay_secs,
    "step_secs": round(secs, 4),
    "predicted_secs": round(predicted, 4),
    "ratio": round(secs / predicted, 3),
    "link_share": 8 * sent / 2 / link.bits_per_sec / secs,
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
