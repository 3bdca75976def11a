# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares blocks: parallel with serial, one product with five.

  python tools/bench_blocks.py
  python tools/bench_blocks.py --steps 600 --gin.D_MODEL=512 --json

--gin_file and --gin.NAME=VALUE are those of `palm_mtf train`, by default the
quickstart's. Results are on stdout.
"""

# Both blocks train the same model on the same batches, a step each in turn: the
# ratio of their times, and their losses over the last tenth of the steps.
#
# The products are those of one block's inputs alone, forward and back: q, k, v,
# wi_gate and wi as one product, with its kernels joined before and split after,
# and as five, whose gradients are added up. What reads a product, and makes its
# gradient, is one pass over memory in both, and left out.

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile

from bench_command import (
  gin_flags,
  one_line_errors,
  read_gin_arguments,
  train_config,
)
from bench_pairs import Program, alternate, ratio
from bench_program import warm_training
from peers.turns import take_turns

from palm_mtf.config import Config
from palm_mtf.errors import check_count

RECIPE = "recipes/quickstart.gin"
BLOCKS = ("parallel", "serial")
PRODUCTS = ("one product", "five products")
_PRODUCTS_PER_TURN = 10


def train(config: Config, model_dir: str) -> None:
  """Takes turns: a training step each."""
  from palm_mtf.training.prepare import prepare

  corpus = prepare(model_dir, config).corpus
  batches = corpus.batches(config.run.batch_sizes)
  with warm_training(config, batches) as step:
    steps = itertools.count()

    def turn() -> dict[str, float]:
      number = next(steps)
      return {"loss": step.run(batches.batch(number), number)["loss"]}

    take_turns(turn, {})


def multiply(config: Config, joined: bool) -> None:
  """Takes turns: the products of one block's inputs, forward and back."""
  from palm_mtf._tf import tf
  from palm_mtf.accounting.architecture import parameter_shapes
  from palm_mtf.mesh.session import session_config
  from palm_mtf.model.projection import kernel_gradient
  from palm_mtf.ops.matmul import matmul
  from palm_mtf.ops.xla import fused

  model, dtype = config.model, tf.as_dtype(config.model.activation_dtype)
  rows = config.run.batch_sizes.sizes[0] * model.sequence_length
  shapes = parameter_shapes(model)
  names = ("attention/q", "attention/k", "attention/v", "mlp/wi_gate", "mlp/wi")
  columns = [math.prod(shapes[f"layer_000/{name}"][1:]) for name in names]

  @fused
  def add(*xs):
    return tf.add_n(xs)

  def variable(*shape):
    value = tf.random.stateless_normal(shape, [0, sum(shape)])
    return tf.Variable(tf.cast(value, dtype), use_resource=True).value()

  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    x = variable(rows, model.d_model)
    kernels = [variable(model.d_model, n) for n in columns]
    gradients = [variable(rows, n) for n in columns]
    if joined:
      kernel, gradient = tf.concat(kernels, 1), variable(rows, sum(columns))
      results = [
        matmul(x, kernel),
        matmul(gradient, kernel, transpose_b=True),
        *tf.split(kernel_gradient(x, gradient, on_cpu=True), columns, 1),
      ]
    else:
      pairs = list(zip(gradients, kernels, strict=True))
      results = [
        *(matmul(x, kernel) for kernel in kernels),
        add(*(matmul(dy, kernel, transpose_b=True) for dy, kernel in pairs)),
        *(matmul(x, dy, transpose_a=True) for dy in gradients),
      ]
    # A number of each: what nothing reads is not computed.
    ends = tf.stack([tf.cast(y[0, 0], tf.float32) for y in results])
    session.run(tf.global_variables_initializer())
    run = session.make_callable(ends)
    run()

    def turn() -> dict[str, float]:
      # Some 0.2 s: processor time is counted in steps of 0.01 s.
      for _ in range(_PRODUCTS_PER_TURN):
        run()
      return {}

    take_turns(turn, {})


def compare(
  names: tuple[str, str], flags: list[str], rounds: int
) -> dict[str, object]:
  """Returns the ratio of the second program's seconds to the first's."""
  commands = [
    [sys.executable, __file__, f"--worker={x}", *flags] for x in names
  ]
  with (
    Program(names[0], commands[0]) as first,
    Program(names[1], commands[1]) as second,
  ):
    turns = alternate([first, second], rounds)
  found = ratio(turns[names[1]], turns[names[0]])
  record = {"program": names[1], "to": names[0], **dataclasses.asdict(found)}
  last = max(1, rounds // 10)
  for name in names:
    values = [turn.values for turn in turns[name]]
    losses = [x["loss"] for x in values if "loss" in x]
    if losses:
      record[f"loss_{name}"] = statistics.fmean(losses[-last:])
  return record


def line(record: dict[str, object]) -> str:
  """Returns a record as a line of text."""
  text = (
    f"{record['program']:>14} / {record['to']:<12} {record['median']:6.3f}  "
    f"{record['low']:.3f} to {record['high']:.3f}  "
    f"{record['rounds']:>4} rounds, {record['left_out']} left out"
  )
  if record["is_disturbed"]:
    text += " (disturbed)"
  losses = [
    f"{name.removeprefix('loss_')} {value:.4f}"
    for name, value in record.items()
    if name.startswith("loss_")
  ]
  return f"{text}\n{'loss:':>14} {', '.join(losses)}" if losses else text


@one_line_errors
def main() -> int:
  """Compares; or, as a worker, takes the turns of one program."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--steps", type=int, default=200, help="steps, and rounds of products")
  add("--worker", help=argparse.SUPPRESS)
  add("--model_dir", help=argparse.SUPPRESS)
  chosen, macros = read_gin_arguments(parser, RECIPE)
  check_count("--steps", chosen.steps)
  files = chosen.gin_file or [RECIPE]
  if chosen.worker:
    block = chosen.worker if chosen.worker in BLOCKS else "parallel"
    config = train_config(files, [*macros, f"BLOCK={block!r}", "NUM_PODS=1"])
    if chosen.worker in BLOCKS:
      train(config, chosen.model_dir)
    else:
      multiply(config, chosen.worker == PRODUCTS[0])
    return 0
  train_config(files, macros)
  with tempfile.TemporaryDirectory() as folder:
    flags = [f"--model_dir={folder}", *gin_flags(files, macros)]
    for names in (BLOCKS, PRODUCTS):
      record = compare(names, flags, chosen.steps)
      print(json.dumps(record) if chosen.json else line(record), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
