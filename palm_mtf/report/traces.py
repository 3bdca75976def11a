# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads traced steps: what trace/chrome.py has written.

Bars that a picture of a whole step cannot tell apart become one.
"""

import dataclasses
import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from palm_mtf.model_dir.layout import ModelDir

_TRANSFER = "transfer"
_WAITING = "waiting"
_SHORTEST_SHARE = 1 / 3000  # of the step: less than a dot of the picture

Intervals = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Way:
  """What crossed from one pod to another. Times are as in Timeline.

  Attributes:
    source: the pod that sent it.
    target: the pod that received it.
    num_bytes: how much.
    transfers: while something was sent.
    waiting: while something was ready to be sent.
    exposed: while either was so, and the target did not compute.
    exposed_usecs: how long that was.
  """

  source: int
  target: int
  num_bytes: int
  transfers: Intervals
  waiting: Intervals
  exposed: Intervals
  exposed_usecs: float


@dataclasses.dataclass(frozen=True)
class Timeline:
  """A step, as it is drawn. Times are microseconds after its beginning.

  Attributes:
    step: its number.
    last_call: when the last microbatches began, after all others; 0 where a
      step has but one.
    end: of the step.
    pods: of each pod, when it was in each phase.
    ways: between pods, where something crossed.
    figures: of the step, as in trace/overlap.py.
  """

  step: int
  last_call: float
  end: float
  pods: list[Mapping[str, Intervals]]
  ways: list[Way]
  figures: Mapping[str, float]


def read_timeline(written: Mapping[str, Any]) -> Timeline:
  """Returns what to draw of a file's content."""
  other = written["otherData"]
  end = other["figures"]["traced_step_secs"] * 1e6
  bars: dict[int, dict[str, Intervals]] = {}
  for event in written["traceEvents"]:
    if event["ph"] != "X":
      continue
    lane = bars.setdefault(event["pid"], {})
    start, stop = event["ts"], event["ts"] + event["dur"]
    if event["cat"] == _TRANSFER:
      sent = start + event["args"]["usecs until sent"]
      lane.setdefault(_WAITING, []).append((start, sent))
      start = sent
    lane.setdefault(event["cat"], []).append((start, stop))
  shortest = end * _SHORTEST_SHARE
  merged = {
    lane: {kind: _merged(each, shortest) for kind, each in kinds.items()}
    for lane, kinds in bars.items()
  }
  return Timeline(
    step=other["step"],
    last_call=other["last_call"],
    end=end,
    pods=[merged.get(pod, {}) for pod in range(other["num_pods"])],
    ways=[
      Way(
        source=way["source"],
        target=way["target"],
        num_bytes=way["bytes"],
        transfers=merged[way["pid"]][_TRANSFER],
        waiting=merged[way["pid"]][_WAITING],
        exposed=[(start, stop) for start, stop in way["exposed"]],
        exposed_usecs=way["exposed_usecs"],
      )
      for way in other["directions"]
    ],
    figures=other["figures"],
  )


def read_timelines(model_dir: str) -> Sequence[Timeline]:
  """Returns the traced steps of a run in order, as far as they can be read."""
  found = []
  folder = glob.escape(ModelDir(model_dir).traces)
  for path in sorted(glob.glob(f"{folder}/step_*.json")):
    try:
      with open(path, encoding="utf-8") as file:
        found.append(read_timeline(json.load(file)))
    except (OSError, ValueError, LookupError, TypeError):
      continue  # of another version
  return found


def _merged(
  intervals: Iterable[tuple[float, float]], shortest: float
) -> Intervals:
  """Returns intervals, with gaps below `shortest` closed."""
  merged: Intervals = []
  for start, end in sorted(intervals):
    if merged and start <= merged[-1][1] + shortest:
      merged[-1] = merged[-1][0], max(end, merged[-1][1])
    else:
      merged.append((start, end))
  return merged
