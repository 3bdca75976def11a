# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of training with other frameworks.

python -m tools.bench train
python -m tools.bench train --size 113M --dtype float32 --rounds 30
python -m tools.bench train --peer torch,jax --peer_python PYTHON --json
python -m tools.bench train --base CHECKOUT
python -m tools.bench train --mesh_shape data:4 --layout batch:data
python -m tools.bench train --experts --tokens 8192
python -m tools.bench train --adapter --size 125M --tokens 256
"""

# Every program trains the same architecture on one random batch of --tokens
# tokens, or of one longer sequence; a turn is a step. For more than 2,048
# positions palm_mtf recomputes attention in the backward pass (REMAT), and the
# peers' attention does not keep its weights. All use PaLM's optimizer. Peers
# round logits to --dtype; palm_mtf, with its recipe unchanged, does not. The
# comments at the top of the files in tools/peers/ describe the peers.
#
# The devices of a mesh are virtual devices that share this machine's cores. The
# arithmetic is the same in all layouts, so their seconds compare all other
# costs, except those of a network.
#
# --experts compares experts with one MLP, both in palm_mtf; a token uses
# equally many parameters of both models. --adapter compares training of LoRA's
# factors of all kernels, of rank 8, with training of all parameters.

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.config.mesh_layout import check_layout
from palm_mtf.errors import UserError
from palm_mtf.machine.process import own_process
from tools.bench import models, pairs, peers
from tools.bench.command import Flag, checkout, worker_command
from tools.peers.turns import take_turns

HEAD, row, BOUNDS = "".join(pairs.SPEEDS_HEAD), pairs.speeds_row, pairs.BOUNDS
_MOST_KEPT = 2048  # positions for which attention is not recomputed
# By default the dtype that this machine multiplies fast.
FLAGS = {
  **peers.SPEED_FLAGS,
  **peers.peer_flags("train"),
  "--tokens": Flag(2048, "in a step, unless a sequence is longer"),
  "--sequence_length": Flag(256, "a divisor of --tokens, or more than that"),
  "--dtype": Flag(
    models.fast_dtype_here(), "of all programs", ["bfloat16", "float32"]
  ),
  "--base": Flag(
    None, "folder of an older checkout, which takes turns", checkout
  ),
  "--mesh_shape": Flag("", "MESH_SHAPE of our program"),
  "--layout": Flag("", "LAYOUT of our program"),
  "--experts": Flag(
    None, "compare experts with one MLP", settings={"action": "store_true"}
  ),
  "--adapter": Flag(
    None, "compare an adapter with all", settings={"action": "store_true"}
  ),
}


def work(
  size: str,
  dtype: str,
  sequence_length: int,
  batch_size: int,
  block: str = "palm",
  adapter: str = "none",
  **mesh: str,
) -> None:
  """Takes turns: one training step each of the model of one size."""
  own_process()  # as commands do
  config = _config(size, dtype, sequence_length, block)
  if adapter != "none":
    config = dataclasses.replace(
      config, adapter=adapter, adapter_rank=8, adapter_alpha=16.0
    )
  layout = _layout(**mesh)
  tokens = models.random_tokens(config, batch_size)
  with models.training_program(
    config, batch_size=batch_size, mesh_layout=layout
  ) as (session, program):
    # Run only the step, without the feeds and fetches that training logs.
    update = program.update
    rows = [update.inputs[x] for x in program.rows if x in update.inputs]
    run_step = session.make_callable(
      [update.outputs["loss"], *update.operations],
      [*rows, update.inputs["step"]],
    )
    steps = itertools.count()

    def turn() -> dict[str, float]:
      loss, _ = run_step(tokens, tokens, next(steps))
      return {"loss": float(loss)}

    for _ in range(models.WARM_UP_STEPS):
      turn()
    take_turns(turn, {"parameters": models.num_parameters(config.base)})


def _config(
  size: str, dtype: str, sequence_length: int, block: str = "palm"
) -> ModelConfig:
  return dataclasses.replace(
    models.benchmark_config(dtype, size, block),
    sequence_length=sequence_length,
    remat="attention" if sequence_length > _MOST_KEPT else "none",
  )


def _layout(mesh_shape: str = "", layout: str = "") -> MeshLayout:
  return MeshLayout(mesh_shape=mesh_shape, layout=layout)


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per program."""
  dtype, length = chosen.dtype, chosen.sequence_length
  tokens = max(chosen.tokens, length)
  if tokens % length:
    raise UserError(
      f"--sequence_length = {length}: a step has {tokens:,} tokens; give a "
      "divisor of that, such as 1024, or more."
    )
  peers.check_peers("train", chosen.peer, chosen.peer_python)
  # An older checkout may not know these arguments, so pass only what is given.
  mesh = {x: y for x in ("mesh_shape", "layout") if (y := getattr(chosen, x))}
  config = _config(chosen.size, dtype, length)
  check_layout(_layout(**mesh), config, tokens // length)
  settings = {"sequence_length": length, "batch_size": tokens // length}
  # palm_mtf too runs in a separate process.
  make_command = functools.partial(
    worker_command, "train", size=chosen.size, dtype=dtype, **settings, **mesh
  )
  commands = {("ours", dtype): make_command()}
  if chosen.experts:
    commands = {
      (x, dtype): make_command(block=x) for x in models.EXPERTS_AND_MLP
    }
  if chosen.adapter:
    commands["lora", dtype] = make_command(adapter="lora")
  if chosen.base:
    commands["base", dtype] = make_command(folder=chosen.base)
  for name in chosen.peer:
    commands[name, dtype] = peers.peer_command(
      chosen.peer_python,
      peers.PEERS["train"][name],
      models.SIZES[chosen.size],
      **settings,
      dtype=dtype,
    )
  for record in pairs.speed_records(
    # With --experts, one model has several times as many parameters.
    pairs.race(
      commands, chosen.rounds, tolerance=math.inf if chosen.experts else 0.0
    ),
    tokens,
  ):
    yield {**record, "size": chosen.size, "sequence_length": length}
