# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Communication between pods in a step: bytes and seconds."""

import dataclasses
import math

from palm_mtf.accounting.memory import distinct_slices
from palm_mtf.accounting.optimizer_state import DTYPE_BYTES
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.pods import PodsConfig

# Sums over a device's tokens: of weights, of nats, and of squares of log z.
_TOKEN_SUMS = 3
# The backward pass is 4 N of the 6 N FLOPs of a token (flops.py).
_BACKWARD_SHARE = 4 / 6
# One after another, messages that wait for the link's delay: the client's order
# to the far pod, the last gradient, and the answer to the client.
_MESSAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """A pod's network link to the other pods."""

  bits_per_sec: float = math.inf  # each way; infinity is no limit
  delay_secs: float = 0.0  # each way


def dcn_bytes(config: PalmConfig, mesh: MeshLayout, pods: PodsConfig) -> int:
  """Returns the bytes that all pods together send each other in a step."""
  # pods (pods - 1) (numbers DCN_DTYPE + devices 3 float32)
  to_each = sum(sent_bytes(config, mesh, pods).values())
  to_each += mesh.num_devices * _TOKEN_SUMS * DTYPE_BYTES["float32"]
  return pods.num_pods * (pods.num_pods - 1) * to_each


def sent_bytes(
  config: PalmConfig, mesh: MeshLayout, pods: PodsConfig
) -> dict[str, int]:
  """Returns the bytes of gradients that a pod sends to one other pod.

  They are by name; a gradient of layer 0 stands for those of all layers.
  """
  width = DTYPE_BYTES[pods.dcn_dtype]
  # The replicas of a slice divide it: each device sends its own part to its
  # counterpart in the other pod. Parts are padded to equal sizes.
  return {
    name: mesh.num_devices * -(-each.size // each.num_replicas) * width * n
    for name, each, n in distinct_slices(config, mesh)
  }


def exchange_secs(
  config: PalmConfig, mesh: MeshLayout, pods: PodsConfig, link: Link
) -> tuple[float, float]:
  """Returns the seconds of sending the embedding's gradient, and all others.

  Args:
    config: architecture.
    mesh: devices and layout rules of each pod.
    pods: number of pods, and DCN_DTYPE.
    link: link of each pod.
  """
  sent = sent_bytes(config, mesh, pods)
  secs_per_byte = (pods.num_pods - 1) * 8 / link.bits_per_sec
  embedding = sent.pop("embedding")
  return embedding * secs_per_byte, sum(sent.values()) * secs_per_byte


def step_secs(
  config: PalmConfig,
  mesh: MeshLayout,
  pods: PodsConfig,
  compute_secs: float,
  link: Link,
  *,
  overlaps: bool = True,
) -> float:
  """Returns the predicted seconds of a step.

  Args:
    config: architecture.
    mesh: devices, layout rules and microbatches of each pod.
    pods: number of pods, and DCN_DTYPE.
    compute_secs: seconds of a step over a link without limits.
    link: link of each pod.
    overlaps: whether gradients are sent during the backward pass; otherwise
      all are sent after it.
  """
  embedding_secs, others_secs = exchange_secs(config, mesh, pods, link)
  # Gradients are sent while the last microbatch's backward pass computes those
  # of earlier layers. That of the embedding, which the first layer reads, is
  # ready at the end: nothing hides it.
  backward_secs = _BACKWARD_SHARE * compute_secs / mesh.num_microbatches
  if not overlaps:
    backward_secs = 0.0
  exposed_secs = max(0.0, others_secs - backward_secs) + embedding_secs
  return compute_secs + exposed_secs + _MESSAGES * link.delay_secs
