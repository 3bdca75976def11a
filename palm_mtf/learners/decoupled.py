# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The messages of decoupled learners and of the client that merges their work.

The client's answer to `join` is a `Joined`, with the number of the "learner".
The header of a work (`Work` in syncer.py) is {"kind": "steps", "work": its
number, "step": the first step, "share": which rows of each step's batch it has,
"num_steps", "begins", "sends"}; its arrays are "rows/FEATURE", [num_steps,
rows, length], and "outer/PARAMETER". The result has how far the parameters of
the fragments in "sends" have moved.
"""

import contextlib
import dataclasses
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from palm_mtf.architecture.parameters import frozen_names, saved_shapes
from palm_mtf.config import Config, ModelConfig
from palm_mtf.config.checked import Checked, texts, whole
from palm_mtf.data.batches.corpus import Batches
from palm_mtf.errors import UserError, check_choice
from palm_mtf.learners.learner import Learner, open_learner
from palm_mtf.learners.protocol import Message, Spec, program_of, read_program
from palm_mtf.learners.rounds import AUDITOR, Rounds
from palm_mtf.learners.syncer import DONE, WAIT, Arrays, Syncer, Work
from palm_mtf.optim.outer import GROUP, Sent, decode, encode
from palm_mtf.programs.features import FEATURE_DTYPES
from palm_mtf.programs.outer import fragment_of
from palm_mtf.training.step import NonFiniteStepError

_WAIT_SECS = 0.5
_SCALES = "/scales"
# {OUTER_DTYPE: dtype on the wire, and elements per item of the array}
_WIRE = {
  "float32": ("float32", 1),
  "bfloat16": ("uint16", 1),  # its bits
  "int8": ("int8", 1),
  "e3m0": ("uint8", 2),
}
# Names of metrics that a learner may report. The client measures the others.
_METRIC = re.compile(
  r"(?!validation_|unigram_|step$|(tokens|lag|last_sync)/)"
  r"[a-z0-9_]{1,40}(/[a-z0-9_]{1,40})?"
)
_MOST_METRICS, _LARGEST_METRIC = 100, 1e30


def list_fragments(
  model: ModelConfig, frozen: Sequence[str], count: int
) -> list[list[str]]:
  """Returns the names of the trained parameters of each of `count` fragments.

  `frozen` is FROZEN, patterns of parameters that are not trained.
  """
  names = saved_shapes(model)
  trained = [x for x in names if x not in frozen_names(names, frozen)]
  return [
    [x for x in trained if fragment_of(x, count) == i] for i in range(count)
  ]


def read_metrics(given: object) -> dict[str, float]:
  """Returns the metrics of a result; what cannot be one is left out."""
  pairs = [*given.items()][:_MOST_METRICS] if isinstance(given, dict) else []
  return {
    name: float(x)
    for name, x in pairs
    # A text such as "nan" would become a number that is not finite.
    if type(x) in (int, float)
    and abs(x) < _LARGEST_METRIC
    and _METRIC.fullmatch(name)
  }


def specs_of_sent(
  shapes: Mapping[str, Sequence[int]], dtype: str
) -> dict[str, Spec]:
  """Returns the arrays that `pack` makes of parameters with these shapes."""
  wire, per_item = _WIRE[dtype]
  specs: dict[str, Spec] = {}
  for name, shape in shapes.items():
    if dtype in ("float32", "bfloat16"):
      specs[name] = wire, tuple(shape)
      continue
    groups = -(-math.prod(shape) // GROUP)
    specs[name] = wire, (groups, GROUP // per_item)
    specs[name + _SCALES] = "float32", (groups, 1)
  return specs


def pack(moved: Arrays, dtype: str) -> dict[str, np.ndarray]:
  """Returns arrays that hold `moved` in OUTER_DTYPE `dtype`."""
  packed: dict[str, np.ndarray] = {}
  for name, value in moved.items():
    codes, scales = encode(np.zeros_like(value), value, dtype)
    bits = codes.view(np.uint16) if dtype == "bfloat16" else codes
    packed |= {name: bits} | (
      {} if scales is None else {name + _SCALES: scales}
    )
  return packed


def unpack(
  packed: Arrays, shapes: Mapping[str, Sequence[int]], dtype: str
) -> dict[str, np.ndarray]:
  """Returns what was packed, float32, rounded to `dtype`."""
  found = {}
  for name, shape in shapes.items():
    codes = packed[name]
    if dtype == "bfloat16":  # the upper half of a float32
      codes = (codes.astype(np.uint32) << 16).view(np.float32)
    sent = Sent(codes, packed.get(name + _SCALES))
    found[name] = decode(np.zeros(shape, np.float32), sent, dtype)
  return found


def _check_features(unused_name: str, value: object) -> None:
  for each in value if isinstance(value, list) else [value]:
    check_choice("feature", each, FEATURE_DTYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined(Checked):
  """What a learner needs to train.

  Attributes:
    program: {macro: value} of the step (`program_of`).
    seed: SEED.
    frozen: FROZEN, patterns of parameters that are not trained.
    features: names of the arrays of a batch.
    num_rows: rows of a share of a step's batch.
    fragments, outer_dtype: FRAGMENTS and OUTER_DTYPE.
  """

  program: Mapping[str, Any]
  seed: Annotated[int, whole(0)]
  frozen: Annotated[list[str], texts("patterns")]
  features: Annotated[list[str], _check_features]
  num_rows: Annotated[int, whole(maximum=2**16)]
  fragments: Annotated[int, whole(maximum=1000)]
  outer_dtype: Literal["float32", "bfloat16", "int8", "e3m0"]

  @contextlib.contextmanager
  def open(self, mesh: Mapping[str, Any]) -> Iterator["DecoupledLearner"]:
    """Opens a learner in this process; `mesh` has macros of its mesh."""
    program = read_program({**self.program, **mesh})
    with open_learner(
      program,
      num_rows=self.num_rows,
      seed=self.seed,
      frozen=self.frozen,
      features=self.features,
    ) as learner:
      fragments = list_fragments(program.model, self.frozen, self.fragments)
      yield DecoupledLearner(learner, fragments, self.outer_dtype)


class DecoupledLearner:
  """Does the works of a run; optimizer slots stay from work to work."""

  def __init__(
    self, learner: Learner, fragments: Sequence[Sequence[str]], outer_dtype: str
  ):
    self._learner, self._fragments = learner, fragments
    self._outer_dtype = outer_dtype
    # Values from which the learner counts how far its parameters have moved.
    self._sent: dict[str, np.ndarray] = {}

  def do(self, work: Message) -> Message:
    """Trains; returns the result. Raises UserError if training diverges."""
    header, arrays = work
    named = (x.partition("/")[::2] for x in arrays)
    by_kind: dict[str, dict[str, np.ndarray]] = {"rows": {}, "outer": {}}
    for kind, name in named:
      by_kind[kind][name] = arrays[f"{kind}/{name}"]
    self._take(by_kind["outer"], begins=header["begins"])
    rows = by_kind["rows"]
    if any(len(x) != header["num_steps"] for x in rows.values()):
      raise ValueError("rows of other steps")
    num_steps = header["num_steps"] if rows else 0
    batches = [{x: y[i] for x, y in rows.items()} for i in range(num_steps)]
    metrics = {}
    try:
      if batches:
        given = header["step"], header["share"]
        metrics = self._learner.train(batches, *given)
    except NonFiniteStepError as bad:
      raise UserError(
        f"{bad.losses} at step {bad.step}: training has diverged; lower "
        "LEARNING_RATE or OUTER_LR of the run."
      ) from None
    names = [x for i in header["sends"] for x in self._fragments[i]]
    local = self._learner.arrays.read(names)
    moved = {x: y - self._sent[x] for x, y in local.items()}
    self._sent |= local
    result = {"work": header["work"], "metrics": metrics}
    return Message(result, pack(moved, self._outer_dtype))

  def _take(self, outer: Arrays, *, begins: bool) -> None:
    """Takes outer parameters, and keeps the steps since they were sent."""
    if begins:
      self._learner.begin(outer)
    elif outer:
      local = self._learner.arrays.read(outer)
      # Add the difference: 0, and so exactly `outer`, without further steps.
      kept = {x: y + (local[x] - self._sent[x]) for x, y in outer.items()}
      self._learner.arrays.set(kept)
    self._sent |= outer


class DecoupledHandler:
  """Answers decoupled learners, of which several may call at once.

  A `member` is the name of a learner's token. A learner gets the message of
  any UserError.

  Attributes:
    changed: lock of `syncer`; it is notified when a result has arrived.
    joined: what every learner gets.
    failure: the error that ended the client's own learner, if any.
  """

  def __init__(
    self,
    config: Config,
    batches: Batches,
    syncer: Syncer | Rounds,
    now: Callable[[], float] = time.monotonic,
  ):
    self._batches, self._now = batches, now
    self.syncer, self.changed = syncer, threading.Condition()
    self.failure: BaseException | None = None
    self._period = config.exchange.period
    self._num_shares = config.pods.num_pods
    self.joined = Joined(
      program=program_of(config),
      seed=config.run.seed,
      frozen=list(config.run.frozen),
      features=list(batches.features),
      num_rows=config.run.batch_sizes.size(0) // self._num_shares,
      fragments=config.exchange.fragments,
      outer_dtype=config.exchange.outer_dtype,
    )
    self._numbers: dict[str, int] = {}  # {member: number of its learner}
    self._tokens: dict[str, int] = {}  # {member: tokens of its work}
    self._metrics: list[tuple[int, dict[str, float]]] = []
    self._num_bytes = 0

  def join(self, member: str, header: dict[str, Any]) -> Message:
    """Takes a learner, perhaps again; returns what it needs to train.

    `header` has its "kernels" (`describe_kernels`), and the "mesh" that it
    uses in place of the run's.
    """
    about = {x: header.get(x) for x in ("kernels", "mesh")}
    with self.changed:
      number = self.syncer.join(member, self._now(), **about)
      self._numbers[member] = number
    return Message({"learner": number, **dataclasses.asdict(self.joined)})

  def next(self, member: str, header: dict[str, Any]) -> Message:
    """Returns work, with its rows and the outer parameters that changed.

    The "kind" of the answer is "steps"; "wait", for "secs"; "join", again; or
    "done".
    """
    with self.changed:
      self._tick()
      number = self._numbers.get(member)
      if number is not None and number != header.get("learner"):
        raise UserError(
          f"{member}: another process has joined with this token, so this one "
          "ends; give each process a token, which `palm_mtf pods token` makes."
        )
      if not self.syncer.has(member):
        return Message({"kind": "join"})
      work = self.syncer.next(member, self._now())
      if work == DONE:
        self.syncer.leave(member)
      outer = dict(self.syncer.outer.parameters)  # a merge makes new arrays
    if isinstance(work, str):
      secs = {"secs": _WAIT_SECS} if work == WAIT else {}
      return Message({"kind": WAIT if work == WAIT else DONE, **secs})
    message = self.make_message(work, outer)
    weights = message.arrays.get("rows/loss_weights")
    targets = message.arrays.get("rows/targets", np.zeros(0))
    tokens = targets.size if weights is None else np.count_nonzero(weights)
    self._tokens[member] = max(1, int(tokens)) if work.task is not None else 0
    if member != AUDITOR:
      self._num_bytes += sum(x.nbytes for x in message.arrays.values())
    return message

  def _tick(self) -> None:
    # Merge now: the client's loop, which also merges, may be busy with saving.
    if self.syncer.undone is None:  # else the loop removes lies first
      self.syncer.tick(self._now())

  def make_message(self, work: Work, outer: Arrays) -> Message:
    """Returns the message of a work; `outer` are all outer parameters."""
    step = share = num_steps = 0
    arrays = {}
    if work.task is not None:
      turn, share = divmod(work.task, self._num_shares)
      num_steps = self._period
      step = turn * num_steps
      batches = [
        self._batches.batch(step + i, share, self._num_shares)
        for i in range(num_steps)
      ]
      arrays = {
        f"rows/{x}": np.stack([batch[x] for batch in batches])
        for x in self.joined.features
      }
    names = [x for i in work.takes for x in self.syncer.outer.fragments[i]]
    if work.begins:  # all parameters, frozen ones, too
      names = list(outer)
    arrays |= {f"outer/{x}": outer[x] for x in names}
    return Message(
      {
        "kind": "steps",
        "work": work.number,
        "step": step,
        "share": share,
        "num_steps": num_steps,
        "begins": work.begins,
        "sends": list(work.sends),
      },
      arrays,
    )

  def expect(self, member: str, header: dict[str, Any]) -> Mapping[str, Spec]:
    """Returns the arrays of a result; UserError if its work is stale."""
    with self.changed:
      work = self.syncer.find_work(member, header.get("work"))
    return specs_of_sent(self._shapes(work), self.joined.outer_dtype)

  def contribute(self, member: str, message: Message) -> Message:
    """Takes a result; UserError if it is stale or not finite.

    The answer is {"accepted": True, "reason": ""}.
    """
    header, arrays = message
    number, tokens = header.get("work"), self._tokens.get(member, 0)
    with self.changed:
      work = self.syncer.find_work(member, number)
    moved = self.unpack(work, arrays)
    with self.changed:
      self.syncer.contribute(member, number, moved, tokens, self._now())
      self._tick()
      if member != AUDITOR:
        self._metrics.append((tokens, read_metrics(header.get("metrics"))))
        self._num_bytes += sum(x.nbytes for x in arrays.values())
      self.changed.notify_all()
    return Message({"accepted": True, "reason": ""})

  def unpack(self, work: Work, arrays: Arrays) -> dict[str, np.ndarray]:
    """Returns how far parameters moved, from the arrays of a work's result."""
    return unpack(arrays, self._shapes(work), self.joined.outer_dtype)

  def _shapes(self, work: Work) -> dict[str, tuple[int, ...]]:
    outer = self.syncer.outer
    names = (x for i in work.sends for x in outer.fragments[i])
    return {x: outer.parameters[x].shape for x in names}

  def take_metrics(self) -> tuple[dict[str, float], int]:
    """Returns metrics and bytes in both directions since the last call.

    The metrics are means over results, weighted by their tokens.
    """
    found, self._metrics = [x for x in self._metrics if x[1]], []
    num_bytes, self._num_bytes = self._num_bytes, 0
    weights = [tokens for tokens, _ in found]
    # Volunteers may report different metrics; take those that all report.
    names = set.intersection(*({*x} for _, x in found)) if found else set()
    means = {
      name: float(np.average([x[name] for _, x in found], weights=weights))
      for name in names
    }
    return means, num_bytes
