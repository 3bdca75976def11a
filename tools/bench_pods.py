# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of the gradient exchange between two pods.

  python tools/bench_pods.py
  python tools/bench_pods.py --microbatches 1,4 --dcn_dtype float32 --json

Results are on stdout, progress is on stderr.
"""

# Two pods are server processes with a core each, and train the model of
# bench_peers.py in bfloat16. Three kinds of steps take turns in one run:
#
#   joined  both pods, which exchange their gradients: a training step
#   apart   both pods at once, each for itself: the same step without exchange
#   alone   the first pod for itself, the other idle
#
# `apart / joined` is the ratio of their times: 0.975 says that the exchange
# costs 2.5% of a step. `speed-up` is the work of two joined pods over that of
# one alone: cores that share a clock and memory slow each other down without
# any exchange, so that it stays below twice the ratio.

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from bench_command import one_line_errors, random_tokens, seconds_of
from bench_pairs import Turn, ratio, turn_of
from bench_peers import BATCH_SIZE, PALM_OPTIMIZER, benchmark_config

from palm_mtf.cluster.client.local_servers import PodServers
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.errors import UserError, check_choice, check_count

NUM_PODS = 2
WARM_UP_ROUNDS = 2  # not timed: they compile and fill caches


def turns_of_steps(
  cluster, pods: PodsConfig, mesh: MeshLayout, rounds: int
) -> dict[str, list[Turn]]:
  """Returns a turn of each kind of step in each round."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.cpu_gpu import CpuGpuDevices
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.training.step import TrainStep

  config = benchmark_config("bfloat16")
  pod_batch_size = BATCH_SIZE * mesh.num_microbatches
  tokens = random_tokens(config, pod_batch_size * NUM_PODS).astype(np.int32)
  batch = {"inputs": tokens, "targets": tokens}
  part = {name: rows[:pod_batch_size] for name, rows in batch.items()}

  def step(devices: CpuGpuDevices) -> Callable[[dict, int], dict[str, float]]:
    num_pods = len(devices.pods)
    program = build_train_program(
      config,
      mesh,
      PALM_OPTIMIZER,
      batch_size=pod_batch_size * num_pods,
      seed=0,
      pods=dataclasses.replace(pods, num_pods=num_pods),
      devices=devices,
    )
    session.run(program.initialize)
    return TrainStep(session, program).run

  with (
    tf.Graph().as_default(),
    cluster.session() as session,
    concurrent.futures.ThreadPoolExecutor(NUM_PODS) as clients,
  ):
    joined = step(cluster.devices)
    each = [
      step(dataclasses.replace(cluster.devices, pods=[names]))
      for names in cluster.devices.pods
    ]

    def apart(number: int) -> None:
      list(clients.map(lambda run: run(part, number), each))

    kinds = {
      "joined": lambda number: joined(batch, number),
      "apart": apart,
      "alone": lambda number: each[0](part, number),
    }
    turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
    for number in range(WARM_UP_ROUNDS + rounds):
      for kind, run in kinds.items():
        # From step 1 on: step 0 is that of moments that are still 0.
        turn = turn_of(
          os.getpid(),
          lambda run=run, number=number: {"secs": seconds_of(run, 1 + number)},
        )
        turns[kind].append(turn)
      secs = "  ".join(
        f"{kind} {x[-1].secs:.3f} s" for kind, x in turns.items()
      )
      print(f"{mesh.num_microbatches} microbatches: {secs}", file=sys.stderr)
    return {kind: x[WARM_UP_ROUNDS:] for kind, x in turns.items()}


def summarize(turns: Mapping[str, Sequence[Turn]]) -> dict[str, object]:
  """Returns the ratio with its interval, the speed-up and median seconds."""
  compared = dataclasses.asdict(ratio(turns["apart"], turns["joined"]))
  of_alone = ratio(turns["alone"], turns["joined"])
  return {
    "ratio": compared.pop("median"),
    **compared,
    "speed_up": NUM_PODS * of_alone.median,
    **{
      f"{kind}_secs": statistics.median(x.secs for x in each)
      for kind, each in turns.items()
    },
  }


def read_arguments() -> argparse.Namespace:
  """Returns the command line's choices; checks all of them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--microbatches", default="1,2,7", help="numbers of them in a step")
  add("--dcn_dtype", default="bfloat16", help="of gradients; or float32")
  add("--rounds", type=int, default=40, help="timed steps of each kind")
  add("--json", action="store_true", help="print one object a line")
  # A step is some microbatches of 8 sequences a pod: the more, the more work to
  # the same gradients.
  chosen = parser.parse_args()
  check_choice("--dcn_dtype", chosen.dcn_dtype, ["bfloat16", "float32"])
  check_count("--rounds", chosen.rounds)
  try:
    chosen.microbatches = [int(x) for x in chosen.microbatches.split(",")]
  except ValueError:
    raise UserError(
      f"--microbatches = {chosen.microbatches}: give numbers, as in 1,2,4."
    ) from None
  for number in chosen.microbatches:
    check_count("--microbatches", number)
  return chosen


@one_line_errors
def main() -> None:
  """Measures, and prints a line for each number of microbatches."""
  chosen = read_arguments()
  pods = PodsConfig(
    num_pods=NUM_PODS, pods="local_servers", dcn_dtype=chosen.dcn_dtype
  )
  meshes = [
    MeshLayout(mesh_shape="", layout="", num_microbatches=number)
    for number in chosen.microbatches
  ]
  if not chosen.json:
    print(
      "microbatches    joined     apart     alone  speed-up  apart / joined"
    )
  with PodServers(pods, meshes[0]) as servers:
    from palm_mtf.cluster.client.connect import connect
    from palm_mtf.cluster.server_info import read_info

    places = servers.places()
    addresses = (place.address for pod in places for place in pod)
    infos = {x: read_info(x, pods.pod_timeout_secs) for x in addresses}
    cluster = connect(pods, meshes[0], places, infos)
    for mesh in meshes:
      record = summarize(turns_of_steps(cluster, pods, mesh, chosen.rounds))
      if chosen.json:
        settings = {"dcn_dtype": chosen.dcn_dtype}
        microbatches = {"num_microbatches": mesh.num_microbatches}
        print(json.dumps({**microbatches, **record, **settings}), flush=True)
      else:
        print(_row(mesh.num_microbatches, record), flush=True)


def _row(microbatches: int, record: Mapping[str, object]) -> str:
  kinds = ("joined", "apart", "alone")
  secs = "  ".join(f"{record[f'{kind}_secs']:6.3f} s" for kind in kinds)
  disturbed = ", disturbed" if record["is_disturbed"] else ""
  return (
    f"{microbatches:<12}  {secs}  {record['speed_up']:8.2f}  "
    f"{record['ratio']:.3f} ({record['low']:.3f} to {record['high']:.3f}, "
    f"{record['rounds']} rounds{disturbed})"
  )


if __name__ == "__main__":
  sys.exit(main())
