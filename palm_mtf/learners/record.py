# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a run of learners, merges.jsonl, and its replay.

Speed and failures decide who does which task, and which merge has whose work.
Each such decision is an event in the record, in order. All bits of the run
follow from the events: a replay in one process computes the same bits, on
kernels that round like those of the learners.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.learners.decoupled import DecoupledHandler, DecoupledLearner
from palm_mtf.learners.learner import Learner
from palm_mtf.learners.syncer import Arrays, Syncer, Work
from palm_mtf.model_dir.json_lines import (
  JsonLinesWriter,
  read_json_lines,
  write_json_lines,
)


class Record(contextlib.AbstractContextManager["Record"]):
  """Appends events to a file.

  Drops old events after the checkpoint, because the resumed run repeats them.
  """

  def __init__(self, path: str, num_events: int):
    """Keeps the first `num_events` events, those before the checkpoint."""
    kept = list(read_json_lines(path))[:num_events]
    write_json_lines(path, kept)
    self.num_events = len(kept)
    self._lines = JsonLinesWriter(path)

  def note(self, event: Mapping[str, Any]) -> None:
    """Appends an event."""
    self._lines.write(event)
    self.num_events += 1

  def __exit__(self, *unused: object) -> None:
    self._lines.close()


# Opens a learner whose mesh has these macros instead of the run's.
OpenLearner = Callable[
  [Mapping[str, Any]], contextlib.AbstractContextManager[Learner]
]


class _Learners(contextlib.ExitStack):
  """All learners of a record; those with the same mesh take turns on a pod."""

  def __init__(self, handler: DecoupledHandler, open_learner: OpenLearner):
    super().__init__()
    self._handler, self._open = handler, open_learner
    self._pods: dict[str, Learner] = {}
    self._held: dict[str, int] = {}  # number of the learner on each pod
    self._states: dict[int, Any] = {}  # of learners that are on no pod
    self._ends: dict[int, DecoupledLearner] = {}

  def find(self, number: int, mesh: Mapping[str, Any]) -> DecoupledLearner:
    """Returns a learner, after its variables are set on its pod."""
    key = json_text(mesh)
    if key not in self._pods:
      self._pods[key] = self.enter_context(self._open(mesh))
    pod, before = self._pods[key], self._held.get(key)
    if before != number:
      if before is not None:
        self._states[before] = pod.save()
      if number in self._states:
        pod.load(self._states.pop(number))
      self._held[key] = number
    if number not in self._ends:
      self._ends[number] = self._handler.make_learner(pod)
    return self._ends[number]


def replay(
  events: Iterable[Mapping[str, Any]],
  handler: DecoupledHandler,
  open_learner: OpenLearner,
) -> Iterator[int]:
  """Computes a record again; yields the number of each merge.

  `handler` is that of a run before its first step; afterwards it has the outer
  parameters after the last event.

  Raises UserError if a merge has other bits than in the record.
  """
  syncer, meshes = handler.syncer, {}
  assert isinstance(syncer, Syncer)
  # {learner: its work, and the outer parameters when it got the work}
  works: dict[int, tuple[Work, Arrays]] = {}
  with _Learners(handler, open_learner) as learners:
    for event in events:
      kind, moved = event["event"], {}
      if kind == "join":
        meshes[event["learner"]] = event.get("mesh") or {}
      if kind == "contribution":
        work, outer = works.pop(event["learner"])
        message = handler.make_message(work, outer)
        learner = learners.find(work.learner, meshes[work.learner])
        moved = handler.unpack(work, learner.do(message).arrays)
      found = syncer.repeat(event, moved)
      if kind == "work" and event["number"] == 0 and event["task"]:
        raise UserError(
          "merges.jsonl: the run began with pods, whose steps have no record; "
          "only a run that learners began is computed again."
        )
      if kind == "work":
        works[event["learner"]] = (
          Work.of(event),
          dict(syncer.outer.parameters),
        )
      if kind == "merge":
        if found != event["blake2b"]:
          raise UserError(
            f"merge {event['merge']} of the record has the hash "
            f"{event['blake2b']}, and its replay {found}: other kernels "
            "round differently; replay on the learners' kind of machine."
          )
        yield event["merge"]
