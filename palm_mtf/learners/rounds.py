# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounds of volunteers' work, in which no bit depends on who computes it.

Round v has a task per share of the batches of its OUTER_STEPS steps. All tasks
start from the same outer parameters with a fresh optimizer, so a result is a
function of the program, these parameters and the task. If a result is late,
refused or a lie, its task goes to another volunteer. A round ends when all its
tasks and audits are done.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from palm_mtf.config import LearnersConfig
from palm_mtf.errors import UserError
from palm_mtf.learners.audit import (
  Arrays,
  Audits,
  hash_arrays,
  merge_robustly,
  norm_of,
)
from palm_mtf.learners.members import owner_of
from palm_mtf.learners.syncer import DONE, WAIT, OuterParameters, Work
from palm_mtf.machine.processors import difference

AUDITOR = "the client"  # no token has this name
_MOST_MOVED = 1e4  # a parameter that moves further in a round is refused
# A contribution is always audited if its L2 norm is more than this many times
# the median norm of the round before, or if there is no round before.
_LARGE = 3.0
_NUM_HASHES = 10_000  # of old contributions, to notice copies


@dataclasses.dataclass
class _Result:
  member: str
  digest: str
  moved: Arrays
  tokens: int
  norm: float
  has_kernels: bool


@dataclasses.dataclass
class _Task:
  is_audited: bool
  results: list[_Result] = dataclasses.field(default_factory=list)
  is_done: bool = False


@dataclasses.dataclass
class _Volunteer:
  number: int
  has_kernels: bool  # whether it rounds like the run, so hashes are comparable
  work: Work | None = None
  given: float = 0.0  # when it got `work`
  merged: int = 0
  tokens: int = 0


class Rounds:
  """Gives tasks to volunteers, audits and merges; has the methods of `Syncer`.

  Attributes:
    outer: the outer parameters.
    quorum: number of volunteers that are needed to end a round.
    note: called with each event, a JSON object.
    audits: the ledger.
  """

  def __init__(
    self,
    outer: OuterParameters,
    audits: Audits,
    config: LearnersConfig,
    *,
    num_tasks: int,
    num_shares: int,
    kernels: Mapping[str, str],
    state: Mapping[str, Any] | None = None,
    note: Callable[[dict[str, Any]], None] = lambda event: None,
  ):
    """Begins or, with the `state` of a checkpoint, continues a run.

    Args:
      num_tasks: number of tasks of the run; a round has `num_shares` tasks.
      kernels: `describe_kernels` of the run. Volunteers with other kernels are
        refused if MERGE is "mean"; otherwise admitted, but not audited.
    """
    state = state or {}
    self.outer, self.audits, self.note = outer, audits, note
    # If volunteers audit, a second volunteer has to compute the task.
    self.quorum = 1 + (config.audit_by == "volunteers")
    self._num_shares, self._num_rounds = num_shares, num_tasks // num_shares
    self._lost_secs, self._kernels = config.task_secs, kernels
    self._audit_by, self._how = config.audit_by, config.merge
    self._round: int = state.get("next_task", 0) // num_shares
    self._num_works: int = state.get("works", 0)
    self._num_learners: int = state.get("learners", 0)
    self._norm: float | None = state.get("norm")
    self._volunteers: dict[str, _Volunteer] = {}
    self._auditor = _Volunteer(-1, has_kernels=True)
    self._late: collections.Counter[str] = collections.Counter()
    # {volunteer that was late: round in which it may take a task again}
    self._not_before: dict[str, int] = {}
    # When a volunteer that is not late last took a task, or became late.
    self._taken = -math.inf
    self._hashes: collections.deque[str] = collections.deque(maxlen=_NUM_HASHES)
    audits.forget(self._round if audits.undone is None else audits.undone)
    self.failure: BaseException | None = None  # of the client's audits
    self._begin()
    if audits.undone is not None:  # the checkpoint may contain lies
      self._restore(audits.undone)

  def _begin(self) -> None:
    """Begins a round; what volunteers still compute becomes stale."""
    for each in [*self._volunteers.values(), self._auditor]:
      each.work = None
    self._tasks = [
      _Task(self.audits.draws(self._round, i)) for i in range(self._num_shares)
    ]

  @property
  def members(self) -> list[str]:
    """The volunteers that take part now."""
    return list(self._volunteers)

  @property
  def has_auditor(self) -> bool:
    """Whether the client computes audited tasks again."""
    return self._audit_by == "client"

  @property
  def state(self) -> dict[str, Any]:
    """What a checkpoint needs of this object besides the outer parameters."""
    return {
      "next_task": self.num_done,
      "learners": self._num_learners,
      "works": self._num_works,
      "norm": self._norm,
      "merges": self.outer.num_merges,
    }

  @property
  def num_done(self) -> int:
    """Number of tasks that are part of the outer parameters."""
    return self._round * self._num_shares

  @property
  def is_done(self) -> bool:
    """Whether all rounds are merged."""
    return self._round == self._num_rounds

  def figures(self) -> dict[str, tuple[int, int, int]]:
    """Returns {member: (last merge with its work, merges since, tokens)}."""
    now = self.outer.num_merges
    return {
      member: (x.merged, now - x.merged, x.tokens)
      for member, x in self._volunteers.items()
    }

  def join(
    self, member: str, now: float, kernels: Any = None, mesh: Any = None
  ) -> int:
    """Takes a volunteer, perhaps again; returns its number.

    Raises UserError if it is banned, or its bits could differ.
    """
    self.audits.check(member)
    is_text = isinstance(kernels, dict) and all(
      isinstance(x, str) and x.isprintable() for x in kernels.values()
    )
    if not is_text or {*kernels} != {*self._kernels} or mesh:
      raise UserError(
        f"{member}: does not describe its kernels, or has a mesh."
      )
    differs = difference(kernels, self._kernels)
    if differs and self._how == "mean":
      raise UserError(
        f"{member}: its kernels round differently ({differs[:300]}), so that "
        'its bits could not be compared; only MERGE = "median" or "clipped" '
        "takes it."
      )
    if member in self._volunteers and self._volunteers[member].work:
      self._put_last(member, now)  # or it could keep a task by joins
    number = self._num_learners
    self._num_learners += 1
    if member not in self._volunteers:
      self.note({"event": "join", "learner": number, "member": member})
    self._volunteers[member] = _Volunteer(number, not differs)
    return number

  def leave(self, member: str) -> None:
    """Drops a volunteer, if it takes part; others do its task."""
    if volunteer := self._volunteers.pop(member, None):
      self.note({"event": "leave", "learner": volunteer.number})

  def _is_late(self, member: str) -> bool:
    return self._not_before.get(member, 0) > self._round

  def _put_last(self, member: str, now: float) -> None:
    """Drops a volunteer that kept others waiting.

    It has to let others go first for some rounds, for more each time.
    """
    self.leave(member)
    self._taken = now
    self._late[member] += 1
    rounds = 2 ** min(self._late[member], 10)
    self._not_before[member] = self._round + rounds

  def next(self, member: str, now: float) -> Work | str:
    """Returns a volunteer's next work, or WAIT or DONE."""
    volunteer = self._find(member)
    if volunteer.work:
      return volunteer.work  # it asks again, because the answer was lost
    if self.is_done:
      return DONE
    is_late = self._is_late(member)
    # A late volunteer lets others go first while one of them takes tasks.
    if is_late and now - self._taken <= self._lost_secs:
      if not all(map(self._is_late, self._volunteers)):
        return WAIT
    held = {x.work.task for x in self._holders() if x.work}
    for i, task in enumerate(self._tasks):
      index = self._round * self._num_shares + i
      if index in held or not self._may_take(member, volunteer, task):
        continue
      volunteer.work = Work(
        number=self._num_works,
        learner=volunteer.number,
        task=index,
        sends=(0,),
        takes=(0,),
        begins=True,
      )
      volunteer.given = now
      self._taken = self._taken if is_late else now
      self._num_works += 1
      return volunteer.work
    return WAIT

  def _holders(self) -> list[_Volunteer]:
    return [*self._volunteers.values(), self._auditor]

  def _may_take(self, member: str, volunteer: _Volunteer, task: _Task) -> bool:
    if not task.results:
      return member != AUDITOR
    if task.is_done or not task.is_audited:
      return False
    if member == AUDITOR or self._audit_by == "client":
      return member == AUDITOR and self._audit_by == "client"
    # A volunteer is not told that its task is an audit.
    owners = {owner_of(x.member) for x in task.results}
    return volunteer.has_kernels and owner_of(member) not in owners

  def find_work(self, member: str, number: object) -> Work:
    """Returns the work whose result a volunteer sends; UserError if stale."""
    work = self._find(member).work
    if work and work.number == number and type(number) is int:
      return work
    raise UserError(f"{member}: the result of work {number!r:.50} is stale.")

  def _find(self, member: str) -> _Volunteer:
    if member == AUDITOR:
      return self._auditor
    self.audits.check(member)
    if member not in self._volunteers:
      raise UserError(f"{member}: does not take part, or was too slow; join.")
    return self._volunteers[member]

  def contribute(
    self, member: str, number: object, moved: Arrays, tokens: int, now: float
  ) -> None:
    """Takes the result of a work: how far the parameters moved.

    Raises UserError if the result is stale, not finite or huge; the volunteer
    has to join again.
    """
    work, volunteer = self.find_work(member, number), self._find(member)
    for name, value in moved.items():
      # A comparison with NaN is false.
      if not np.all(np.abs(value) <= _MOST_MOVED):
        self._put_last(member, now)
        raise UserError(f"{member}: {name} is not finite, or moved too far.")
    volunteer.work, digest = None, hash_arrays(moved)
    assert work.task is not None
    task = self._tasks[work.task - self.num_done]
    others = [x for x in self._tasks if x is not task]
    copied = [x for x in others if any(y.digest == digest for y in x.results)]
    known = [x for x in copied if x.results[0].has_kernels]
    norm = norm_of(moved)
    if self._norm is None or norm > _LARGE * self._norm:
      task.is_audited = True
    if copied or digest in self._hashes:
      self.note({"event": "copy", "member": member, "sha256": digest})
      for each in [task, *(x for x in known if not x.is_audited)]:
        each.is_audited, each.is_done = True, False
    if member == AUDITOR:
      tokens = task.results[0].tokens
    has_kernels = volunteer.has_kernels
    task.results.append(
      _Result(member, digest, moved, tokens, norm, has_kernels)
    )
    self._judge(task)

  def _judge(self, task: _Task) -> None:
    """Decides whether the results of a task are right, as far as is known."""
    first = task.results[0]
    if not first.has_kernels:
      task.is_done = True  # cannot be audited
    elif not task.is_audited:
      task.is_done = True
      self.audits.take(first.member, self._round)
    elif truth := self._find_truth(task):
      liars = {x.member for x in task.results if x.digest != truth}
      for each in {x.member for x in task.results} - liars - {AUDITOR}:
        self.audits.pass_(each)
        self.note({"event": "audit", "member": each, "round": self._round})
      task.results = [x for x in task.results if x.digest == truth]
      task.is_done = True
      if liars:
        self._ban(liars, truth)

  def _find_truth(self, task: _Task) -> str | None:
    owners: dict[str, set[str]] = {}
    for each in task.results:
      if each.member == AUDITOR:
        return each.digest
      owners.setdefault(each.digest, set()).add(owner_of(each.member))
    agreed = [x for x, names in owners.items() if len(names) > 1]
    return agreed[0] if agreed else None

  def _ban(self, liars: set[str], truth: str) -> None:
    """Bans volunteers, and undoes their unaudited contributions."""
    for liar in sorted(liars):
      why = f"its result for round {self._round} is not that of an audit"
      undone = self._round - self.audits.ban(liar, why, self._round)
      self.leave(liar)
      about = {"round": self._round, "sha256": truth, "undone": undone}
      self.note({"event": "liar", "member": liar, **about})
    for i, task in enumerate(self._tasks):
      if any(x.member in liars for x in task.results):
        self._tasks[i] = _Task(is_audited=True)
    if self.audits.undone is not None:
      self._restore(self.audits.undone)

  def _restore(self, round_: int) -> None:
    self.outer.parameters, self.outer.momentum = self.audits.read(round_)
    self._round = self.outer.num_merges = round_
    self._hashes.clear()  # honest volunteers will send the same again
    self._begin()

  def tick(self, now: float) -> list[dict[str, Any]]:
    """Drops late volunteers, and merges a round that is done."""
    if self.failure:
      raise self.failure
    for member, volunteer in [*self._volunteers.items()]:
      if volunteer.work and now - volunteer.given > self._lost_secs:
        self._put_last(member, now)
    return [self._merge()] if all(x.is_done for x in self._tasks) else []

  def _merge(self) -> dict[str, Any]:
    results = [x.results[0] for x in self._tasks]
    self.audits.keep(self._round, self.outer.parameters, self.outer.momentum)
    parts = [(x.moved, x.tokens) for x in results]
    if self._how != "mean":
      parts = [(merge_robustly(self._how, parts), 1)]
    event = {
      "event": "merge",
      "members": [x.member for x in results],
      "blake2b": self.outer.merge(0, parts),
      "merge": self.outer.num_merges,
    }
    self.note(event)
    self._round += 1
    self._norm = float(np.median([x.norm for x in results]))
    for each in results:
      self._hashes.append(each.digest)
      if volunteer := self._volunteers.get(each.member):
        volunteer.merged = self._round
        volunteer.tokens += each.tokens
    self._begin()
    return event
