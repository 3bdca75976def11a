# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares ways in which attention is computed, forward and backward.

  python tools/bench_attention.py
  python tools/bench_attention.py --length 8192 --blocks 256,512 --json

In C++ (palm_mtf/native), and block by block, as where there is no compiler.
Multi-query attention of 8 heads of 64, of 2,048 tokens or of one row. Speed-ups
are over all positions at once. Results are on stdout.
"""

import argparse
import dataclasses
import json
import sys

import numpy as np
from bench_command import one_line_errors
from bench_pairs import Program, alternate, ratio
from peers.turns import take_turns

from palm_mtf.errors import UserError, check_choice, check_count

_TOKENS, _HEADS, _D_KV = 2048, 8, 64


def attend(length: int, block: int, dtype: str, keeps_weights: bool) -> None:
  """Takes turns: attention and its gradient; in C++ if `block` is 0."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config
  from palm_mtf.model.attention import BlockedAttention
  from palm_mtf.native import layers as native
  from palm_mtf.native.operations import threads_here

  step, threads = block or length, threads_here()
  attention = BlockedAttention(
    blocks=[(x, min(x + step, length)) for x in range(0, length, step)],
    has_prefix=False,
    scale=_D_KV**-0.5,
    is_multi_head=False,
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
      gradients = attention.gradient(q, k, v, out, dout, *weights)
    else:
      gradients = native.attend_gradient(q, k, v, dout, (), threads=threads)
    session.run(tf.global_variables_initializer())
    run = session.make_callable(tf.group(out, *gradients))
    run()
    take_turns(lambda: run() or {}, {})


@one_line_errors
def main() -> int:
  """Compares; or, as a worker, takes the turns of one size."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  add = parser.add_argument
  add("--length", type=int, default=1024, help="positions of a row")
  add("--blocks", default="64,128,256", help="sizes of blocks")
  add("--dtype", default="float32", help="or bfloat16")
  add("--rounds", type=int, default=60)
  add("--json", action="store_true", help="print one object a line")
  add("--worker", type=int, help=argparse.SUPPRESS)
  add("--keeps_weights", action="store_true", help=argparse.SUPPRESS)
  chosen = parser.parse_args()
  for name in ("length", "rounds"):
    check_count(f"--{name}", getattr(chosen, name))
  check_choice("--dtype", chosen.dtype, ["float32", "bfloat16"])
  if chosen.worker is not None:
    attend(chosen.length, chosen.worker, chosen.dtype, chosen.keeps_weights)
    return 0
  try:
    sizes = [int(x) for x in chosen.blocks.split(",")]
  except ValueError:
    raise UserError(
      f"--blocks = {chosen.blocks}: give numbers, as in 64,128."
    ) from None
  for size in sizes:
    check_count("--blocks", size)
  command = [sys.executable, __file__, f"--length={chosen.length}"]
  command.append(f"--dtype={chosen.dtype}")

  def program(size: int, flags: list[str]) -> Program:
    return Program(f"{size}{flags}", [*command, f"--worker={size}", *flags])

  if not chosen.json:
    print("block  weights      speed-up")
  ways = [(size, kept) for size in sizes for kept in (["--keeps_weights"], [])]
  for size, flags in [(0, []), *ways]:
    with (
      program(chosen.length, ["--keeps_weights"]) as whole,
      program(size, flags) as other,
    ):
      turns = alternate([whole, other], chosen.rounds)
    found = ratio(turns[whole.name], turns[other.name])
    kept = "kept" if flags else "made again"
    if chosen.json:
      settings = {"length": chosen.length, "dtype": chosen.dtype}
      record = {"block": size or "C++", "weights": kept, **settings}
      print(json.dumps({**record, **dataclasses.asdict(found)}), flush=True)
      continue
    print(
      f"{size or 'C++':>5}  {kept:<11}  {found.median:.2f} ({found.low:.2f} to "
      f"{found.high:.2f}, {found.rounds} rounds"
      + (", disturbed)" if found.is_disturbed else ")"),
      flush=True,
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
