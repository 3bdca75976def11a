# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which learner trains what, and when its work is merged (arXiv:2604.21428).

A *task* is one share of the batches of OUTER_STEPS / FRAGMENTS steps. A learner
takes a task, trains, and sends how far one fragment has moved since it sent
that fragment last; fragments take turns. A fragment is merged once QUORUM
learners have sent it, and either all others have, too, or GRACE_SECS are over:

  mean  =  p + sum of tokens_i moved_i / sum of tokens_i      p: the fragment

and `outer_step` (optim/outer.py) computes the next p from p and the mean. If a
learner sends the fragment after that, its change is part of the next merge.

Nothing here uses a clock, a thread or a network: times are arguments, and the
events, in their order, decide every bit (record.py).
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.architecture.parameters import parse_name
from palm_mtf.config import ExchangeConfig
from palm_mtf.errors import UserError
from palm_mtf.optim.outer import outer_step

Arrays = Mapping[str, np.ndarray]  # {parameter: float32}
# A learner is lost if it is silent for POD_TIMEOUT_SECS. While it has work, add
# the time of its slowest task _SLOW_TASKS times; before it has done a task,
# multiply by _SLOW_FACTOR.
_SLOW_TASKS, _SLOW_FACTOR = 3, 10


class OuterParameters:
  """The parameters that all learners share, and their momentum.

  Attributes:
    parameters, momentum: {parameter: float32}. A merge makes new arrays, so a
      copy of the mapping keeps its values.
    fragments: names of the parameters of each fragment.
    versions: number of the last merge of each fragment; 0 for none.
    num_merges: number of merges.
  """

  def __init__(
    self,
    parameters: Arrays,
    fragments: Sequence[Sequence[str]],
    exchange: ExchangeConfig,
    momentum: Arrays | None = None,
    num_merges: int = 0,
  ):
    self.parameters, self.fragments = dict(parameters), fragments
    self.momentum = {x: np.zeros_like(parameters[x]) for x in parameters}
    self.momentum |= momentum or {}
    self._rate = exchange.outer_lr, exchange.outer_momentum
    self.num_merges = num_merges
    self.versions = [num_merges] * len(fragments)

  def merge(self, fragment: int, parts: Sequence[tuple[Arrays, int]]) -> str:
    """Merges a fragment; returns a hash of its next values.

    `parts` has how far each learner moved the fragment, with its tokens.
    """
    digest = hashlib.blake2b(digest_size=16)
    total = sum(tokens for _, tokens in parts)
    for name in self.fragments[fragment]:
      p, momentum = self.parameters[name], self.momentum[name]
      # Loads of experts are measured, so their mean needs no momentum.
      rate = (1.0, 0.0) if parse_name(name).is_state else self._rate
      # In float64, so that only the order of `parts` and one rounding matter.
      moved = sum(np.float64(tokens) * x[name] for x, tokens in parts) / total
      mean = (p + moved).astype(np.float32)
      self.parameters[name], self.momentum[name] = (
        np.asarray(x, np.float32) for x in outer_step(p, momentum, mean, *rate)
      )
      digest.update(self.parameters[name].tobytes())
    self.num_merges += 1
    self.versions[fragment] = self.num_merges
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Work:
  """What a learner does next.

  Attributes:
    number: number of the work, unique in the run.
    learner: number of the learner.
    task: number of the task; None to train no more, and send what is left.
    sends: fragments that the learner sends afterwards.
    takes: fragments whose new outer parameters the learner gets first.
    begins: whether the learner's optimizer starts from scratch.
  """

  number: int
  learner: int
  task: int | None
  sends: tuple[int, ...]
  takes: tuple[int, ...]
  begins: bool

  @classmethod
  def of(cls, event: Mapping[str, Any]) -> "Work":
    """Returns the work of an event "work"."""
    return cls(**{x.name: event[x.name] for x in dataclasses.fields(cls)})


@dataclasses.dataclass
class _Learner:
  number: int
  order: list[int]  # fragments in the order in which it sends them next
  turn: int  # number of merges that its next task waits for
  heard: float  # time of its last sign of life
  versions: list[int]  # of the outer parameters that it has
  # Per fragment, {task: tokens} of the tasks since it last sent the fragment.
  since: list[dict[int, int]]
  work: Work | None = None
  # When it got its work, and `outer.versions` then.
  given: tuple[float, list[int]] = (0.0, [])
  waits: bool = False  # whether it has asked for work and got none
  last: Work | None = None  # the last work whose result it has sent
  slowest: float | None = None  # seconds of a task

  @property
  def unsent(self) -> tuple[int, ...]:
    """Fragments that have moved since it sent them."""
    return tuple(i for i, tasks in enumerate(self.since) if tasks)


@dataclasses.dataclass
class _Part:
  """How far a learner has moved a fragment since its work was last merged."""

  member: str
  # {task: tokens}
  tasks: dict[int, int] = dataclasses.field(default_factory=dict)
  moved: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def tokens(self) -> int:
    return sum(self.tasks.values())

  def add(self, moved: Arrays, tasks: Mapping[int, int]) -> None:
    before = self.moved
    self.moved = {x: before[x] + y if before else y for x, y in moved.items()}
    self.tasks |= tasks


WAIT, DONE = "wait", "done"


class Merger:
  """What Syncer and Rounds share: who takes part, and what was merged.

  Attributes:
    outer: the outer parameters.
    note: called with each event, a JSON object.
  """

  def __init__(
    self,
    outer: OuterParameters,
    state: Mapping[str, Any] | None,
    note: Callable[[dict[str, Any]], None],
  ):
    """Begins or, with the `state` of a checkpoint, continues a run."""
    state = state or {}
    self.outer, self.note = outer, note
    self._num_learners: int = state.get("learners", 0)
    self._num_works: int = state.get("works", 0)
    self._learners: dict[str, Any] = {}
    # By member: the number of the last merge with its work, and all tokens.
    self._merged: dict[str, tuple[int, int]] = {}

  @property
  def members(self) -> list[str]:
    """The members that take part now."""
    return list(self._learners)

  def has(self, member: str) -> bool:
    """Returns whether a member takes part."""
    return member in self._learners

  @property
  def state(self) -> dict[str, Any]:
    """What a checkpoint needs of this object besides the outer parameters."""
    return {
      "learners": self._num_learners,
      "works": self._num_works,
      "merges": self.outer.num_merges,
    }

  @property
  def undone(self) -> int | None:
    """Round to which the run goes back (see Rounds); None in a Syncer."""
    return None

  def figures(self) -> dict[str, tuple[int, int, int]]:
    """Returns {member: (last merge with its work, merges since, tokens)}."""
    now = self.outer.num_merges
    return {x: (last, now - last, y) for x, (last, y) in self._merged.items()}

  def leave(self, member: str) -> Any:
    """Drops a learner, if it takes part; others do its task again."""
    if learner := self._learners.pop(member, None):
      self.note({"event": "leave", "learner": learner.number})
    return learner

  def _find(self, member: str) -> Any:
    if member not in self._learners:
      raise UserError(f"{member}: does not take part, or was too slow; join.")
    return self._learners[member]

  def _credit(self, member: str, tokens: int) -> None:
    """Notes that a merge has work of a member."""
    _, before = self._merged.get(member, (0, 0))
    self._merged[member] = self.outer.num_merges, before + tokens


class Syncer(Merger):
  """Merges a fragment once enough learners have sent it."""

  def __init__(
    self,
    outer: OuterParameters,
    *,
    num_tasks: int,
    quorum: int,
    grace_secs: float | None,
    lost_secs: float,
    overlaps: bool = False,
    state: Mapping[str, Any] | None = None,
    note: Callable[[dict[str, Any]], None] = lambda event: None,
  ):
    """Begins or continues a run.

    Args:
      num_tasks: number of tasks of the run.
      quorum: number of learners that have to send a fragment before a merge.
      grace_secs: how long a merge waits for more than the quorum; None for half
        the median, over learners, of the time of each one's slowest task.
      lost_secs: a learner that is silent for longer may be lost (`_is_lost`).
      overlaps: whether a learner gets a task before its last result is
        merged.
    """
    super().__init__(outer, state, note)
    self._num_tasks, self._quorum = num_tasks, quorum
    self._grace_secs, self._lost_secs = grace_secs, lost_secs
    self._ahead = int(overlaps)
    if state:
      note({"event": "resume", "merges": outer.num_merges})
    state = state or {}
    self._next_task: int = state.get("next_task", 0)
    self._again: list[int] = list(state.get("again", ()))
    # {learner's number: its part}, for each fragment.
    self._pools: list[dict[int, _Part]] = [{} for _ in outer.fragments]
    self._quorum_at: list[float | None] = [None] * len(outer.fragments)

  @property
  def state(self) -> dict[str, Any]:
    """The state of Merger, and the tasks that a resumed run repeats."""
    again = sorted({*self._again, *self._pending()})
    return {**super().state, "next_task": self._next_task, "again": again}

  @property
  def num_done(self) -> int:
    """Number of tasks that are part of the outer parameters."""
    return self._next_task - len({*self._again, *self._pending()})

  @property
  def is_done(self) -> bool:
    """Whether all tasks of the run are merged in all fragments."""
    return self.num_done == self._num_tasks

  @property
  def lack(self) -> str:
    """Why no fragment can be merged, in one line for the log; or ""."""
    if (count := len(self._learners)) >= self._quorum:
      return ""
    return (
      f"{count} learners take part, and a merge needs {self._quorum} (QUORUM)"
    )

  def join(self, member: str, now: float, **about: Any) -> int:
    """Takes a learner, perhaps again; returns its number.

    `about` goes into the event for the record.
    """
    self.leave(member)
    count, turn = len(self.outer.fragments), self.outer.num_merges
    # A late learner begins with the fragment of the next turn, because the
    # others end this turn before it ends its first task.
    first = turn + any(x.last is not None for x in self._learners.values())
    number = self._num_learners
    self._num_learners += 1
    self.note({"event": "join", "learner": number, "member": member, **about})
    self._learners[member] = _Learner(
      number=number,
      order=[(first + i) % count for i in range(count)],
      turn=turn,
      heard=now,
      versions=[-1] * count,
      since=[{} for _ in range(count)],
    )
    return number

  def leave(self, member: str) -> _Learner | None:
    """Drops a learner, as Merger does, and repeats its task."""
    learner: _Learner | None = super().leave(member)
    if learner and learner.work and learner.work.task is not None:
      self._again.append(learner.work.task)
    return learner

  def next(self, member: str, now: float) -> Work | str:
    """Returns a learner's next work, or WAIT or DONE."""
    learner = self._find(member)
    learner.heard = now
    sends: tuple[int, ...] = (learner.order[0],)
    if learner.work:  # it asks again, because the answer was lost
      task, sends = learner.work.task, learner.work.sends
    elif self.is_done:
      return DONE
    elif self._must_wait(learner):
      learner.waits = True
      return WAIT
    elif self._again:
      task = self._again.pop(0)
    elif self._next_task < self._num_tasks:
      task = self._next_task
      self._next_task += 1
    elif learner.unsent:
      task, sends = None, learner.unsent
    else:  # a task of another learner may have to be repeated
      learner.waits = True
      return WAIT
    versions = list(self.outer.versions)
    work = Work(
      number=self._num_works,
      learner=learner.number,
      task=task,
      sends=sends,
      takes=tuple(
        i for i, x in enumerate(versions) if learner.versions[i] != x
      ),
      begins=learner.last is None,
    )
    self.note({"event": "work", **dataclasses.asdict(work)})
    self._num_works += 1
    learner.work, learner.given, learner.waits = work, (now, versions), False
    return work

  def find_work(self, member: str, number: object) -> Work:
    """Returns the work whose result a learner sends; UserError if stale."""
    learner: _Learner = self._find(member)
    for work in (learner.work, learner.last):
      if work and work.number == number:
        return work
    now = f", but that of work {learner.work.number}" if learner.work else ""
    raise UserError(
      f"{member}: the result of work {number!r:.50} is stale: it is not "
      f"expected of this learner{now}; ask for the next work."
    )

  def contribute(
    self, member: str, number: object, moved: Arrays, tokens: int, now: float
  ) -> None:
    """Takes the result of a work: how far the fragments of `sends` moved.

    `tokens` is the number of tokens of the work's rows that have a loss.

    Raises UserError if the result is stale or not finite. A learner whose
    result is not finite is dropped, and has to join again.
    """
    work, learner = self.find_work(member, number), self._learners[member]
    learner.heard = now
    if work is learner.last:
      return  # it sends the result again, because the answer was lost
    for name, value in moved.items():
      if not np.isfinite(value).all():
        self.leave(member)
        raise UserError(
          f"{member}: {name} of work {number} is not finite; the learner has "
          "to join again, from the outer parameters."
        )
    about = {"learner": learner.number, "work": work.number, "tokens": tokens}
    self.note({"event": "contribution", **about})
    given, learner.versions = learner.given
    learner.work, learner.last = None, work
    learner.turn = max(learner.turn, self.outer.num_merges) + 1
    if work.task is not None:
      learner.slowest = max(learner.slowest or 0.0, now - given)
      learner.order.append(learner.order.pop(0))
      for tasks in learner.since:
        tasks[work.task] = tokens
    for fragment in work.sends:
      pool = self._pools[fragment]
      part = pool.setdefault(learner.number, _Part(member))
      names = self.outer.fragments[fragment]
      part.add({x: moved[x] for x in names}, learner.since[fragment])
      learner.since[fragment] = {}
      if len(pool) >= self._quorum and self._quorum_at[fragment] is None:
        self._quorum_at[fragment] = now

  def tick(self, now: float) -> list[dict[str, Any]]:
    """Drops silent learners, and merges what is due; returns the merges."""
    for member in [
      x for x, y in self._learners.items() if self._is_lost(y, now)
    ]:
      self.leave(member)
    return [
      self._merge(i) for i in range(len(self._pools)) if self._is_due(i, now)
    ]

  def repeat(self, event: Mapping[str, Any], moved: Arrays) -> str | None:
    """Does what an event of a record says.

    `moved` is the result of the work, if the event is a contribution. Returns
    the hash of a merge; for other events None.
    """
    members = {x.number: member for member, x in self._learners.items()}
    match event["event"]:
      case "resume":
        self._learners.clear()
        self._pools = [{} for _ in self._pools]
      case "join":
        self.join(event["member"], 0.0)
      case "leave":
        self.leave(members[event["learner"]])
      case "work":
        learner = self._learners[members[event["learner"]]]
        learner.work = Work.of(event)
        learner.given = 0.0, list(self.outer.versions)
      case "contribution":
        member = members[event["learner"]]
        self.contribute(member, event["work"], moved, event["tokens"], 0.0)
      case "merge":
        return str(self._merge(event["fragment"])["blake2b"])
    return None

  def _pending(self) -> set[int]:
    """Returns the tasks that are under way, or not merged in all fragments."""
    learners = self._learners.values()
    works = (x.work.task for x in learners if x.work)
    parts = (x.tasks for pool in self._pools for x in pool.values())
    tasks = itertools.chain(
      works, *parts, *(y for x in learners for y in x.since)
    )
    return {x for x in tasks if x is not None}

  def _must_wait(self, learner: _Learner) -> bool:
    if learner.turn <= self.outer.num_merges + self._ahead:
      return False
    # If learners have sent different fragments, all could wait for each other
    # forever; then none has to wait. But with fewer learners than the quorum,
    # all wait, because nothing can be merged.
    all_wait = all(x.waits for x in self._learners.values() if x is not learner)
    is_due = any(x is not None for x in self._quorum_at)
    return not all_wait or is_due or bool(self.lack)

  def _is_lost(self, learner: _Learner, now: float) -> bool:
    patience, slowest = self._lost_secs, learner.slowest
    if slowest is None:  # it builds its program, or compiles it
      patience *= _SLOW_FACTOR
    elif learner.work:
      patience += _SLOW_TASKS * slowest
    return now - learner.heard > patience

  def _grace(self) -> float:
    """Returns how many seconds a merge waits after the quorum."""
    if self._grace_secs is not None:
      return self._grace_secs
    slowest = [x.slowest for x in self._learners.values() if x.slowest]
    return float(np.median(slowest)) / 2 if slowest else 0.0

  def _is_due(self, fragment: int, now: float) -> bool:
    pool, since = self._pools[fragment], self._quorum_at[fragment]
    if not pool:
      return False
    if since is not None and now >= since + self._grace():
      return True
    # Otherwise merge if no other learner will still send the fragment.
    left = {
      x.number
      for x in self._learners.values()
      if x.work or (x.unsent and self._ends) or not self._ends
    } - {*pool}
    return not left and (since is not None or self._ends)

  @property
  def _ends(self) -> bool:
    """Whether no task is left to give."""
    return self._next_task == self._num_tasks and not self._again

  def _merge(self, fragment: int) -> dict[str, Any]:
    pool, self._pools[fragment] = self._pools[fragment], {}
    self._quorum_at[fragment] = None
    parts = [pool[x] for x in sorted(pool)]
    event = {"event": "merge", "fragment": fragment, "learners": sorted(pool)}
    digest = self.outer.merge(fragment, [(x.moved, x.tokens) for x in parts])
    event |= {"merge": self.outer.num_merges, "blake2b": digest}
    self.note(event)
    for part in parts:  # each fragment has the tokens of all tasks
      self._credit(part.member, 0 if fragment else part.tokens)
    return event
