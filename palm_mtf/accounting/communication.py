# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step sends between pods, over the data-center network.

Each device sends its slice of every gradient to its counterpart in each other
pod, once a step, and with it three sums over its tokens: of their weights, nats
and squares of log z.

  bytes = pods (pods - 1) (slices DCN_DTYPE + devices 3 float32)

where `slices` counts the numbers in all slices of one pod: those of all
parameters, where each device has a part of its own, and more where devices have
copies of one.
"""

import math

from palm_mtf.accounting.params import parameter_dims, parameter_shapes
from palm_mtf.config import PalmConfig
from palm_mtf.layout import MeshLayout
from palm_mtf.pods_config import PodsConfig

_NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
_TOKEN_SUMS = 3


def dcn_bytes(config: PalmConfig, mesh: MeshLayout, pods: PodsConfig) -> int:
  """Returns the bytes that all pods together send each other in one step.

  Args:
    config: the architecture.
    mesh: of each pod.
    pods: how many there are, and the dtype on the way.
  """
  to_each = sum(gradient_bytes(config, mesh, pods).values())
  to_each += mesh.num_devices * _TOKEN_SUMS * _NUMBER_BYTES["float32"]
  return pods.num_pods * (pods.num_pods - 1) * to_each


def gradient_bytes(
  config: PalmConfig, mesh: MeshLayout, pods: PodsConfig
) -> dict[str, int]:
  """Returns the bytes of each gradient that a pod sends to one other."""
  dims = parameter_dims(config)
  return {
    name: math.prod(shape)
    * mesh.num_devices
    // _num_slices(dims[name], mesh)
    * _NUMBER_BYTES[pods.dcn_dtype]
    for name, shape in parameter_shapes(config).items()
  }


def _num_slices(dims: tuple[str, ...], mesh: MeshLayout) -> int:
  """Returns into how many different slices a parameter is split."""
  rules = mesh.rules
  return math.prod(mesh.axes[rules[dim]] for dim in dims if dim in rules)
