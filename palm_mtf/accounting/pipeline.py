# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Order of the passes in a pipeline of stages, and what the order costs.

Stage s computes the layers s L/S to (s + 1) L/S - 1 (L layers, S stages). A
microbatch goes forward through all stages, then to the head (last norm, logits,
loss and their gradients), then backward through all stages. The head counts as
one more stage, on the devices of stage 0. A stage runs its passes in a fixed
order:

gpipe    all forward passes, then all backward passes (Huang et al. 2019)
1f1b     a backward pass as soon as one can run (Narayanan et al. 2019)

In both orders, a stage is idle for the time of S - 1 of M + S - 1 microbatches.
The orders differ in how many microbatches' activations a stage keeps.
docs/pods.md has a picture.
"""

import dataclasses
from collections.abc import Sequence

from palm_mtf.config import ModelConfig
from palm_mtf.config.device_mesh import DeviceMesh

FORWARD, HEAD, BACKWARD = "forward", "head", "backward"

Pass = tuple[str, int]  # FORWARD, HEAD or BACKWARD, and a microbatch's index


def stage_passes(mesh: DeviceMesh) -> list[list[Pass]]:
  """Returns a list of passes, in order, per stage, and one for the head."""
  stages = []
  for stage in range(mesh.stages):
    ahead = num_kept(stage, mesh)
    passes = [(FORWARD, i) for i in range(ahead)]
    for i in range(mesh.num_microbatches):
      passes.append((BACKWARD, i))
      if ahead + i < mesh.num_microbatches:
        passes.append((FORWARD, ahead + i))
    stages.append(passes)
  return [*stages, [(HEAD, i) for i in range(mesh.num_microbatches)]]


def num_kept(stage: int, mesh: DeviceMesh) -> int:
  """Returns how many microbatches' activations a stage keeps at most."""
  if mesh.stage_order == "gpipe":
    return mesh.num_microbatches
  # The last stage keeps two: it computes one while the other is in the head.
  return min(mesh.stages + 1 - stage, mesh.num_microbatches)


def bubble(mesh: DeviceMesh) -> float:
  """Returns the share of a step's time in which a stage is idle."""
  return (mesh.stages - 1) / (mesh.num_microbatches + mesh.stages - 1)


def pipeline_secs(secs: Sequence[float], num_microbatches: int) -> float:
  """Returns a step's seconds; stage s takes secs[s] for all microbatches."""
  # One microbatch goes through all stages; the other microbatches follow at the
  # pace of the slowest stage. For equal stages, the idle share is `bubble`.
  rest = (num_microbatches - 1) * max(secs)
  return (sum(secs) + rest) / num_microbatches


def stage_layers(config: ModelConfig, num_stages: int) -> list[range]:
  """Returns the numbers of each stage's layers, which all have equally many."""
  share = config.num_layers // num_stages
  return [range(i * share, (i + 1) * share) for i in range(num_stages)]


def model_of_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
  """Returns the settings of a model that has only some layers of `config`."""
  if len(layers) == config.num_layers:
    return config
  names = [config.variant_names[i] for i in layers] if config.layers else []
  return dataclasses.replace(
    config,
    num_layers=len(layers),
    layers=", ".join(names),
    variants={x: config.variants[x] for x in names} or None,
  )
