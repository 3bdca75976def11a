# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Loops over a model's layers: one loop for each group of layers.

An iteration of a loop computes one period of the group: the consecutive layers
that repeat (architecture/block.py). So the size of a program depends on the
length of the periods, but not on the number of layers. Programs contain only
the layers of the first period. One array, [periods, ...], stacks a variable of
all periods, and has the variable's name in the first period. If layers 0 to 23
are a group with a period of 6 layers, then the array "layer_002/mlp/wi" stacks
the variables "mlp/wi" of layers 2, 8, 14 and 20.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

from palm_mtf.architecture.block import model_of, model_of_layers
from palm_mtf.architecture.parameters import (
  layer_name,
  parameters_of,
  parse_name,
)
from palm_mtf.config import ModelConfig
from palm_mtf.steps.plan import stage_layers

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LayerLoop:
  """A loop over the layers of a group."""

  layers: range  # numbers of the layers of the first period
  count: int  # number of periods

  @property
  def end(self) -> int:
    """Number of the layer after the loop."""
    return self.layers[0] + len(self.layers) * self.count

  def number(self, layer: int, period: T) -> T:
    """Returns the layer of `period` that is at the place of `layer`.

    `layer` is the number of a layer of the first period.
    """
    return layer + period * len(self.layers)

  def select(self, items: Mapping[str, T]) -> dict[str, T]:
    """Returns the items of this loop's variables; keys are their names."""
    return {
      x: y for x, y in items.items() if parse_name(x).layer in self.layers
    }


@functools.cache
def loops_of(
  config: ModelConfig, frozen: tuple[str, ...] = (), num_stages: int = 1
) -> tuple[LayerLoop, ...]:
  """Returns the loops that compute a model's layers, in order.

  `frozen` is FROZEN. Periods that train different parameters are in different
  loops, so that each loop computes only the gradients that its layers need. No
  loop has layers of two of the `num_stages` pipeline stages.
  """
  trained = [set[str]() for _ in range(config.num_layers)]
  for x in parameters_of(config, frozen):
    layer, part = parse_name(x.name)
    if layer is not None and x.is_trained:
      trained[layer].add(part)
  loops = []
  for layers in stage_layers(config.num_layers, num_stages):
    first = layers[0]
    for period, count in model_of(model_of_layers(config, layers)).groups:
      length = len(period)
      end = first + length * count
      begins = range(first, end, length)
      for _, run in itertools.groupby(
        begins, lambda i, length=length: trained[i : i + length]
      ):
        begin, *others = run
        loop = LayerLoop(range(begin, begin + length), 1 + len(others))
        loops.append(loop)
      first = end
  return tuple(loops)


def is_stacked(name: str) -> bool:
  """Returns whether the array `name` stacks a variable of several layers."""
  return parse_name(name).layer is not None


def find_place(
  loops: Sequence[LayerLoop], layer: int
) -> tuple[LayerLoop, int, int]:
  """Returns a layer's loop, its place in the first period, and its period.

  The place is the number of the layer of the first period whose arrays stack
  the variables of `layer`.
  """
  *_, loop = (x for x in loops if x.layers[0] <= layer)
  period, place = divmod(layer - loop.layers[0], len(loop.layers))
  return loop, loop.layers[place], period


def stacked_names(loops: Sequence[LayerLoop], array: str) -> list[str]:
  """Returns an array's names in checkpoints: one per period, if stacked."""
  layer, part = parse_name(array)
  if layer is None:
    return [array]
  loop, *_ = find_place(loops, layer)
  layers = (loop.number(layer, period) for period in range(loop.count))
  return [f"{layer_name(i)}/{part}" for i in layers]


def unstacked(items: Mapping[str, T]) -> dict[str, T]:
  """Returns the items of variables outside of all layers, by name."""
  return {x: y for x, y in items.items() if not is_stacked(x)}
