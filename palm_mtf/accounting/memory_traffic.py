# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that passes beside the products read and write in device memory.

Products are bound by arithmetic, and their operands are not counted. A pass
reads each of its inputs once and writes each output once.

blocks     norms, residual sums, what is read of a product; the embedding
attention  the softmax of scores, and its gradient
loss       the cross entropy of logits, and its gradient
weights    casts, sums over microbatches, the update
"""

from palm_mtf.accounting.activations import device_tokens, widths
from palm_mtf.accounting.memory import (
  DeviceBytes,
  distinct_slices,
  gradient_bytes,
)
from palm_mtf.accounting.optimizer_state import DTYPE_BYTES
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import parsed

PASSES = ("blocks", "attention", "loss", "weights")

_FLOAT32 = DTYPE_BYTES["float32"]


def block_passes(config: PalmConfig, mesh: MeshLayout) -> dict[str, float]:
  """Returns numbers a token that a block's passes move in a step, by kind.

  Args:
    config: architecture.
    mesh: devices of a pod and layout rules.
  """
  w = widths(config, mesh)
  norms = 1 if config.block == "parallel" else 2
  read = w.queries + w.keys_and_values + w.hidden
  # Each norm, its residual sum; what is read of the product; the softmax.
  forward = {
    "blocks": norms * (2 * w.stream + 3 * w.residual) + w.columns + read,
    "attention": 2 * w.scores,
  }
  # The same again: a norm reads two and writes one, and a sum of gradients; the
  # product is read, and its gradient made of those of its parts; of attention
  # weights and their gradient comes that of the scores, and of two results.
  backward = {
    "blocks": norms * (3 * w.stream + 3 * w.residual) + 2 * w.columns + read,
    "attention": 3 * w.scores + 2 * w.queries,
  }
  # Before it, norms and what is read of a product (ops/recompute.py).
  again = {"blocks": norms * 2 * w.stream + w.columns + read}
  repeated = {
    "none": again,
    "attention": {**again, "attention": forward["attention"]},
    "layer": forward,
  }[config.remat]
  return {x: forward[x] + backward[x] + repeated.get(x, 0) for x in forward}


def activation_traffic(
  config: PalmConfig, mesh: MeshLayout, pod_batch_size: int
) -> dict[str, int]:
  """Returns the bytes of passes over activations in a step, of a device."""
  w, width = widths(config, mesh), DTYPE_BYTES[config.activation_dtype]
  logits = _FLOAT32 if config.logits_dtype == "float32" else width
  of_token = {
    kind: config.num_layers * width * numbers
    for kind, numbers in block_passes(config, mesh).items()
  }
  # The last norm, twice, and the embedding's rows, and their gradients, which
  # are summed in float32.
  of_token["blocks"] += w.stream * (7 * width + 3 * width + 2 * _FLOAT32)
  # The sums of a row, and the gradient, which is written.
  of_token["loss"] = w.vocab * (2 * logits + width)
  tokens = mesh.num_microbatches * device_tokens(config, mesh, pod_batch_size)
  return {kind: round(tokens * each) for kind, each in of_token.items()}


def weight_traffic(config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of weights cast, and of gradients summed, in a step."""
  width = DTYPE_BYTES[config.activation_dtype]
  total = 0
  for name, each, count in distinct_slices(config, mesh):
    of_number = 0
    if width != _FLOAT32:  # read and written, kernels on the way back too
      passes = 2 if parsed(name).is_kernel else 1
      of_number += passes * (_FLOAT32 + width)
    if mesh.num_microbatches > 1:  # the sum read and written, a gradient read
      of_number += 2 * _FLOAT32 + gradient_bytes(name, config, mesh)
    total += count * of_number * each.size
  return mesh.num_microbatches * total


def update_traffic(kept: DeviceBytes) -> int:
  """Returns the bytes that the optimizer moves in a step.

  Args:
    kept: bytes of weights, slots and gradients of the device.
  """
  # A gradient is read for the norm of all, for its moment and for its update; a
  # weight for its scale and, with each slot, to be read and written.
  return 3 * kept.gradients + 3 * kept.weights + 2 * kept.slots


def step_traffic(
  config: PalmConfig, mesh: MeshLayout, kept: DeviceBytes, pod_batch_size: int
) -> dict[str, int]:
  """Returns the bytes of all passes in a step, of a device, by kind."""
  weights = weight_traffic(config, mesh) + update_traffic(kept)
  return {
    **activation_traffic(config, mesh, pod_batch_size),
    "weights": weights,
  }
