# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOP/s, bandwidths and memory of chips and of the devices on a chip."""

import dataclasses
import os

from palm_mtf import gin_path
from palm_mtf.architecture.parameters import check_frozen, parameter_dims
from palm_mtf.architecture.targets import check_targets
from palm_mtf.config import HardwareConfig, ModelConfig, PlanConfig
from palm_mtf.config.exchange import check_exchange
from palm_mtf.config.macros import values_of
from palm_mtf.config.mesh_layout import check_layout
from palm_mtf.errors import UserError, did_you_mean

# The value of CHIP that stands for this machine, which rates/ measures.
MEASURED = "measured"

# Fields of HardwareConfig that the devices of a chip share equally.
_SHARED = (
  "chip_bfloat16_flops",
  "chip_float32_flops",
  "chip_memory_bytes",
  "chip_memory_bandwidth",
  "chip_link_bandwidth",
  "chip_dcn_bandwidth",
  "chip_watts",
  "chip_hour_cost",
)


def chip_names() -> list[str]:
  """Returns the names of chips with rates in gin/hardware, sorted."""
  files = os.listdir(os.path.join(gin_path(), "hardware"))
  return sorted(x.removesuffix(".gin") for x in files if x.endswith(".gin"))


def check_chip(chip: str, hardware: HardwareConfig) -> None:
  """Raises UserError if MFU needs a peak of CHIP that is not known."""
  if chip != MEASURED:
    peak_flops_per_sec(chip, hardware)


def check_run(config: PlanConfig) -> None:
  """Raises UserError unless sizes, mesh, batches, pods and FROZEN fit together.

  Also if MFU needs a peak of CHIP that is not known, if routers would get no
  gradient, or if experts cannot begin as copies of a dense model's MLPs.
  """
  run, model = config.run, config.model
  sizes, num_pods = run.batch_sizes.sizes, config.pods.num_pods
  check_layout(config.mesh_layout, model, *sizes, num_pods=num_pods)
  check_exchange(config.exchange, run, values_of(config))
  check_chip(run.chip, config.hardware)
  if not model.model_function:  # only the function knows the names
    check_frozen(parameter_dims(model), run.frozen)
    check_targets(model)
  # Such an imported model decodes, so only training refuses it.
  if (model.experts_per_token, model.router_normalizes) == (1, True):
    raise UserError(
      "EXPERTS_PER_TOKEN = 1 and ROUTER_NORMALIZES = True: the only score, "
      "divided by itself, is 1, so the router would get no gradient: such a "
      "model can be decoded, but not trained. To train one from scratch, set "
      "ROUTER_NORMALIZES = False, or EXPERTS_PER_TOKEN = 2."
    )
  if model.adapter == "prefix" and model.capacity_factor is not None:
    raise UserError(
      f'ADAPTER = "prefix" and CAPACITY_FACTOR = {model.capacity_factor}: '
      "virtual positions, which hold no tokens, would take places of experts; "
      "set CAPACITY_FACTOR = None."
    )
  if run.init_experts == "copy":
    _check_copied_experts(model)


def _check_copied_experts(model: ModelConfig) -> None:
  given = 'INIT_EXPERTS = "copy" and'
  if not model.has_experts:
    raise UserError(
      f"{given} MLP = {model.mlp!r}: the model has no experts; leave "
      'INIT_EXPERTS out, or set MLP = "experts".'
    )
  # Only with these values do the factors of a token's experts add up to 1.
  for name, value in {
    "SHARED_EXPERTS": None,
    "ROUTER_NORMALIZES": True,
    "ROUTER_SCALE": 1.0,
  }.items():
    if (own := getattr(model, name.lower())) != value:
      raise UserError(
        f"{given} {name} = {own!r}: the model would not begin as the dense "
        f"model; set {name} = {value!r}."
      )


def peak_flops_per_sec(chip: str, hardware: HardwareConfig) -> float:
  """Returns the peak of a chip in bfloat16, FLOP/s.

  Raises UserError if CHIP is "measured", or CHIP_BFLOAT16_FLOPS is not set. A
  default would give a plausible but wrong MFU.
  """
  if chip != MEASURED and hardware.chip_bfloat16_flops:
    return hardware.chip_bfloat16_flops
  known = (MEASURED, *chip_names())
  # Names that begin with the given name come first, so that "h100" suggests
  # "h100_sxm" and not "v100", whose edit distance is smaller.
  name = str(chip).lower()
  guess = did_you_mean(name, [x for x in known if x.startswith(name)] or known)
  raise UserError(
    f"CHIP = {chip!r}{guess}: its peak FLOP/s is not "
    f"known. Choose one of {', '.join(map(repr, known))}, or set "
    "CHIP_BFLOAT16_FLOPS."
  )


def peak_of_devices(
  chip: str, hardware: HardwareConfig, num_devices: int
) -> float:
  """Returns the peak of `num_devices` TensorFlow devices together, FLOP/s.

  Raises UserError if CHIP is "measured", or the chip's peak is not set.
  """
  return (
    peak_flops_per_sec(chip, hardware) * num_devices / hardware.chip_devices
  )


def describe_remat(model: ModelConfig, hardware: HardwareConfig) -> ModelConfig:
  """Returns the model with the REMAT by which to count FLOPs and memory.

  Fused attention recomputes attention weights even with REMAT = "none", which
  thus counts as "attention".
  """
  if hardware.chip_fused_attention and model.remat == "none":
    return dataclasses.replace(model, remat="attention")
  return model


def share_chip(hardware: HardwareConfig, sharers: int) -> HardwareConfig:
  """Returns one device's rates and memory if `sharers` devices share a chip."""
  passes = hardware.chip_pass_bandwidths or {}
  return dataclasses.replace(
    hardware,
    chip_devices=1,
    chip_pass_bandwidths={
      dtype: {kind: value / sharers for kind, value in rates.items()}
      for dtype, rates in passes.items()
    },
    **{
      name: value / sharers
      for name in _SHARED
      if (value := getattr(hardware, name)) is not None
    },
  )
