# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process of a learner: takes work from a run, and sends results.

The learner gives the run only CPU time and memory: of what the run sends, it
uses only numbers and names of known settings.
"""

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.accounting.plan import tensor_bytes
from palm_mtf.accounting.work import Work
from palm_mtf.architecture.parameters import check_frozen, saved_shapes
from palm_mtf.config.mesh_layout import check_layout
from palm_mtf.errors import UserError
from palm_mtf.learners.client import LearnerClient, NoRunError
from palm_mtf.learners.decoupled import DecoupledLearner, Joined
from palm_mtf.learners.protocol import at_most, read_program, reading
from palm_mtf.machine.processors import kernels_here, thread_count
from palm_mtf.native.operations import operations_built_with
from palm_mtf.runtime.manager.slices import WRONG_JSON

_logger = logging.getLogger(__name__)

_MOST_WAIT_SECS = 60.0
# Float32 copies of the parameters besides what a step needs: the outer
# parameters, the parameters when they were last sent, and the message.
_COPIES = 3


def describe_kernels() -> dict[str, str]:
  """Returns all that decides how this process's CPUs round."""
  threads = str(thread_count(os.environ))
  return {**kernels_here(operations_built_with()), "threads": threads}


def _check(joined: Joined, mesh: Mapping[str, Any], most_bytes: float) -> None:
  """Raises UserError if the program is wrong, or the model too large."""
  program = read_program({**joined.program, **mesh})
  layout, rows = program.mesh_layout, joined.num_rows
  shapes = saved_shapes(program.model)
  check_frozen(shapes, joined.frozen)
  check_layout(layout, program.model, rows, num_pods=1)
  work = Work(
    model=program.model,
    mesh=layout,
    optimizer=program.optimizer,
    pods=program.pods,
    rows=rows,
    frozen=tuple(joined.frozen),
    exchange=program.exchange,
  )
  size = _COPIES * 4 * sum(map(math.prod, shapes.values()))
  for stage in range(0 if layout.tpu else layout.stages):
    of_device = tensor_bytes(work.in_stage(stage)).values()
    size += layout.num_devices * sum(of_device)
  if size > most_bytes:
    raise UserError(
      f"the run's step needs about {size / 1e9:,.1f} GB, and --most_gb "
      f"allows {most_bytes / 1e9:,.1f}; give more, or join another run."
    )


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
    most_bytes: limit of this host's memory for a step's tensors, as `palm_mtf
      plan` counts them; and of a message.

  Raises UserError if the run refuses the learner, does not answer, or sends an
  invalid message.
  """

  header = {**header, "mesh": {**mesh}}

  def join() -> tuple[Joined, object]:
    about = client.join(header)
    with reading("the run's answer is not one of palm_mtf"):
      number = about.pop("learner")
      joined = Joined(**about)
      _check(joined, mesh, most_bytes)
    return joined, number

  joined, number = join()
  while True:
    before = joined
    with joined.open(mesh) as learner:
      # If the run has lost this learner, it joins again with the same programs.
      while joined == before:
        _logger.info("joined the run; waiting for work")
        if _do_works(client, number, learner, most_bytes):
          return
        joined, number = join()


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
