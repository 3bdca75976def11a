# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a step of pods takes whose link has a bandwidth and a delay.

Gradients exist one after another in the backward pass, which is 4 N of a
token's 6 N FLOPs (flops.py), and cross meanwhile; that of the embedding, which
the first layer reads, exists at its end. So of what a pod sends

  step = compute + exposed + 3 delay
  exposed = max(0, others / bandwidth - backward) + embedding / bandwidth
  backward = 2/3 compute / NUM_MICROBATCHES

where `compute` is a step over a link without limits, and only the last
microbatch's backward pass hides anything. One after another three messages wait
for the delay: the client's order to the far pod, the last gradient, and the
answer to the client.
"""

import dataclasses
import math

from palm_mtf.accounting.communication import sent_bytes
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.pods import PodsConfig

_BACKWARD_SHARE = 4 / 6
_MESSAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """What joins a pod with the others.

  Attributes:
    bits_per_sec: each way; infinity is no limit.
    delay_secs: each way.
  """

  bits_per_sec: float = math.inf
  delay_secs: float = 0.0


def step_secs(
  config: PalmConfig,
  mesh: MeshLayout,
  pods: PodsConfig,
  compute_secs: float,
  link: Link,
) -> float:
  """Returns the seconds of a step.

  Args:
    config: the architecture.
    mesh: devices and layout rules of each pod, and its microbatches.
    pods: how many there are, and the dtype on the way.
    compute_secs: seconds of a step over a link without limits.
    link: the link of each pod.
  """
  sent = sent_bytes(config, mesh, pods)
  secs_per_byte = (pods.num_pods - 1) * 8 / link.bits_per_sec
  embedding_secs = sent.pop("embedding") * secs_per_byte
  backward_secs = _BACKWARD_SHARE * compute_secs / mesh.num_microbatches
  others_secs = sum(sent.values()) * secs_per_byte
  exposed_secs = max(0.0, others_secs - backward_secs) + embedding_secs
  return compute_secs + exposed_secs + _MESSAGES * link.delay_secs
