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
from palm_mtf.learners.syncer import DONE, WAIT, Merger, OuterParameters, Work
from palm_mtf.machine.processors import difference

# The client's own learner, which computes audited tasks again. No token has
# this name, and it is not one of `members`.
AUDITOR = "the client"
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


class Rounds(Merger):
  """Gives tasks to volunteers, audits and merges; has the methods of `Syncer`.

  Attributes:
    audits: the ledger.
    has_auditor: whether AUDITOR has to join.
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
    super().__init__(outer, state, note)
    state = state or {}
    self.audits, self.has_auditor = audits, config.audit_by == "client"
    self._num_shares, self._num_rounds = num_shares, num_tasks // num_shares
    self._lost_secs, self._kernels = config.task_secs, kernels
    self._how = config.merge
    self._round: int = state.get("next_task", 0) // num_shares
    self._norm: float | None = state.get("norm")
    self._late: collections.Counter[str] = collections.Counter()
    # {volunteer that was late: round in which it may take a task again}
    self._not_before: dict[str, int] = {}
    # When a volunteer that is not late last took a task, or became late.
    self._taken = -math.inf
    self._hashes: collections.deque[str] = collections.deque(maxlen=_NUM_HASHES)
    audits.forget(self._round if audits.undone is None else audits.undone)
    self._begin()
    if audits.undone is not None:  # the checkpoint may contain lies
      self._restore(audits.undone)

  def _begin(self) -> None:
    """Begins a round; what volunteers still compute becomes stale."""
    for each in self._learners.values():
      each.work = None
    self._tasks = [
      _Task(self.audits.draws(self._round, i)) for i in range(self._num_shares)
    ]

  @property
  def members(self) -> list[str]:
    """The volunteers that take part now."""
    return [x for x in self._learners if x != AUDITOR]

  @property
  def state(self) -> dict[str, Any]:
    """The state of Merger, and the median norm of the last round."""
    return {**super().state, "next_task": self.num_done, "norm": self._norm}

  @property
  def num_done(self) -> int:
    """Number of tasks that are part of the outer parameters."""
    return self._round * self._num_shares

  @property
  def is_done(self) -> bool:
    """Whether all rounds are merged."""
    return self._round == self._num_rounds

  @property
  def lack(self) -> str:
    """Why the round cannot end, in one line for the log; or ""."""
    if not self.members:
      return "no volunteer takes part"
    for task in self._tasks if not self.has_auditor else ():
      waits = bool(task.results) and not task.is_done
      if waits and not any(self._may_take(x, task) for x in self._learners):
        owners = sorted({owner_of(x.member) for x in task.results})
        return (
          f"an audit of {' and '.join(owners)} needs a volunteer of another "
          "owner: `palm_mtf pods token OWNER/NAME` makes its token"
        )
    return ""

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
    if member in self._learners and self._learners[member].work:
      self._put_last(member, now)  # or it could keep a task by joins
    number = self._num_learners
    self._num_learners += 1
    if member not in self._learners:
      self.note({"event": "join", "learner": number, "member": member})
    self._learners[member] = _Volunteer(number, not differs)
    return number

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
      if not all(map(self._is_late, self.members)):
        return WAIT
    held = {x.work.task for x in self._learners.values() if x.work}
    for index, task in enumerate(self._tasks, self.num_done):
      if index in held or not self._may_take(member, task):
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

  def _may_take(self, member: str, task: _Task) -> bool:
    if not task.results:
      return member != AUDITOR
    if task.is_done or not task.is_audited:
      return False
    if self.has_auditor:
      return member == AUDITOR
    # A volunteer is not told that its task is an audit.
    owners = {owner_of(x.member) for x in task.results}
    has_kernels = self._learners[member].has_kernels
    return has_kernels and owner_of(member) not in owners

  def find_work(self, member: str, number: object) -> Work:
    """Returns the work whose result a volunteer sends; UserError if stale."""
    work = self._find(member).work
    if work and work.number == number and type(number) is int:
      return work
    raise UserError(f"{member}: the result of work {number!r:.50} is stale.")

  def _find(self, member: str) -> _Volunteer:
    self.audits.check(member)
    found: _Volunteer = super()._find(member)
    return found

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

  @property
  def undone(self) -> int | None:
    """Round to which the run goes back, because of a liar's work; or None."""
    return self.audits.undone

  def _restore(self, round_: int) -> None:
    self.outer.parameters, self.outer.momentum = self.audits.read(round_)
    self._round = self.outer.num_merges = round_
    self._hashes.clear()  # honest volunteers will send the same again
    self._begin()

  def tick(self, now: float) -> list[dict[str, Any]]:
    """Drops late volunteers, and merges a round that is done."""
    for member in self.members:
      volunteer = self._learners[member]
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
      if each.member != AUDITOR:
        self._credit(each.member, each.tokens)
    self._begin()
    return event
