# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a step, part by part.

products      matrix products, at CHIP_EFFICIENCY of the peak
passes        other reads and writes of activations and weights, at the
              bandwidth of memory
collectives   collectives within a pod and, between stages, sends of activations
              and their gradients, one after another, without overlap with
              computation
update        the optimizer, at the bandwidth of memory; for Muon, its products
              too, in float32 if the chip's rate for it is known
bubble        time in which the slowest stage waits for the other stages
exchange      exchange of gradients between pods, except for the part that the
              backward pass of the last microbatch hides (never on TPUs or in
              stages)

With stages, all parts but the last two are those of stage 0, the slowest.
"""

import dataclasses
import math
from collections.abc import Mapping

from palm_mtf.accounting import communication, memory, newton_schulz
from palm_mtf.accounting.flops import device_flops
from palm_mtf.accounting.hardware import MEASURED, describe_remat, share_chip
from palm_mtf.accounting.pipeline import pipeline_secs
from palm_mtf.config import Config, HardwareConfig, ModelConfig, PlanConfig
from palm_mtf.errors import UserError

Collective = tuple[str, tuple[str, ...]]  # such as ("all_reduce", ("data",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
  """Seconds of each part of a step; the parts run one after another."""

  products: float
  passes: float
  collectives: Mapping[Collective, float]
  update: float
  exchange: float  # the part that the backward pass does not hide
  hidden_exchange: float  # the other part, which adds no time to the step
  # Bytes that collectives move in a step, summed over all devices of a mesh.
  moved: Mapping[Collective, int]
  bubble: float = 0.0

  @property
  def total(self) -> float:
    """Seconds of the step."""
    return sum(self.parts.values())

  @property
  def parts(self) -> dict[str, float]:
    """{part: seconds}, in the order of execution."""
    return {
      "products": self.products,
      "passes": self.passes,
      "collectives": sum(self.collectives.values()),
      **({"bubble": self.bubble} if self.bubble else {}),
      "exchange": self.exchange,
      "update": self.update,
    }


def device_rates(config: Config | PlanConfig) -> HardwareConfig:
  """Returns the FLOP/s, bandwidths and memory of one device.

  Raises:
    UserError: if a rate that the time of a step depends on is not known.
  """
  sharers = config.hardware.chip_devices
  if config.run.chip == MEASURED:  # this machine, shared by all devices
    sharers = config.pods.num_pods * config.mesh_layout.pod_devices
  rates = share_chip(config.hardware, sharers)
  _check_known(config, rates)
  return rates


def _check_known(config: Config | PlanConfig, rates: HardwareConfig) -> None:
  chip, mesh = config.run.chip, config.mesh_layout
  if chip == MEASURED and not rates.chip_memory_bandwidth:
    raise UserError(
      'CHIP = "measured": the rates of this machine are not known yet, or are '
      "another version's; run `palm_mtf plan --calibrate`, or name a chip."
    )
  needed = ["chip_memory_bandwidth", "chip_memory_bytes"]
  needed.append(f"chip_{config.model.activation_dtype}_flops")
  if mesh.pod_devices > 1:
    needed.append("chip_link_bandwidth")
  chips = mesh.pod_devices / config.hardware.chip_devices
  is_beyond_links = chips > (rates.chip_link_chips or chips)
  if config.pods.num_pods > 1 or is_beyond_links:
    needed.append("chip_dcn_bandwidth")
  for name in needed:
    if getattr(rates, name) is None:
      or_else = ', or ACTIVATION_DTYPE = "bfloat16"' * ("float32" in name)
      raise UserError(
        f"{name.upper()} = None: not known for CHIP = {chip!r}; set it to plan"
        f"{or_else}."
      )
  # The network joins switches into one pod, but cannot join two toruses.
  if is_beyond_links and rates.chip_link_dims:
    raise UserError(
      f'MESH_SHAPE = "{mesh.mesh_shape}": a pod has {chips:,.0f} chips, but '
      f"links of CHIP = {chip!r} join {rates.chip_link_chips:,}; use more "
      "NUM_PODS."
    )


def predict_step(config: Config | PlanConfig, batch_size: int) -> StepTime:
  """Returns the predicted time of a step over `batch_size` sequences."""
  mesh, pods = config.mesh_layout, config.pods
  model = describe_remat(config.model, config.hardware)
  rates = device_rates(config)
  if mesh.stages > 1:
    return _predict_stages(config, model, batch_size)
  alone = _predict_mesh(config, model, batch_size)
  if pods.num_pods == 1:
    return alone
  link = pod_link(config, rates)
  # The program of a TPU pod outputs all gradients only when the program ends
  # (executors/xla/pod_arrays.py), so no computation hides the exchange.
  is_tpu = bool(mesh.tpu or rates.chip_link_dims)
  exposed = -alone.total + communication.step_secs(
    model, mesh, pods, alone.total, link, overlaps=not is_tpu
  )
  sending = sum(communication.exchange_secs(model, mesh, pods, link))
  hidden = max(0.0, sending - exposed)
  return dataclasses.replace(alone, exchange=exposed, hidden_exchange=hidden)


def _predict_mesh(
  config: Config | PlanConfig, model: ModelConfig, batch_size: int
) -> StepTime:
  """Returns a step's time on one mesh, as if without other pods or stages."""
  mesh, rates = config.mesh_layout, device_rates(config)
  pod_batch_size = batch_size // config.pods.num_pods
  peak = getattr(rates, f"chip_{model.activation_dtype}_flops")
  flops = device_flops(model, mesh, pod_batch_size * model.sequence_length)
  kept = memory.device_bytes(model, mesh, config.optimizer)
  of_update = newton_schulz.device_flops(model, mesh, config.optimizer)
  of_update /= (rates.chip_float32_flops or peak) * rates.chip_efficiency
  passes = memory.Activations(model, mesh, pod_batch_size).traffic()
  passes["weights"] = memory.weight_traffic(model, mesh)
  measured = (rates.chip_pass_bandwidths or {}).get(model.activation_dtype, {})
  # A kind of pass that was not measured runs at the bandwidth of memory.
  bandwidths = {
    kind: measured.get(kind, rates.chip_memory_bandwidth) for kind in passes
  }
  moved = communication.step_bytes(
    model,
    mesh,
    config.optimizer,
    pod_batch_size=pod_batch_size,
    num_pods=config.pods.num_pods,
  )
  return StepTime(
    products=flops / (peak * rates.chip_efficiency),
    passes=sum(passes[kind] / bandwidths[kind] for kind in passes),
    collectives={
      (kind, axes): num_bytes
      / mesh.num_devices
      / communication.axes_bandwidth(mesh, axes, rates)
      for (kind, axes), num_bytes in moved.items()
    },
    update=memory.update_traffic(kept) / bandwidths["weights"] + of_update,
    exchange=0.0,
    hidden_exchange=0.0,
    moved=moved,
  )


def _predict_stages(
  config: Config | PlanConfig, model: ModelConfig, batch_size: int
) -> StepTime:
  """Returns a step's time with pipeline stages: the slowest stage's parts."""
  mesh, pods, rates = config.mesh_layout, config.pods, device_rates(config)

  def predict(num_layers: int) -> StepTime:
    layers = dataclasses.replace(model, num_layers=num_layers)
    return _predict_mesh(config, layers, batch_size)

  # The first stage is the slowest, because it also computes the logits. Another
  # stage computes only layers; a layer takes the time that a second layer adds.
  num_layers = model.num_layers // mesh.stages
  first, one, two = predict(num_layers), predict(1), predict(2)
  other = num_layers * (two.total - two.update - one.total + one.update)
  # Per microbatch, activations go to the next stage, and gradients come back.
  send = ("send", ("stages",))
  activations = memory.Activations(model, mesh, batch_size // pods.num_pods)
  sent = 2 * mesh.num_microbatches * activations.stream_bytes()
  chips = mesh.pod_devices / config.hardware.chip_devices
  is_beyond_links = chips > (rates.chip_link_chips or chips)
  name = "chip_dcn_bandwidth" if is_beyond_links else "chip_link_bandwidth"
  secs = sent / getattr(rates, name)
  slowest = first.total - first.update + secs
  stages = [slowest, *[other + secs] * (mesh.stages - 1)]
  exchange = 0.0
  if pods.num_pods > 1:  # exchange comes after all microbatches: not hidden
    link = pod_link(config, rates)
    embedding, others = communication.exchange_secs(model, mesh, pods, link)
    exchange = embedding + others / mesh.stages
  return dataclasses.replace(
    first,
    collectives={**first.collectives, send: secs},
    moved={**first.moved, send: sent * mesh.num_devices},
    bubble=pipeline_secs(stages, mesh.num_microbatches) - slowest,
    exchange=exchange,
  )


def pod_link(
  config: Config | PlanConfig, rates: HardwareConfig
) -> communication.Link:
  """Returns a pod's link to other pods: all links of its devices together."""
  bandwidth = rates.chip_dcn_bandwidth or math.inf
  return communication.Link(
    bits_per_sec=8 * bandwidth * config.mesh_layout.num_devices
  )
