# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of the gradient exchange between two pods.

python -m tools.bench pods
python -m tools.bench pods --microbatches 1,4 --dcn_dtype float32 --json
"""

# Two pods are server processes with a core each, and train the model of 26.6M
# parameters in bfloat16. Three kinds of steps take turns in one run:
#
#   joined  both pods exchange their gradients: a training step
#   apart   both pods train at once: the same step without the exchange
#   single  only the first pod, while the other is idle
#
# `apart / joined` is the ratio of their times: 0.975 means that the exchange
# costs 2.5% of a step. `speed-up` is the work of two joined pods divided by the
# work of `single`. It stays below twice the ratio, because cores that share a
# clock and memory slow each other down without any exchange.

import argparse
import concurrent.futures
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.config import MeshLayout, PodsConfig
from tools.bench.command import Flag, numbers
from tools.bench.models import (
  BATCH_SIZE,
  PALM_OPTIMIZER,
  benchmark_config,
  pod_cluster,
  random_tokens,
)
from tools.bench.pairs import (
  Turn,
  describe_ratio,
  ratio,
  ratio_fields,
  take_turns,
)

NUM_PODS = 2
WARM_UP_ROUNDS = 2  # not timed: they compile and fill caches
HEAD = "microbatches    joined     apart    single  speed-up  apart / joined"
# A microbatch is 8 sequences per pod. More microbatches mean more work for
# equally many gradients.
FLAGS = {
  "--microbatches": Flag("1,2,7", "numbers per step", numbers),
  "--dcn_dtype": Flag(
    "bfloat16", "of gradients; or float32", ["bfloat16", "float32"]
  ),
  "--rounds": Flag(40, "timed steps of each kind"),
}


def take_steps(
  cluster, pods: PodsConfig, mesh: MeshLayout, rounds: int
) -> dict[str, list[Turn]]:
  """Returns the turns of each kind of step, one per round."""
  from palm_mtf.mesh.cpu_gpu import CpuGpuDevices
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.runtime.client.client import Client
  from palm_mtf.runtime.program import Program
  from palm_mtf.training.step import TrainStep

  config = benchmark_config("bfloat16")
  pod_batch_size = BATCH_SIZE * mesh.num_microbatches
  tokens = random_tokens(config, pod_batch_size * NUM_PODS).astype(np.int32)
  batch = {"inputs": tokens, "targets": tokens}
  part = {name: rows[:pod_batch_size] for name, rows in batch.items()}

  def step(
    client: Client, devices: CpuGpuDevices
  ) -> Callable[[dict, int], dict[str, float]]:
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
    client.call(Program(operations=[program.initialize]))
    return TrainStep(client, program).run

  with (
    cluster.client() as client,
    client.graph.as_default(),
    concurrent.futures.ThreadPoolExecutor(NUM_PODS) as clients,
  ):
    joined = step(client, cluster.devices)
    each = [
      step(client, dataclasses.replace(cluster.devices, pods=[names]))
      for names in cluster.devices.pods
    ]

    def apart(number: int) -> None:
      list(clients.map(lambda run: run(part, number), each))

    kinds = {
      "joined": lambda number: joined(batch, number),
      "apart": apart,
      "single": lambda number: each[0](part, number),
    }
    title = f"{mesh.num_microbatches} microbatches"
    return take_turns(kinds, WARM_UP_ROUNDS, rounds, title)


def summarize(turns: Mapping[str, Sequence[Turn]]) -> dict[str, object]:
  """Returns the ratio with its interval, the speed-up and median seconds."""
  return {
    **ratio_fields(turns["apart"], turns["joined"]),
    "speed_up": NUM_PODS * ratio(turns["single"], turns["joined"]).median,
    **{
      f"{kind}_secs": statistics.median(x.secs for x in each)
      for kind, each in turns.items()
    },
  }


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per number of microbatches."""
  pods = PodsConfig(
    num_pods=NUM_PODS, pods="local_servers", dcn_dtype=chosen.dcn_dtype
  )
  meshes = [
    MeshLayout(mesh_shape="", layout="", num_microbatches=number)
    for number in chosen.microbatches
  ]
  with pod_cluster(pods, meshes[0]) as cluster:
    for mesh in meshes:
      turns = take_steps(cluster, pods, mesh, chosen.rounds)
      yield {
        "num_microbatches": mesh.num_microbatches,
        **summarize(turns),
        "dcn_dtype": chosen.dcn_dtype,
      }


def row(record: dict) -> str:
  """Returns a line of the table."""
  kinds = ("joined", "apart", "single")
  secs = "  ".join(f"{record[f'{kind}_secs']:6.3f} s" for kind in kinds)
  return (
    f"{record['num_microbatches']:<12}  {secs}  {record['speed_up']:8.2f}  "
    f"{describe_ratio(record, 3)}"
  )
