# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures what the runtime costs a run of one client (Pathways, Table 1).

python -m tools.bench runtime
python -m tools.bench runtime --steps 50 --json
"""

# Two kinds of call run the same programs in one process, in turns:
#
#   t5     a training step of the T5 of the case t5_pods, on a mesh of two
#          virtual devices: as a program of a client of palm_mtf.runtime, and by
#          session.run in a TensorFlow session on the same graph. Each session
#          has its own variables, so the losses show whether the numbers are the
#          same.
#   calls  a program that adds 1 to a number: by Client.call, and by the fastest
#          callable that TensorFlow makes. The difference is what a call costs.

import argparse
import os
import statistics
from collections.abc import Callable, Iterator

import numpy as np

from tools.bench.cases import t5_pods
from tools.bench.command import Flag, measure_apart
from tools.bench.pairs import Turn, measure_turn, ratio_fields, time_call

FLAGS = {
  "--steps": Flag(40, "timed training steps of each kind"),
  "--calls": Flag(3000, "timed calls of each kind"),
}
HEAD = "what    result"
_WARM_UP = 3
_STEP_SECS = 0.1  # a step's seconds, with which the cost of a call is compared


def _measure_steps(client, steps: int) -> dict:
  """Returns the speed of the runtime's steps, and whether losses are equal."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config

  step = t5_pods.build_step(client.programs, [client.devices])
  program, batch = step.program, t5_pods.make_batch()
  fetches = [program.metrics, program.update]
  with tf.Session(
    graph=client.programs.graph, config=session_config(len(client.devices))
  ) as plain:
    plain.run(program.initialize)

    def run_plain(number: int) -> float:
      feed = {x: batch[name] for name, x in program.pods[0].features.items()}
      feed |= {program.step: number, program.microbatch: 0}
      return float(plain.run(fetches, feed)[0]["loss"])

    kinds: dict[str, Callable[[int], float]] = {
      "runtime": lambda number: step.run(batch, number)["loss"],
      "session": run_plain,
    }
    losses: dict[str, list[float]] = {kind: [] for kind in kinds}
    turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}

    def take(kind: str, number: int) -> dict[str, float]:
      secs = time_call(lambda: losses[kind].append(kinds[kind](number)))
      return {"secs": secs}

    for number in range(_WARM_UP + steps):
      for kind in list(kinds)[:: 1 if number % 2 else -1]:
        turn = measure_turn(
          os.getpid(), lambda kind=kind, number=number: take(kind, number)
        )
        if number >= _WARM_UP:
          turns[kind].append(turn)
  return {
    "what": "t5",
    **{f"{x}_secs": statistics.median(y.secs for y in turns[x]) for x in kinds},
    "are_losses_equal": losses["runtime"] == losses["session"],
    "losses": [losses["runtime"][0], losses["runtime"][-1]],
    # The runtime's speed is the session's seconds divided by the runtime's.
    **ratio_fields(turns["session"], turns["runtime"]),
  }


def _measure_calls(client, calls: int) -> dict:
  """Returns the seconds of a call of each kind."""
  from palm_mtf._tf import config_pb2, tf
  from palm_mtf.mesh.session import session_config
  from palm_mtf.runtime.client.client import Client
  from palm_mtf.runtime.program import Program

  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [])
    y = x + 1
    with Client(tf.Session(config=session_config(1))) as alone:
      program = Program({"x": x}, {"y": y})
      options = config_pb2.CallableOptions(feed=[x.name], fetch=[y.name])
      bare = alone._session._make_callable_from_options(options)
      value = np.float32(1)
      kinds = {
        "client": lambda: alone.call(program, {"x": value}),
        "callable": lambda: bare(value),
      }
      secs = {kind: [] for kind in kinds}
      for _ in range(calls):
        for kind, call in kinds.items():
          secs[kind].append(time_call(call))
  found = {f"{x}_secs": statistics.median(secs[x]) for x in kinds}
  cost = found["client_secs"] - found["callable_secs"]
  return {"what": "calls", **found, "share_of_step": cost / _STEP_SECS}


def work(steps: int, calls: int) -> list[dict]:
  """Returns the records."""
  from palm_mtf import runtime

  with runtime.connect(devices=2) as client:
    return [_measure_steps(client, steps), _measure_calls(client, calls)]


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record of the training step, and one of calls."""
  yield from measure_apart("runtime", steps=chosen.steps, calls=chosen.calls)


def row(record: dict) -> str:
  """Returns a line of the table."""
  if record["what"] == "calls":
    client, bare = (1e6 * record[f"{x}_secs"] for x in ("client", "callable"))
    return (
      f"calls   {client:.0f} us by Client.call, {bare:.0f} us by a callable: "
      f"{record['share_of_step']:.2%} of a step of {_STEP_SECS} s"
    )
  same = "the same" if record["are_losses_equal"] else "other"
  disturbed = " (disturbed)" if record["is_disturbed"] else ""
  return (
    f"t5      {record['ratio']:.3f} of the session's speed "
    f"({record['low']:.3f} to {record['high']:.3f}), "
    f"{record['runtime_secs']:.3f} / {record['session_secs']:.3f} s, {same} "
    f"losses, {record['rounds']} rounds{disturbed}"
  )
