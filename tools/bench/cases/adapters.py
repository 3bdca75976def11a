# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares a batch of texts with several adapters with a batch of the base.

  python -m tools.bench adapters
  python -m tools.bench adapters --block smollm2 --bits 16,8 --ranks 8,16

Both batches take turns with the same weights, which are random. Adapters have
factors of all kernels, and row i of the batch has adapter i % ADAPTERS. The
ratio is that of tokens per second to the base's.
"""

import argparse
import dataclasses
import statistics
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from palm_mtf.architecture.parameters import saved_shapes
from tools.bench import models, pairs
from tools.bench.cases.decode import OURS, Task, random_weights
from tools.bench.command import Flag, choices, numbers

if TYPE_CHECKING:  # the module imports TensorFlow, which takes seconds
  from palm_mtf.generation.inference.slot_decoder import SlotDecoder

_STEPS_PER_CALL = 16
BOUNDS = pairs.BOUNDS
HEAD = f"{'bits':>4} {'rank':>4} {'rows':>4} {'tokens/s':>9}  of the base"
FLAGS = {
  "--size": Flag("26.6M", "parameters", models.SIZES),
  "--block": Flag("palm", "of the model", models.BLOCKS),
  "--bits": Flag("16,8,4", "bits per weight", choices([*map(str, OURS)])),
  "--ranks": Flag("16", "of the adapters", numbers("8,16")),
  "--adapters": Flag(8, "of the batch"),
  "--batch_size": Flag(16, "texts"),
  "--sequence_length": Flag(256, "a quarter is prompt"),
  "--rounds": Flag(15, "turns of each batch"),
}


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per number of bits and rank."""
  from palm_mtf.generation.decode.functions import LocalPrograms
  from palm_mtf.generation.inference.slot_decoder import SlotDecoder

  task = Task(
    chosen.size, chosen.sequence_length, chosen.batch_size, block=chosen.block
  )
  for bits in map(int, chosen.bits):
    config = task.config(OURS[bits])
    with random_weights(config, OURS[bits]) as (client, model):
      loaded = types.SimpleNamespace(
        client=client,
        config=config,
        num_slices=1,
        num_virtual=0,
        build=LocalPrograms(model).build,
      )
      decoder = SlotDecoder(loaded, config.vocab_size, task.batch_size)
      for rank in chosen.ranks:
        yield {
          "bits": bits,
          "rank": rank,
          "batch_size": task.batch_size,
          **_compare(chosen, task, decoder, rank),
        }


def _compare(
  chosen: argparse.Namespace, task: Task, decoder: "SlotDecoder", rank: int
) -> dict:
  import numpy as np

  from palm_mtf.generation.inference.adapters import find_factors
  from palm_mtf.generation.inference.slot_decoder import SlotText

  config = dataclasses.replace(
    task.config("float32"), adapter="lora", adapter_rank=rank, adapter_alpha=8.0
  )
  shapes, rng = saved_shapes(config), np.random.default_rng(0)

  def draw(name: str) -> np.ndarray:
    return rng.normal(0, 0.02, shapes[name]).astype(np.float32)

  adapters = [
    decoder.add_adapter(find_factors(config, draw))
    for _ in range(chosen.adapters)
  ]
  prompt = rng.integers(config.vocab_size, size=task.prompt_tokens).tolist()
  left = task.sequence_length - task.prompt_tokens

  def make(has_adapters: bool) -> Callable[[int], None]:
    def run(number: int) -> None:
      del number
      texts = {
        i: SlotText(
          *(prompt[-1], len(prompt) - 1, 0, np.array([i, 0], np.int32)),
          *(0.0, None, 1.0, left),
          adapter=adapters[i % len(adapters)].number * has_adapters,
        )
        for i in range(task.batch_size)
      }
      for done in range(0, left, _STEPS_PER_CALL):
        found = decoder.steps(
          texts, min(_STEPS_PER_CALL, left - done), wants_log_probs=False
        )
        texts = {
          i: x._replace(
            token=found[i][-1].token,
            position=x.position + len(found[i]),
            place=x.place + len(found[i]),
            limit=x.limit - len(found[i]),
          )
          for i, x in texts.items()
        }

    return run

  for i in range(task.batch_size):
    decoder.insert(i, prompt)
  kinds = {"base": make(False), "adapters": make(True)}
  turns = pairs.take_turns(kinds, 1, chosen.rounds)
  secs = statistics.median(x.secs for x in turns["adapters"])
  return {
    "tokens_per_sec": task.batch_size * left / secs,
    **pairs.ratio_fields(turns["base"], turns["adapters"]),
  }


def row(record: dict) -> str:
  """Returns a line of the table."""
  return (
    f"{record['bits']:>4} {record['rank']:>4} {record['batch_size']:>4} "
    f"{record['tokens_per_sec']:>9,.0f}  {pairs.describe_ratio(record)}"
  )
