# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of chips, as their vendors state them."""

from palm_mtf.errors import UserError, did_you_mean

# CHIP = "measured": the rate of a matrix product on this machine
# (rates/peak_flops.py).
MEASURED = "measured"

# Dense products in bfloat16 of one chip, without sparsity; V100, which has no
# bfloat16, in float16.
PEAK_FLOPS_PER_SEC = {
  # https://cloud.google.com/tpu/docs/v2 and the page of each other version
  "tpu_v2": 45_000_000_000_000,
  "tpu_v3": 123_000_000_000_000,
  "tpu_v4": 275_000_000_000_000,
  "tpu_v5e": 197_000_000_000_000,
  "tpu_v5p": 459_000_000_000_000,
  "tpu_v6e": 918_000_000_000_000,
  # NVIDIA V100 data sheet: SXM2, "Tensor Performance"
  "v100": 125_000_000_000_000,
  # NVIDIA A100 data sheet: "BFLOAT16 Tensor Core"
  "a100": 312_000_000_000_000,
  # NVIDIA H100 architecture white paper: H100 SXM5, "Peak BF16 Tensor TFLOPS"
  "h100_sxm": 989_400_000_000_000,
  # NVIDIA H200 data sheet: 1,979 TFLOP/s with sparsity, as the H100's
  "h200": 989_400_000_000_000,
}


# TensorFlow's devices on a chip, where it is not one: a core each.
_DEVICES_OF_CHIP = {"tpu_v2": 2, "tpu_v3": 2}


def check_chip(chip: str) -> None:
  """Raises UserError unless `chip` is "measured" or in the table."""
  if chip != MEASURED:
    peak_flops_per_sec(chip)


def peak_flops_per_sec(chip: str) -> int:
  """Returns the peak of a chip of the table; raises UserError for others."""
  # Never a guess: a wrong peak gives a plausible and wrong MFU.
  if isinstance(chip, str) and chip in PEAK_FLOPS_PER_SEC:
    return PEAK_FLOPS_PER_SEC[chip]
  known = (MEASURED, *PEAK_FLOPS_PER_SEC)
  raise UserError(
    f"CHIP = {chip!r}{did_you_mean(str(chip), known)}: its peak FLOP/s is not "
    f"known. Choose one of {', '.join(map(repr, known))}."
  )


def peak_of_devices(chip: str, num_devices: int) -> float:
  """Returns the peak of devices of one kind together, FLOP/s.

  Args:
    chip: name in PEAK_FLOPS_PER_SEC.
    num_devices: number of TensorFlow's devices.
  """
  chips = num_devices / _DEVICES_OF_CHIP.get(chip, 1)
  return peak_flops_per_sec(chip) * chips
