# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A process of validate_plan.py: trains a configuration, a step a turn."""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterator

from palm_mtf.config import PlanConfig
from palm_mtf.machine.compiled_code import keep_compiled_code
from palm_mtf.machine.host_memory import largest_resident_bytes
from palm_mtf.machine.process import own_process
from tools.bench.models import random_tokens
from tools.bench.pairs import processor_secs
from tools.peers.turns import take_turns

_WARM_UP_STEPS = 2
_POD = re.compile(r"/job:(pod_\d+)/")


def work(config: PlanConfig) -> None:
  """Trains, a step for each line of stdin.

  A turn reports the seconds of the step where nothing else runs, the slowdown
  now, and the most resident bytes that a process with devices has had.
  """
  keep_compiled_code()
  own_process()
  from palm_mtf._tf import tf
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.rates.calibration import PRODUCT_FLOPS, pace, undisturbed_secs
  from palm_mtf.training.step import TrainStep
  from tools.traffic import traffic

  (batch_size,) = config.run.batch_sizes.sizes
  tokens = random_tokens(config.model, batch_size).astype("int32")
  batch = {"inputs": tokens, "targets": tokens}
  with _cluster(config) as cluster, tf.Graph().as_default():
    program = build_train_program(
      config.model,
      config.mesh_layout,
      config.optimizer,
      batch_size=batch_size,
      seed=0,
      pods=config.pods,
      devices=cluster.devices,
    )
    calls = [[program.update, *program.metrics.values()]]
    calls += [[pod.accumulate for pod in program.pods]] * (
      program.num_microbatches - 1
    )
    moved = sum(traffic(x).total() + _between_pods(x) for x in calls)
    with cluster.session() as session, contextlib.ExitStack() as stack:
      session.run(program.initialize)
      run, steps = TrainStep(session, program).run, itertools.count()
      for _ in range(_WARM_UP_STEPS):
        run(batch, next(steps))
      machine = stack.enter_context(pace(tf.float32))
      best_secs = PRODUCT_FLOPS / config.hardware.chip_float32_flops

      def turn() -> dict[str, float]:
        before = processor_secs(os.getpid())
        timed = machine.time_call(lambda: run(batch, next(steps)))
        _, *servers = processor_secs(os.getpid()).items()
        # A server with one core takes its processor time where nothing else
        # runs; products on all cores say less of it.
        secs = max((now - before[x] for x, now in servers), default=None)
        return {
          "step_secs": secs or undisturbed_secs(*timed, best_secs),
          "slowdown": timed[1] / best_secs,
          "peak_bytes": _peak_bytes(),
        }

      take_turns(turn, {"moved": moved})


@contextlib.contextmanager
def _cluster(config: PlanConfig) -> Iterator:
  """Yields devices of the client or of servers of their own."""
  from palm_mtf.cluster.client.connect import connect
  from palm_mtf.cluster.client.local_servers import PodServers
  from palm_mtf.cluster.server_info import read_info

  pods, mesh = config.pods, config.mesh_layout
  with PodServers(pods, mesh) as servers:
    places = servers.places()  # none for pods in process
    addresses = {place.address for pod in places for place in pod}
    infos = {x: read_info(x, pods.pod_timeout_secs) for x in addresses}
    yield connect(pods, mesh, places, infos)


def _between_pods(fetches: list) -> int:
  """Returns the bytes that servers of pods send each other."""
  from tools.traffic import needed

  sent = {}
  for op in needed(fetches):
    end = _POD.findall(op.device)
    for x in op.inputs:
      begin = _POD.findall(x.op.device)
      if begin and end and begin != end:
        sent[x.name, op.device] = x.dtype.size * math.prod(x.shape.as_list())
  return sum(sent.values())


def _peak_bytes() -> int:
  """Returns the largest resident bytes of this process, or of a server."""
  own, *servers = map(largest_resident_bytes, processor_secs(os.getpid()))
  return max(servers, default=own)
