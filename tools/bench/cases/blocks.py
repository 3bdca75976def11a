# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares blocks: parallel with serial, one product with five.

  python -m tools.bench blocks
  python -m tools.bench blocks --steps 600 --gin.D_MODEL=512 --json

--gin_file and --gin.NAME=VALUE are the flags of `palm_mtf train`.
"""

# Both blocks train the same model on the same batches, one step each in turn.
# The record has the ratio of their times, and the mean of each loss over the
# last tenth of the steps.
#
# The compared products read one block's input, forward and backward: either one
# product with the joined kernels of q, k, v, wi_gate and wi, whose gradient is
# then split; or five products, whose gradients of the input are added. The
# operations that read a product and compute its gradient are left out, because
# they make one pass over memory in both cases.

import argparse
import dataclasses
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator

from palm_mtf.config import Config
from tools.bench.command import Flag, train_config, worker_command
from tools.bench.models import warm_training
from tools.bench.pairs import describe_interval, race, ratio
from tools.peers.turns import take_turns

RECIPE = "recipes/quickstart.gin"
BLOCKS = ("parallel", "serial")
PRODUCTS = ("one product", "five products")
_PRODUCTS_PER_TURN = 10
FLAGS = {"--steps": Flag(200, "steps, and rounds of products")}


def train(config: Config, model_dir: str) -> None:
  """Takes turns: one training step each."""
  from palm_mtf.training.job import prepare

  corpus = prepare(model_dir, config).corpus
  batches = corpus.batches(config.run.batch_sizes)
  with warm_training(config, batches) as step:
    steps = itertools.count()

    def turn() -> dict[str, float]:
      number = next(steps)
      return {"loss": step.run(batches.batch(number), number)["loss"]}

    take_turns(turn, {})


def multiply(config: Config, joined: bool) -> None:
  """Takes turns: the products of one block's input, forward and backward."""
  from palm_mtf._tf import tf
  from palm_mtf.architecture.parameters import parameter_shapes
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
    # Read one number of each result, because unread results are not computed.
    ends = tf.stack([tf.cast(y[0, 0], tf.float32) for y in results])
    session.run(tf.global_variables_initializer())
    run = session.make_callable(ends)
    run()

    def turn() -> dict[str, float]:
      # Take about 0.2 s, because processor time is counted in steps of 0.01 s.
      for _ in range(_PRODUCTS_PER_TURN):
        run()
      return {}

    take_turns(turn, {})


def work(
  program: str, files: list[str], macros: list[str], model_dir: str
) -> None:
  """Takes turns as one of BLOCKS or PRODUCTS."""
  block = program if program in BLOCKS else "parallel"
  config = train_config(files, [*macros, f"BLOCK={block!r}", "NUM_PODS=1"])
  if program in BLOCKS:
    train(config, model_dir)
  else:
    multiply(config, program == PRODUCTS[0])


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields the record of the blocks, then the record of the products."""
  train_config(**chosen.gin)  # checks the gin flags
  with tempfile.TemporaryDirectory() as folder:
    for first, second in (BLOCKS, PRODUCTS):
      turns = race(
        {
          x: worker_command(
            "blocks",
            program=x,
            **chosen.gin,
            model_dir=folder,
          )
          for x in (first, second)
        },
        chosen.steps,
      )
      found = dataclasses.asdict(ratio(turns[second], turns[first]))
      record = {"program": second, "to": first, **found}
      last = max(1, chosen.steps // 10)
      for name in (first, second) if "loss" in turns[first][0].values else ():
        losses = [turn.values["loss"] for turn in turns[name]]
        record[f"loss_{name}"] = statistics.fmean(losses[-last:])
      yield record


def row(record: dict) -> str:
  """Returns a line of the table, and a line of losses if there are any."""
  text = (
    f"{record['program']:>14} / {record['to']:<12} {record['median']:6.3f}  "
    f"{describe_interval(record)}"
  )
  losses = [
    f"{name.removeprefix('loss_')} {value:.4f}"
    for name, value in record.items()
    if name.startswith("loss_")
  ]
  return f"{text}\n{'loss:':>14} {', '.join(losses)}" if losses else text
