# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns of programs that decode one token of all prompts per call."""

import argparse
import time
from collections.abc import Callable

import numpy as np
from turns import take_turns


def continue_in_turns(
  read: Callable[[np.ndarray, int], np.ndarray],
  sizes: argparse.Namespace,
  num_parameters: int,
) -> None:
  """Takes turns: a continuation of all prompts each. Prompts are not timed.

  Args:
    read: function of tokens, [batch, length], and the position of the first
      token; returns the likeliest next token of each row, [batch, 1]. Position
      0 begins new sequences.
    sizes: flags of `make_parser`, including "prompt_tokens".
    num_parameters: number of parameters of the model.
  """
  shape = sizes.batch_size, sizes.prompt_tokens
  prompts = np.random.default_rng(0).integers(sizes.vocab_size, size=shape)

  def turn() -> dict[str, float]:
    tokens = read(prompts, 0)
    start = time.perf_counter()
    for place in range(sizes.prompt_tokens, sizes.sequence_length - 1):
      tokens = read(tokens, place)
    return {"secs": time.perf_counter() - start}

  turn()  # warms up
  take_turns(turn, {"parameters": num_parameters})
