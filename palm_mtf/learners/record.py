# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a run of learners, merges.jsonl, and its replay.

Speed and failures decide who does which task, and which merge has whose work.
Each such decision is an event in the record, in order. All bits of the run
follow from the events: a replay in one process computes the same bits, on
kernels that round like those of the learners.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.learners.decoupled import DecoupledHandler, DecoupledLearner
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


def replay(
  events: Iterable[Mapping[str, Any]], handler: DecoupledHandler
) -> Iterator[int]:
  """Computes a record again; yields the number of each merge.

  `handler` is that of a run before its first step; afterwards it has the outer
  parameters after the last event.

  Raises UserError if a merge has other bits than in the record.
  """
  syncer = handler.syncer
  assert isinstance(syncer, Syncer)
  # {learner's number: (learner, what closes the learner)}.
  learners: dict[int, tuple[DecoupledLearner, contextlib.ExitStack]] = {}
  # {learner's number: (its work, outer parameters when it got the work)}.
  works: dict[int, tuple[Work, Arrays]] = {}
  with contextlib.ExitStack() as every:
    for event in events:
      kind, number, moved = event["event"], event.get("learner", -1), {}
      if kind == "join":
        one = every.enter_context(contextlib.ExitStack())
        learner = one.enter_context(
          handler.joined.open(event.get("mesh") or {})
        )
        learners[number] = learner, one
      if kind == "leave":
        learners.pop(number)[1].close()
      if kind == "contribution":
        work, outer = works.pop(number)
        result = learners[number][0].do(handler.make_message(work, outer))
        moved = handler.unpack(work, result.arrays)
      found = syncer.repeat(event, moved)
      if kind == "work" and event["number"] == 0 and event["task"]:
        raise UserError(
          "merges.jsonl: the run began with pods, whose steps have no record; "
          "only a run that learners began is computed again."
        )
      if kind == "work":
        works[number] = Work.of(event), dict(syncer.outer.parameters)
      if kind == "merge":
        if found != event["blake2b"]:
          raise UserError(
            f"merge {event['merge']} of the record has the hash "
            f"{event['blake2b']}, and its replay {found}: other kernels "
            "round differently; replay on the learners' kind of machine."
          )
        yield event["merge"]
