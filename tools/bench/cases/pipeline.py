# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures two stages against the formula of the bubble, and against SPMD.

python -m tools.bench pipeline
python -m tools.bench pipeline --microbatches 4 --orders gpipe --json
"""

# A pod has two devices: two server processes with a core each (several islands)
# or, with --places in_process, two devices of this process, which share all
# cores (one island). Three kinds of steps take turns:
#
#   stages  a step of the pod in two stages
#   apart   on each device a step of the whole model, both at once, with equally
#           many microbatches: twice the work of `stages`, without a bubble
#   spmd    a step of the whole model over both devices, with heads, d_ff and
#           vocab split in two
#
# `efficiency` is half the time of `apart` divided by the time of `stages`. The
# formula is M / (M + S - 1) for M microbatches and S stages. The logits are 1%
# of the model's arithmetic, so that the stages are nearly equal.
#
# After the timed steps, the queues are sampled after each pass of another step:
# `kept` is the maximum number of bytes that each stage keeps for its backward
# passes.

import argparse
import concurrent.futures
import contextlib
import dataclasses
import math
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.accounting.memory import Activations
from palm_mtf.accounting.step_time import bubble
from palm_mtf.accounting.work import Work
from palm_mtf.config import MeshLayout, ModelConfig, PodsConfig
from palm_mtf.steps.plan import num_kept
from tools.bench import pairs
from tools.bench.command import Flag, choices, numbers
from tools.bench.models import (
  PALM_OPTIMIZER,
  benchmark_config,
  pod_cluster,
  random_tokens,
  step_config,
)

NUM_STAGES = 2
NUM_ROWS = 32  # sequences in a microbatch
WARM_UP_ROUNDS = 1  # not timed: it compiles
SPMD = MeshLayout(
  mesh_shape=f"model:{NUM_STAGES}", layout="heads:model,d_ff:model,vocab:model"
)
ORDERS, PLACES = ["1f1b", "gpipe"], ["local_servers", "in_process"]
# No schedule is faster than half of `apart`, which never waits.
BOUNDS = {**pairs.BOUNDS, "ratio": (0, 1)}
HEAD = (
  "place          order  M    stages     apart  tokens/s  of SPMD  "
  "efficiency  formula  kept by stage"
)
FLAGS = {
  "--microbatches": Flag("1,2,4,8,16", "M per step", numbers("1,2,4")),
  "--orders": Flag(",".join(ORDERS), "STAGE_ORDER", choices(ORDERS)),
  "--places": Flag(",".join(PLACES), "PODS", choices(PLACES)),
  "--rounds": Flag(6, "timed steps of each kind"),
}


def small_head() -> ModelConfig:
  """Returns a model whose logits take 1% of its arithmetic."""
  config = benchmark_config("bfloat16", "4.8M")
  return dataclasses.replace(
    config, num_layers=8, vocab_size=256, sequence_length=64
  )


def _build(client, config: ModelConfig, mesh: MeshLayout, devices):
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.runtime.program import Program
  from palm_mtf.training.step import TrainStep

  with client.graph.as_default():
    program = build_train_program(
      step_config(config, mesh),
      batch_size=NUM_ROWS * mesh.num_microbatches,
      seed=0,
      devices=devices,
    )
  client.call(Program(operations=[program.initialize]))
  return TrainStep(client, program)


def take_steps(
  cluster, config: ModelConfig, mesh: MeshLayout, rounds: int
) -> tuple[dict[str, list[pairs.Turn]], list[int]]:
  """Returns the turns of each kind of step, and the bytes that stages keep."""
  (names,) = cluster.devices.pods
  rows = random_tokens(config, NUM_ROWS * mesh.num_microbatches)
  tokens = rows.astype(np.int32)
  batch = {"inputs": tokens, "targets": tokens}
  # Each kind has its own client, because programs of one client share variables
  # and would wait for each other.
  with (
    contextlib.ExitStack() as stack,
    concurrent.futures.ThreadPoolExecutor(NUM_STAGES) as threads,
  ):

    def build(layout: MeshLayout, devices: Sequence[str] = names):
      client = stack.enter_context(cluster.client())
      placed = dataclasses.replace(cluster.devices, pods=[devices])
      return client, _build(client, config, layout, placed)

    number = mesh.num_microbatches
    client, stages = build(mesh)
    _, spmd = build(dataclasses.replace(SPMD, num_microbatches=number))
    one = dataclasses.replace(mesh, stages=1)
    each = [build(one, [name])[1] for name in names]
    kinds = {
      "stages": lambda number: stages.run(batch, number),
      "spmd": lambda number: spmd.run(batch, number),
      "apart": lambda number: list(
        threads.map(lambda step: step.run(batch, number), each)
      ),
    }
    title = f"{mesh.num_microbatches} microbatches"
    turns = pairs.take_turns(kinds, WARM_UP_ROUNDS, rounds, title)
    return turns, peak_bytes(client, stages, batch, names)


def peak_bytes(client, step, batch, names: Sequence[str]) -> list[int]:
  """Returns the most bytes that each stage keeps for its backward passes.

  Runs one step, and samples the queues after each call. `names` are the stages'
  devices.
  """
  from palm_mtf.runtime.program import Program

  number = step.programs.plan.last.microbatch + 1
  with client.graph.as_default():
    queued = _queued_bytes(client.graph, names, batch["inputs"].size // number)
    sampled = Program(outputs=queued)
  call, peaks = client.call, [0] * len(names)

  def call_and_sample(*arguments, **more):
    outputs = call(*arguments, **more)
    peaks[:] = map(max, peaks, map(int, call(sampled)))
    return outputs

  with unittest.mock.patch.object(client, "call", call_and_sample):
    step.run(batch, 1)
  return peaks


def _queued_bytes(graph, names: Sequence[str], num_tokens: int) -> list:
  """Returns the bytes in queues that each stage both fills and empties."""
  from palm_mtf._tf import tf

  def device(x):
    return tf.DeviceSpec.from_string(x).to_string().lower()

  found = {device(name): [tf.constant(0, tf.int64)] for name in names}
  for put in graph.get_operations():
    if put.type != "QueueEnqueueV2":
      continue
    queue, x = put.inputs
    (take,) = (y for y in queue.consumers() if y.type == "QueueDequeueV2")
    readers = {device(y.device) for y in take.outputs[0].consumers()}
    # The head's gradients of the embedding are not activations. An activation
    # has a first dimension of rows or of tokens.
    is_activation = x.shape.rank and x.shape[0] in (NUM_ROWS, num_tokens)
    if readers == {device(put.device)} and is_activation:
      with tf.device(put.device):
        size = tf.cast(tf.raw_ops.QueueSizeV2(handle=queue), tf.int64)
        found[device(put.device)].append(
          size * (x.dtype.size * math.prod(x.shape))
        )
  return [tf.add_n(found[device(name)]) for name in names]


def expected_bytes(config: ModelConfig, mesh: MeshLayout) -> list[int]:
  """Returns the closed forms of what each stage keeps."""
  # The C++ operations of CPUs never keep attention weights.
  config = dataclasses.replace(config, remat="attention")
  rows = NUM_ROWS * mesh.num_microbatches
  work = Work(
    model=config,
    mesh=mesh,
    optimizer=PALM_OPTIMIZER,
    pods=PodsConfig(),
    rows=rows,
  )
  whole = Activations(work).kept_bytes()
  tokens = 4 * NUM_ROWS * config.sequence_length  # ids, for the embedding
  return [
    num_kept(i, mesh) * (whole // NUM_STAGES + (0 if i else tokens))
    for i in range(NUM_STAGES)
  ]


def summarize(
  turns: Mapping[str, Sequence[pairs.Turn]], mesh: MeshLayout
) -> dict[str, float]:
  """Returns the seconds of the fastest steps, and the efficiency.

  "ratio" is the median efficiency over the rounds, with its interval.
  """
  # Take the fastest steps, because other programs only slow steps down.
  secs = {kind: min(x.secs for x in each) for kind, each in turns.items()}
  half = [
    dataclasses.replace(x, secs=x.secs / NUM_STAGES) for x in turns["apart"]
  ]
  return {
    **{f"{kind}_secs": x for kind, x in secs.items()},
    "efficiency": secs["apart"] / NUM_STAGES / secs["stages"],
    **pairs.ratio_fields(half, turns["stages"]),
    "formula": 1 - bubble(mesh),
  }


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per place, order and number of microbatches."""
  config = small_head()
  for place in chosen.places:
    meshes = [
      MeshLayout(
        mesh_shape="",
        layout="",
        num_microbatches=number,
        stages=NUM_STAGES,
        stage_order=order,
      )
      for order in chosen.orders
      for number in chosen.microbatches
    ]
    with pod_cluster(PodsConfig(pods=place), meshes[0]) as cluster:
      for mesh in meshes:
        turns, kept = take_steps(cluster, config, mesh, chosen.rounds)
        record = summarize(turns, mesh)
        tokens = NUM_ROWS * mesh.num_microbatches * config.sequence_length
        yield {
          "place": place,
          "order": mesh.stage_order,
          "num_microbatches": mesh.num_microbatches,
          **record,
          "tokens_per_sec": tokens / record["stages_secs"],
          "of_spmd": record["spmd_secs"] / record["stages_secs"],
          "kept_bytes": kept,
          "expected_bytes": expected_bytes(config, mesh),
        }


def row(record: dict) -> str:
  """Returns a line of the table."""
  kept = ", ".join(
    f"{x / 1e6:.1f} MB (closed form {y / 1e6:.1f})"
    for x, y in zip(record["kept_bytes"], record["expected_bytes"], strict=True)
  )
  return (
    f"{record['place']:<13}  {record['order']:<5}  "
    f"{record['num_microbatches']:<2}  {record['stages_secs']:6.3f} s  "
    f"{record['apart_secs']:6.3f} s  {record['tokens_per_sec']:8,.0f}  "
    f"{record['of_spmd']:7.2f}  {record['efficiency']:10.2f}  "
    f"{record['formula']:7.2f}  {kept}"
  )
