# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step sends between pods, over the data-center network.

Each device sends its own part of every gradient to its counterpart in each
other pod, once a step, and with it three sums over its tokens: of their
weights, nats and squares of log z.

  bytes = pods (pods - 1) (numbers DCN_DTYPE + devices 3 float32)

where `numbers` are those of all parameters, whatever the layout, and the few by
which the parts of a slice are padded to be of one size.
"""

from palm_mtf.accounting.memory import parameter_slices
from palm_mtf.accounting.optimizer_state import DTYPE_BYTES
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.pods import PodsConfig

_TOKEN_SUMS = 3


def dcn_bytes(config: PalmConfig, mesh: MeshLayout, pods: PodsConfig) -> int:
  """Returns the bytes that all pods together send each other in one step.

  Args:
    config: the architecture.
    mesh: devices and layout rules of each pod.
    pods: how many there are, and the dtype on the way.
  """
  to_each = sum(sent_bytes(config, mesh, pods).values())
  to_each += mesh.num_devices * _TOKEN_SUMS * DTYPE_BYTES["float32"]
  return pods.num_pods * (pods.num_pods - 1) * to_each


def sent_bytes(
  config: PalmConfig, mesh: MeshLayout, pods: PodsConfig
) -> dict[str, int]:
  """Returns the bytes of each gradient that a pod sends to one other."""
  width = DTYPE_BYTES[pods.dcn_dtype]
  return {
    name: mesh.num_devices * -(-each.size // each.copies) * width
    for name, each in parameter_slices(config, mesh).items()
  }
