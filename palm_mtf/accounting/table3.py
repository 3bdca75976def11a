# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's Table 3: MFU of large models, as published and as we compute it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from palm_mtf.accounting.flops import attention_flops_per_token, hfu
from palm_mtf.accounting.hardware import peak_of_devices
from palm_mtf.architecture.parameters import count_parameters
from palm_mtf.config import HardwareConfig, ModelConfig


class PublishedRun(NamedTuple):
  """A row of PaLM's Table 3, with the published numbers of one model."""

  name: str
  # Number of parameters; rounded, as published, except for PaLM.
  parameters: int
  chip: str  # name of a file in gin/hardware
  published: float  # MFU, 1.0 at the peak
  # Architecture, to compute attention's FLOPs. `shape`, `num_chips` and
  # `tokens_per_sec` (of all chips) are None if the paper does not give them;
  # then only the published MFU is shown.
  shape: ModelConfig | None = None
  num_chips: int | None = None
  tokens_per_sec: float | None = None
  # Share of the forward pass's matrix products that the paper counts as
  # recomputed (Table 22), for HFU; None if the paper gives no HFU.
  repeated_share: float | None = None
  # How the paper gives `tokens_per_sec`, or why this number is None.
  note: str = ""


def _shape(num_layers: int, num_heads: int, d_kv: int) -> ModelConfig:
  return ModelConfig(
    num_layers=num_layers,
    d_model=num_heads * d_kv,
    num_heads=num_heads,
    d_kv=d_kv,
    d_ff=4 * num_heads * d_kv,
    vocab_size=256_000,
    sequence_length=2048,
  )


PALM_540B = dataclasses.replace(_shape(118, 48, 256), d_model=18432, d_ff=73728)

RUNS = (
  PublishedRun(
    name="GPT-3",
    parameters=175_000_000_000,
    chip="v100",
    published=0.213,
    note="not reproducible: 24.6 TFLOP/s per GPU are 19.7% of its peak",
  ),
  PublishedRun(
    name="Gopher",
    parameters=280_000_000_000,
    shape=_shape(80, 128, 128),
    chip="tpu_v3",
    num_chips=4096,
    tokens_per_sec=0.0152 * 3072 * 2048,
    published=0.325,
    note="0.0152 steps/s of 3,072 sequences",
  ),
  PublishedRun(
    name="Megatron-Turing NLG",
    parameters=530_000_000_000,
    shape=_shape(105, 128, 160),
    chip="a100",
    num_chips=2240,
    tokens_per_sec=1920 * 2048 / 60.1,
    published=0.302,
    note="60.1 s per step of 1,920 sequences; the paper truncates 30.26",
  ),
  PublishedRun(
    name="PaLM",
    parameters=count_parameters(PALM_540B),
    shape=PALM_540B,
    chip="tpu_v4",
    num_chips=6144,
    tokens_per_sec=238_300,
    published=0.462,
    repeated_share=0.75,
    note="238.3K tokens/s",
  ),
)


def table3(
  hardware_of: Callable[[str], HardwareConfig],
) -> list[dict[str, object]]:
  """Returns one row per run: the published MFU, and our MFU and HFU.

  MFU is computed with and without attention. HFU is computed with the FLOPs
  that the paper's run recomputed, and with those of REMAT = "layer".
  `hardware_of` returns the rates of the chip with a given name.
  """
  rows = []
  for run in RUNS:
    names = ("mfu", "mfu_without_attention", "hfu", "hfu_of_remat_layer")
    row = {
      "model": run.name,
      "parameters": run.parameters,
      "chips": run.num_chips,
      "chip": run.chip,
      "published_mfu": run.published,
      **dict.fromkeys(names),
      "note": run.note,
    }
    if run.shape:
      hardware = hardware_of(run.chip)
      devices = run.num_chips * hardware.chip_devices
      peak = peak_of_devices(run.chip, hardware, devices)
      rate, products = run.tokens_per_sec / peak, 6 * run.parameters
      attention = attention_flops_per_token(run.shape)
      row["mfu"] = rate * (products + attention)
      row["mfu_without_attention"] = rate * products
      if run.repeated_share is not None:
        # A third of the FLOPs is the forward pass. The run repeated a share of
        # its products, and all of its attention.
        again = run.repeated_share * products / 3 + attention / 3
        row["hfu"] = rate * (products + attention + again)
        ours = dataclasses.replace(run.shape, remat="layer")
        row["hfu_of_remat_layer"] = hfu(run.tokens_per_sec, ours, peak)
    rows.append(row)
  return rows
