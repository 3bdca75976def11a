# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process of a learner: takes work from a run, and sends results.

The learner gives the run only CPU time and memory: of what the run sends, it
uses only numbers and names of known settings.
"""

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import check_frozen, saved_shapes
from palm_mtf.config import ExchangeConfig, StepConfig
from palm_mtf.errors import UserError, are_texts, check_choice, check_count
from palm_mtf.learners.client import LearnerClient, NoRunError
from palm_mtf.learners.decoupled import DecoupledLearner, list_fragments
from palm_mtf.learners.learner import open_learner
from palm_mtf.learners.protocol import at_most, read_program
from palm_mtf.machine.processors import kernels_here, thread_count
from palm_mtf.native.operations import operations_built_with
from palm_mtf.programs.features import FEATURE_DTYPES
from palm_mtf.runtime.manager.slices import WRONG_JSON

_logger = logging.getLogger(__name__)

_MOST_ROWS, _MOST_FRAGMENTS, _MOST_WAIT_SECS = 2**16, 1000, 60.0
# Float32 parameters, gradients, two slots, and the copy that is sent.
_BYTES_PER_PARAMETER = 20


def describe_kernels() -> dict[str, str]:
  """Returns all that decides how this process's CPUs round."""
  threads = str(thread_count(os.environ))
  return {**kernels_here(operations_built_with()), "threads": threads}


@dataclasses.dataclass(frozen=True)
class _Task:
  """What a run answers to `join`, after it was checked."""

  program: StepConfig
  seed: int
  num_rows: int
  frozen: list[str]
  features: list[str]
  exchange: ExchangeConfig

  @classmethod
  def read(
    cls,
    given: Mapping[str, Any],
    mesh: Mapping[str, Any],
    most_bytes: float,
  ) -> "_Task":
    """Raises UserError if a value is wrong, or the model too large."""
    try:
      count = given["fragments"]
      check_count("fragments", count, maximum=_MOST_FRAGMENTS)
      found = cls(
        program=read_program({**given["program"], **mesh}),
        seed=given["seed"],
        num_rows=given["num_rows"],
        frozen=given["frozen"],
        features=given["features"],
        exchange=ExchangeConfig(
          exchange="diloco",
          outer_steps=count,
          fragments=count,
          outer_dtype=given["outer_dtype"],
        ),
      )
      check_count("seed", found.seed, minimum=0)
      check_count("num_rows", found.num_rows, maximum=_MOST_ROWS)
      for feature in found.features:
        check_choice("feature", feature, FEATURE_DTYPES)
      shapes = saved_shapes(found.program.model)
      if found.frozen and not are_texts(found.frozen):
        raise TypeError(found.frozen)
      check_frozen(shapes, found.frozen)
    except UserError:
      raise
    except WRONG_JSON:
      raise UserError("the run's answer is not one of palm_mtf.") from None
    size = _BYTES_PER_PARAMETER * sum(map(math.prod, shapes.values()))
    if size > most_bytes:
      raise UserError(
        f"the run's model needs about {size / 1e9:,.1f} GB, and --most_gb "
        f"allows {most_bytes / 1e9:,.1f}; give more, or join another run."
      )
    return found

  @contextlib.contextmanager
  def open(self) -> Iterator[DecoupledLearner]:
    """Builds the step."""
    with open_learner(
      self.program,
      num_rows=self.num_rows,
      seed=self.seed,
      frozen=self.frozen,
      features=self.features,
    ) as learner:
      count = self.exchange.fragments
      fragments = list_fragments(self.program.model, self.frozen, count)
      yield DecoupledLearner(learner, fragments, self.exchange.outer_dtype)


def take_part(
  client: LearnerClient,
  header: Mapping[str, Any],
  mesh: Mapping[str, Any],
  most_bytes: float = math.inf,
) -> None:
  """Trains for a run until it ends; joins again whenever the run says so.

  Args:
    client: the connection to the run.
    header: what `join` sends ("kernels").
    mesh: {macro: value} of this learner's own mesh, in place of the run's.
    most_bytes: limit of the memory for parameters, and of a message.

  Raises UserError if the run refuses the learner, does not answer, or sends an
  invalid message.
  """

  def join() -> dict[str, Any]:
    return client.join({**header, "mesh": {**mesh}})

  about: dict[str, Any] | None = join()
  while about:
    task = _Task.read(about, mesh, most_bytes)
    with task.open() as learner:
      # If the run has lost this learner, it joins again with the same programs.
      while about and _Task.read(about, mesh, most_bytes) == task:
        _logger.info("joined the run; waiting for work")
        number = about.get("learner")
        is_done = _do_works(client, number, learner, most_bytes)
        about = None if is_done else join()


def _do_works(
  client: LearnerClient,
  number: object,
  learner: DecoupledLearner,
  most_bytes: float,
) -> bool:
  """Does works until the run ends; returns False if a new `join` is needed."""
  while True:
    work = client.next({"learner": number}, at_most(most_bytes))
    kind, secs = work.header.get("kind"), work.header.get("secs")
    if kind in ("done", "join"):
      return bool(kind == "done")
    if kind == "wait" and isinstance(secs, int | float):
      time.sleep(min(max(0.0, secs), _MOST_WAIT_SECS))
      continue
    try:
      result = learner.do(work)
    except UserError:  # training has diverged
      raise
    except (tf.errors.InvalidArgumentError, *WRONG_JSON) as error:
      raise UserError(
        f"the run has sent work that cannot be done ({error!s:.200})."
      ) from None
    try:
      client.contribute(result)
    except NoRunError:
      raise
    except UserError as error:  # such as a stale result
      _logger.warning(str(error))
