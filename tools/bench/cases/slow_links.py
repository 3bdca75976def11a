# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures loss over time of two pods that exchange over a slow link.

  python -m tools.bench slow_links
  python -m tools.bench slow_links --forms diloco --gin.OUTER_STEPS=50

Needs the rights of root, and iproute2.
"""

# The pods are servers in two network namespaces (dcn_sweep.py), each with half
# of the cores; the client is in the first namespace. One form after another
# trains on the same batches. Bytes are those of the kernel's counters of the
# link's device: everything that crosses, also the client's requests.

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.bench import pairs
from tools.bench.cases.dcn_sweep import (
  PORT,
  client_command,
  linked_servers,
  running,
)
from tools.bench.command import Flag, choices, numbers
from tools.linked_namespaces import ADDRESSES, LinkedNamespaces

RECIPE = "recipes/quickstart.gin"
CLUSTER, SLOW = "pods/cluster.gin", "exchange/slow_link.gin"
# {form: (gin files after the recipe, macros)}
FORMS: Mapping[str, tuple[Sequence[str], Mapping[str, object]]] = {
  "one_pod": (
    [CLUSTER],
    {"NUM_PODS": 1, "ISLANDS": [[f"{ADDRESSES[0]}:{PORT}"]]},
  ),
  "gradients": ([CLUSTER], {"DCN_DTYPE": "float32"}),
  "gradients_bf16": ([CLUSTER], {"DCN_DTYPE": "bfloat16"}),
  "diloco": ([CLUSTER, SLOW], {}),
  "diloco_waits": ([CLUSTER, SLOW], {"OVERLAP_STEPS": 0}),
}
BOUNDS = {"extra_secs": (-math.inf, math.inf), **pairs.BOUNDS}
HEAD = (
  f"{'form':<15} {'steps':>6} {'s/step':>7} {'median':>7} {'MB/step':>8} "
  f"{'loss':>7}  seconds to the losses of --losses"
)
FLAGS = {
  "--forms": Flag(
    "one_pod,gradients,diloco_waits,diloco", "", choices([*FORMS])
  ),
  "--mbits": Flag(200, "bandwidth of each direction, 10^6 bits/s"),
  "--delay_ms": Flag(50, "each way"),
  "--steps": Flag(600, "of training"),
  "--losses": Flag(
    "5,4.5,4.2,4", "validation losses to reach", numbers("5,4", float)
  ),
}
_START_STEPS = 2  # left out: the first builds and compiles
_END_SECS = 600  # limit for a step, an evaluation, or the start


def _follow(
  process: subprocess.Popen,
  folder: Path,
  steps: int,
  namespaces: LinkedNamespaces,
) -> Iterator[tuple[float, int, dict]]:
  """Yields (time, bytes passed until then, metrics) of each step."""
  path, seen = folder / "run" / "metrics.jsonl", 0
  end = time.monotonic() + _END_SECS
  while seen < steps:
    # Drop the text after the last line end, which is half a line or "".
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    if len(lines) > seen:
      now, passed = time.monotonic(), namespaces.passed_bytes()
      for line in lines[seen:]:
        yield now, passed, json.loads(line)
      seen, end = len(lines), now + _END_SECS
    elif process.poll() is not None or time.monotonic() > end:
      said = (folder / "client").read_text().splitlines()[-5:]
      raise RuntimeError("the client makes no steps: " + " / ".join(said))
    time.sleep(0.02)


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per form."""
  with linked_servers(bool(chosen.delay_ms)) as (folder, namespaces):
    for name in chosen.forms:
      files, macros = FORMS[name]
      command = client_command(
        folder / name / "run",
        [*chosen.gin["files"], *files],
        **{"TRAIN_STEPS": chosen.steps, "EVAL_STEPS": 20, "EVAL_BATCHES": 8},
        **macros,
      )
      command += [f"--gin.{x}" for x in chosen.gin["macros"]]
      (folder / name).mkdir()
      # The first steps build and compile over a link without limits.
      namespaces.set_link(math.inf, 0.0)
      points, is_limited = [], False
      with running(
        namespaces.command(0, *command), folder / name / "client"
      ) as client:
        for point in _follow(client, folder / name, chosen.steps, namespaces):
          if point[2]["step"] <= _START_STEPS:
            continue
          if not is_limited:
            namespaces.set_link(1e6 * chosen.mbits, chosen.delay_ms / 1000)
            is_limited = True
          points.append(point)
      yield summarize(name, points, chosen.losses)


def summarize(
  form: str,
  points: Sequence[tuple[float, int, Mapping[str, float]]],
  losses: Sequence[float],
) -> dict:
  """Returns the record of a form.

  Args:
    form: its name.
    points: (time in seconds, bytes passed until then, metrics) of each step.
    losses: validation losses to reach.
  """
  (start, first, _), (_, last, metrics) = points[0], points[-1]
  secs = [x["step_secs"] for _, _, x in points[1:]]
  curve = [
    (now - start, x["validation_loss"])
    for now, _, x in points
    if "validation_loss" in x
  ]
  # A sync makes single steps longer, and leaves the median as it is.
  extra = sum(secs) - len(secs) * statistics.median(secs)
  reached = {
    f"{loss:g}": next((secs for secs, x in curve if x <= loss), None)
    for loss in losses
  }
  return {
    "form": form,
    "steps": metrics["step"],
    "step_secs": statistics.mean(secs),
    "median_step_secs": statistics.median(secs),
    "extra_secs": extra,
    "bytes_per_step": (last - first) / len(secs),
    "validation_loss": curve[-1][1],
    "secs_to_loss": reached,
  }


def row(record: dict) -> str:
  """Returns a line of the table."""
  times = " ".join(
    f"{loss}: {'-' if secs is None else format(secs, '.0f')}"
    for loss, secs in record["secs_to_loss"].items()
  )
  return (
    f"{record['form']:<15} {record['steps']:>6} {record['step_secs']:>7.3f} "
    f"{record['median_step_secs']:>7.3f} "
    f"{record['bytes_per_step'] / 1e6:>8.3f} "
    f"{record['validation_loss']:>7.4f}  {times}"
  )
