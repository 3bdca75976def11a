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
bubble        time in which stage 0 waits for the other stages
exchange      exchange of gradients between pods, except for the part that the
              backward pass of the last microbatch hides (never on TPUs or in
              stages)

With stages, all parts but the last two are those of stage 0, which is the
slowest unless FROZEN freezes its layers. The bubble is the time in which stage
0 waits.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from palm_mtf.accounting import communication, memory, newton_schulz
from palm_mtf.accounting.flops import device_flops
from palm_mtf.accounting.hardware import MEASURED, share_chip
from palm_mtf.accounting.work import AnyConfig, Work
from palm_mtf.architecture.block import model_of_layers
from palm_mtf.architecture.parameters import (
  first_stage_in_backward,
  frozen_in_stage,
)
from palm_mtf.config import HardwareConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.steps.plan import plan_step, stage_layers

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


def device_rates(config: AnyConfig) -> HardwareConfig:
  """Returns the FLOP/s, bandwidths and memory of one device.

  Raises UserError if a rate that the time of a step depends on is not known.
  """
  sharers = config.hardware.chip_devices
  if config.run.chip == MEASURED:  # this machine, shared by all devices
    sharers = config.pods.num_pods * config.mesh_layout.pod_devices
  rates = share_chip(config.hardware, sharers)
  _check_known(config, rates)
  return rates


def _check_known(config: AnyConfig, rates: HardwareConfig) -> None:
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


def predict_step(config: AnyConfig, batch_size: int) -> StepTime:
  """Returns the predicted time of a step over `batch_size` sequences."""
  work, rates = Work.of(config, batch_size), device_rates(config)
  if work.mesh.stages > 1:
    return _predict_stages(config, work)
  alone = _predict_mesh(rates, work)
  if work.pods.num_pods == 1:
    return alone
  link = pod_link(config, rates)
  if work.exchange.is_diloco:
    exposed, hidden = communication.sync_secs(work, alone.total, link)
    return dataclasses.replace(alone, exchange=exposed, hidden_exchange=hidden)
  # The program of a TPU pod outputs all gradients only when the program ends
  # (executors/xla/pod_arrays.py), so no computation hides the exchange.
  is_tpu = bool(work.mesh.tpu or rates.chip_link_dims)
  exposed = -alone.total + communication.step_secs(
    work, alone.total, link, overlaps=not is_tpu
  )
  sending = sum(communication.exchange_secs(work, link))
  hidden = max(0.0, sending - exposed)
  return dataclasses.replace(alone, exchange=exposed, hidden_exchange=hidden)


def _predict_mesh(rates: HardwareConfig, work: Work) -> StepTime:
  """Returns a step's time on one mesh, as if without other pods or stages.

  `rates` are those of a device.
  """
  mesh, dtype = work.mesh, work.model.activation_dtype
  peak = getattr(rates, f"chip_{dtype}_flops")
  of_update = newton_schulz.device_flops(work)
  of_update /= (rates.chip_float32_flops or peak) * rates.chip_efficiency
  kept = memory.device_bytes(work)
  passes = memory.Activations(work).traffic()
  passes["weights"] = memory.weight_traffic(work)
  measured = (rates.chip_pass_bandwidths or {}).get(dtype, {})
  # A kind of pass that was not measured runs at the bandwidth of memory.
  bandwidths = {
    kind: measured.get(kind, rates.chip_memory_bandwidth) for kind in passes
  }
  moved = communication.step_bytes(work)
  return StepTime(
    products=device_flops(work) / (peak * rates.chip_efficiency),
    passes=sum(passes[kind] / bandwidths[kind] for kind in passes),
    collectives={
      (kind, axes): num_bytes
      / mesh.num_devices
      / communication.axes_bandwidth(mesh, axes, rates, kind)
      for (kind, axes), num_bytes in moved.items()
    },
    update=memory.update_traffic(kept) / bandwidths["weights"] + of_update,
    exchange=0.0,
    hidden_exchange=0.0,
    moved=moved,
  )


def _predict_stages(config: AnyConfig, work: Work) -> StepTime:
  """Returns a step's time with pipeline stages: the parts of stage 0."""
  model, mesh, rates = work.model, work.mesh, device_rates(config)

  def predict(layers: Sequence[int], frozen: tuple[str, ...]) -> StepTime:
    own = model_of_layers(model, layers)
    changed = dataclasses.replace(work, model=own, frozen=frozen)
    return _predict_mesh(rates, changed)

  # The first stage also computes the logits. Another stage computes only
  # layers: leave out what one layer takes more than a second layer adds.
  others, updates = [], []
  for stage, layers in enumerate(stage_layers(model.num_layers, mesh.stages)):
    frozen = frozen_in_stage(model, work.frozen, stage, mesh.stages)
    outside = tuple(x for x in frozen if not x.startswith("layers/"))
    whole = predict(layers, frozen)
    if not stage:
      first = whole
      continue
    one, two = (predict([layers[0]] * n, outside) for n in (1, 2))
    of_layers = whole.total - whole.update - 2 * (one.total - one.update)
    others.append(of_layers + two.total - two.update)
    updates.append(whole.update - 2 * one.update + two.update)
  send = ("send", ("stages",))
  begin = first_stage_in_backward(model, work.frozen, mesh.stages)
  plan = plan_step(mesh, work.pods, work.exchange, first_backward=begin)
  sends = plan.sends_from(pod=0, stage=0)
  sent = sum(communication.edge_bytes(x, work) for x in sends)
  chips = mesh.pod_devices / config.hardware.chip_devices
  # Each stage of TPUs is a slice, and no links join slices.
  is_beyond_links = mesh.tpu or chips > (rates.chip_link_chips or chips)
  name = "chip_dcn_bandwidth" if is_beyond_links else "chip_link_bandwidth"
  secs = sent / mesh.num_devices / getattr(rates, name)
  of_first = first.total - first.update + secs
  stages = [of_first, *(other + secs for other in others)]
  exchange = hidden = 0.0
  if work.exchange.is_diloco and work.pods.num_pods > 1:
    whole = pipeline_secs(stages, mesh.num_microbatches)
    given = work, whole, pod_link(config, rates)
    exchange, hidden = communication.sync_secs(*given)
  elif work.pods.num_pods > 1:  # comes after all microbatches: not hidden
    link = pod_link(config, rates)
    embedding, rest = communication.exchange_secs(work, link)
    exchange = embedding + rest / mesh.stages
  return dataclasses.replace(
    first,
    collectives={**first.collectives, send: secs},
    moved={**first.moved, send: sent},
    bubble=pipeline_secs(stages, mesh.num_microbatches) - of_first,
    update=max(first.update, *updates),
    exchange=exchange,
    hidden_exchange=hidden,
  )


def bubble(mesh: DeviceMesh) -> float:
  """Returns the share of a step's time in which a stage is idle."""
  return (mesh.stages - 1) / (mesh.num_microbatches + mesh.stages - 1)


def pipeline_secs(secs: Sequence[float], num_microbatches: int) -> float:
  """Returns a step's seconds; stage s takes secs[s] for all microbatches."""
  # One microbatch goes through all stages; the other microbatches follow at the
  # pace of the slowest stage. For equal stages, the idle share is `bubble`.
  rest = (num_microbatches - 1) * max(secs)
  return (sum(secs) + rest) / num_microbatches


def pod_link(config: AnyConfig, rates: HardwareConfig) -> communication.Link:
  """Returns a pod's link to other pods: all links of its devices together."""
  bandwidth = rates.chip_dcn_bandwidth or math.inf
  return communication.Link(
    bits_per_sec=8 * bandwidth * config.mesh_layout.num_devices
  )
