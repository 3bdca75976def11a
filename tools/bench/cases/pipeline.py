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
# After the timed steps, one more step is traced for the picture, and in another
# step the queues are sampled after each pass: `kept` is the maximum number of
# bytes that each stage keeps for its backward passes.

import argparse
import concurrent.futures
import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.accounting.memory import Activations
from palm_mtf.accounting.pipeline import bubble, num_kept
from palm_mtf.config import MeshLayout, ModelConfig, PodsConfig
from palm_mtf.report.plans import write_png
from tools.bench.command import Flag, choices, numbers
from tools.bench.models import (
  PALM_OPTIMIZER,
  benchmark_config,
  pod_cluster,
  random_tokens,
)
from tools.bench.pairs import Turn, take_turns

NUM_STAGES = 2
NUM_ROWS = 32  # sequences in a microbatch
WARM_UP_ROUNDS = 1  # not timed: it compiles
# Tokens/s of the Pathways paper, Table 2: a model of 3B on 128 cores.
PAPER_SPMD = 125.7e3
PAPER = {(4, 16): 133.7e3, (8, 32): 132.7e3, (16, 64): 131.4e3}  # (S, M)
SPMD = MeshLayout(
  mesh_shape=f"model:{NUM_STAGES}",
  layout="heads:model,d_ff:model,vocab:model",
)
ORDERS, PLACES = ["1f1b", "gpipe"], ["local_servers", "in_process"]
PLACE_NAMES = {"local_servers": "two servers", "in_process": "one process"}
TIMELINE = 8  # draw the passes of a step with about so many microbatches
HEAD = (
  "place          order  M    stages     apart  tokens/s  of SPMD  "
  "efficiency  formula  kept by stage"
)
FLAGS = {
  "--microbatches": Flag("1,2,4,8,16", "M per step", numbers("1,2,4")),
  "--orders": Flag(",".join(ORDERS), "STAGE_ORDER", choices(ORDERS)),
  "--places": Flag(",".join(PLACES), "PODS", choices(PLACES)),
  "--rounds": Flag(5, "timed steps of each kind"),
  "--picture": Flag(None, "draw the table into this PNG file"),
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
      config,
      mesh,
      PALM_OPTIMIZER,
      batch_size=NUM_ROWS * mesh.num_microbatches,
      seed=0,
      devices=devices,
    )
  client.call(Program(operations=[program.initialize]))
  return TrainStep(client, program)


def take_steps(
  cluster, config: ModelConfig, mesh: MeshLayout, rounds: int
) -> tuple[dict[str, list[Turn]], dict[str, list]]:
  """Returns the turns of each kind of step, and facts of further steps."""
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
    turns = take_turns(kinds, WARM_UP_ROUNDS, rounds, title)
    facts = {
      "passes": trace_passes(client, stages, batch),
      "kept_bytes": peak_bytes(client, stages, batch, names),
    }
  return turns, facts


@contextlib.contextmanager
def _after_calls(client, act) -> Iterator[None]:
  """Makes a client run act(program, arguments by name) after each call."""
  call = client.call

  def call_and_act(program, *inputs, **more):
    outputs = call(program, *inputs, **more)
    act(program, more)
    return outputs

  client.call = call_and_act
  try:
    yield
  finally:
    del client.call


def trace_passes(client, step, batch) -> list[dict]:
  """Returns when a step computes each pass: stage, kind, seconds."""
  *stages, head = step.program.pods[0].stages
  kinds = {head.forward: ("head", 0)}
  for i, stage in enumerate(stages):
    kinds |= {stage.forward: ("forward", i), stage.backward: ("backward", i)}
  passes = []

  def add(program, more) -> None:
    if found := kinds.get(program.operations[0]):
      start, end = _computing_micros(more["run_metadata"])
      passes.append((start, end, *found))

  with _after_calls(client, add):
    step.run(batch, 1, [])
  passes.sort()
  return [
    {
      "stage": stage,
      "kind": kind,
      "start": (start - passes[0][0]) / 1e6,
      "end": (end - passes[0][0]) / 1e6,
    }
    for start, end, kind, stage in passes
  ]


def _computing_micros(record) -> tuple[int, int]:
  """Returns start and end of a call's computation, after its inputs came."""
  nodes = [x for each in record.step_stats.dev_stats for x in each.node_stats]
  ends = {x.node_name: x.all_start_micros + x.all_end_rel_micros for x in nodes}
  begun = min(x.all_start_micros for x in nodes)
  taken = (x for name, x in ends.items() if "QueueDequeue" in name)
  return max([begun, *taken]), max(ends.values())


def peak_bytes(client, step, batch, names: Sequence[str]) -> list[int]:
  """Returns the most bytes that each stage keeps for its backward passes.

  Runs one step, and samples the queues after each call. `names` are the stages'
  devices.
  """
  from palm_mtf.runtime.program import Program

  number = step.program.num_microbatches
  with client.graph.as_default():
    queued = _queued_bytes(client.graph, names, batch["inputs"].size // number)
    sampled = Program(outputs=queued)
  call, peaks = client.call, [0] * len(names)

  def sample(*unused) -> None:
    for i, num_bytes in enumerate(call(sampled)):
      peaks[i] = max(peaks[i], int(num_bytes))

  with _after_calls(client, sample):
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
  whole = Activations(config, mesh, rows).kept_bytes()
  tokens = 4 * NUM_ROWS * config.sequence_length  # ids, for the embedding
  return [
    num_kept(i, mesh) * (whole // NUM_STAGES + (0 if i else tokens))
    for i in range(NUM_STAGES)
  ]


def summarize(
  turns: Mapping[str, Sequence[Turn]], mesh: MeshLayout
) -> dict[str, float]:
  """Returns the seconds of the fastest steps, and the efficiency."""
  # Take the fastest steps, because other programs only slow steps down.
  secs = {kind: min(x.secs for x in each) for kind, each in turns.items()}
  ratios = [
    apart.secs / NUM_STAGES / stages.secs
    for apart, stages in zip(turns["apart"], turns["stages"], strict=True)
  ]
  return {
    **{f"{kind}_secs": x for kind, x in secs.items()},
    "efficiency": secs["apart"] / NUM_STAGES / secs["stages"],
    "median_efficiency": statistics.median(ratios),
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
        turns, facts = take_steps(cluster, config, mesh, chosen.rounds)
        record = summarize(turns, mesh)
        tokens = NUM_ROWS * mesh.num_microbatches * config.sequence_length
        yield {
          "place": place,
          "order": mesh.stage_order,
          "num_microbatches": mesh.num_microbatches,
          **record,
          "tokens_per_sec": tokens / record["stages_secs"],
          "of_spmd": record["spmd_secs"] / record["stages_secs"],
          **facts,
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


def draw(records: Sequence[dict], path: str) -> None:
  """Draws efficiency by M, speed compared with SPMD, and passes of a step."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(11, 6.4), layout="constrained")
  above, below = figure.subfigures(2, 1)
  efficiency, speed = above.subplots(1, 2)
  places = list(dict.fromkeys(x["place"] for x in records))
  _draw_efficiency(efficiency, records)
  _draw_speed(speed, [x for x in records if x["place"] == places[-1]])
  timelines = below.subplots(1, len(places), squeeze=False)[0]
  for axes, place in zip(timelines, places, strict=True):
    own = [x for x in records if x["place"] == place]
    _draw_passes(
      axes, min(own, key=lambda x: abs(x["num_microbatches"] - TIMELINE))
    )
  for axes in figure.axes:
    axes.spines[["top", "right"]].set_visible(False)
  write_png(figure, path, dpi=120)


def _draw_efficiency(axes, records: Sequence[dict]) -> None:
  formula = sorted({(x["num_microbatches"], x["formula"]) for x in records})
  axes.plot(*zip(*formula, strict=True), color="0.5", label="M / (M + 1)")
  groups = sorted({(x["place"], x["order"]) for x in records}, reverse=True)
  for marker, (place, order) in zip("osx+", groups, strict=False):
    points = [
      (x["num_microbatches"], x["efficiency"])
      for x in records
      if (x["place"], x["order"]) == (place, order)
    ]
    label = f"{PLACE_NAMES[place]}, {order}"
    axes.plot(*zip(*points, strict=True), marker, label=label)
  axes.set(xscale="log", xlabel="microbatches M", title="efficiency, 2 stages")
  axes.set_xticks(*zip(*((x, str(x)) for x, _ in formula), strict=True))
  axes.minorticks_off()
  axes.set_ylim(0, 1.2)
  axes.legend(frameon=False, loc="lower right")


def _draw_speed(axes, records: Sequence[dict]) -> None:
  bars = {"paper\nSPMD": 1.0}
  for (stages, number), tokens in PAPER.items():
    bars[f"paper\nS={stages}\nM={number}"] = tokens / PAPER_SPMD
  bars["ours\nSPMD"] = 1.0
  for x in records:
    if x["order"] == ORDERS[0]:
      number = x["num_microbatches"]
      bars[f"ours\nS={NUM_STAGES}\nM={number}"] = x["of_spmd"]
  colors = ["0.6" if name.startswith("paper") else "C0" for name in bars]
  axes.bar(list(bars), list(bars.values()), color=colors)
  axes.axhline(1, color="0.3", linewidth=0.7)
  axes.tick_params(axis="x", labelsize=7)
  where = PLACE_NAMES[records[0]["place"]]
  axes.set_title(f"tokens/s by those of SPMD (Table 2); ours: {where}")


def _draw_passes(axes, record: dict) -> None:
  colors = {"forward": "C0", "backward": "C1", "head": "C2"}
  for x in record["passes"]:
    # The head is on stage 0, next to the stage's passes.
    bottom, height = (0.45, 0.25) if x["kind"] == "head" else (-0.4, 0.8)
    axes.broken_barh(
      [(x["start"], x["end"] - x["start"])],
      (x["stage"] + bottom, height),
      color=colors[x["kind"]],
      edgecolor="white",
      label=x["kind"],
    )
  handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
  axes.legend(handles.values(), handles, frameon=False, ncols=3)
  place, number = PLACE_NAMES[record["place"]], record["num_microbatches"]
  title = f"a step with M = {number}, {place}, {record['order']}"
  axes.set(xlabel="seconds", title=title)
  axes.set_yticks([0, 1], ["stage 0", "stage 1"])
  axes.set_ylim(2.1, -0.6)
