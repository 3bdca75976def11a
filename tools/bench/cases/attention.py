# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares ways to compute attention, forward and backward.

  python -m tools.bench attention
  python -m tools.bench attention --length 8192 --blocks 256,512 --json

The ways are C++ (palm_mtf/native), and blocks of positions, as used without a
compiler. They compute multi-query attention of 8 heads of 64 for 2,048 tokens,
or for one longer row. Speed-ups are relative to all positions at once.
"""

import argparse
import dataclasses
from collections.abc import Iterator

import numpy as np

from tools.bench.command import Flag, numbers, worker_command
from tools.bench.pairs import describe_ratio, race, ratio
from tools.peers.turns import take_turns

_TOKENS, _HEADS, _D_KV = 2048, 8, 64
HEAD = "block  weights      speed-up"
FLAGS = {
  "--length": Flag(1024, "positions of a row"),
  "--blocks": Flag("64,128,256", "sizes of blocks", numbers("64,128")),
  "--dtype": Flag("float32", "or bfloat16", ["float32", "bfloat16"]),
  "--rounds": Flag(60, "turns of each way"),
}


def work(length: int, block: int, dtype: str, keeps_weights: bool) -> None:
  """Takes turns: attention and its gradient; in C++ if `block` is 0."""
  from palm_mtf._tf import tf
  from palm_mtf.architecture.attention_blocks import AttentionBlock
  from palm_mtf.mesh.session import session_config
  from palm_mtf.model.attention import BlockedAttention
  from palm_mtf.native import layers as native
  from palm_mtf.native.operations import threads_here

  step, threads = block or length, threads_here()
  attention = BlockedAttention(
    blocks=[
      AttentionBlock(x, end, 0, end)
      for x in range(0, length, step)
      for end in [min(x + step, length)]
    ],
    scale=_D_KV**-0.5,
    keeps_weights=keeps_weights,
  )
  rng, rows = np.random.default_rng(0), max(1, _TOKENS // length)

  def variable(*shape: int) -> "tf.Tensor":
    value = rng.standard_normal([rows, length, *shape])
    return tf.Variable(tf.cast(value, dtype), use_resource=True).value()

  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    q, dout = (variable(_HEADS, _D_KV) for _ in range(2))
    k, v = (variable(_D_KV) for _ in range(2))
    if block:
      found = attention.attend(q, k, v)
    else:
      found = native.attend(q, k, v, (), threads=threads)
    out, *weights = found if keeps_weights else (found,)
    with tf.control_dependencies([out]):
      dout = tf.identity(dout)
    if block:
      gradients = attention.gradient(q, k, v, dout, out, *weights)
    else:
      gradients = native.attend_gradient(q, k, v, dout, (), threads=threads)
    session.run(tf.global_variables_initializer())
    run = session.make_callable(tf.group(out, *gradients))
    run()
    take_turns(lambda: run() or {}, {})


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record for C++, then two per block size: weights kept or not."""
  settings = {"length": chosen.length, "dtype": chosen.dtype}

  def command(block: int, keeps_weights: bool) -> list[str]:
    return worker_command(
      "attention", block=block, keeps_weights=keeps_weights, **settings
    )

  ways = [(size, keeps) for size in chosen.blocks for keeps in (True, False)]
  for block, keeps in [(0, False), *ways]:
    whole, other = race(
      {"whole": command(chosen.length, True), "other": command(block, keeps)},
      chosen.rounds,
    ).values()
    yield {
      "block": block or "C++",
      "weights": "kept" if keeps else "made again",
      **settings,
      **dataclasses.asdict(ratio(whole, other)),
    }


def row(record: dict) -> str:
  """Returns a line of the table."""
  speed_up = describe_ratio({**record, "ratio": record["median"]})
  return f"{record['block']:>5}  {record['weights']:<11}  {speed_up}"
