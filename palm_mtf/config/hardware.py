# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One chip's rates and memory, from the gin/hardware file that CHIP names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated

from palm_mtf.config.checked import Checked, real
from palm_mtf.errors import UserError, check_real

_MOST_RATE = 1e30  # so that products of rates do not overflow


def _above_0(most: float = _MOST_RATE) -> Callable[[str, object], None]:
  def check(name: str, value: object) -> None:
    check_real(name, value, 0, most)
    if not value:
      raise UserError(f"{name} = {value!r}: give a number above 0.")

  return check


def _check_bandwidths(name: str, value: object) -> None:
  if not isinstance(value, Mapping) or not all(
    isinstance(kinds, Mapping)
    and all(
      type(x) in (int, float) and 0 < x <= _MOST_RATE for x in kinds.values()
    )
    for kinds in value.values()
  ):
    raise UserError(
      f"{name} = {value!r}: give bytes/s by dtype and kind, as in "
      '{"float32": {"blocks": 5e9}}.'
    )


_Rate = Annotated[float | None, _above_0()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareConfig(Checked):
  """One chip's rates; None if a rate is unpublished.

  Bandwidths of links and of the network are those of one direction.

  Attributes:
    chip_bfloat16_flops: peak of dense products, FLOP/s.
    chip_float32_flops: peak of TensorFlow's float32 products, such as TF32 on
      an A100, FLOP/s.
    chip_efficiency: share of the peak that large products reach. The default is
      the MFU of PaLM 540B's prefill, which is almost only computation, on TPU
      v4 (Pope et al. 2022).
    chip_devices: number of TensorFlow devices on a chip.
    chip_memory_bytes: bytes of the chip's memory.
    chip_memory_bandwidth: bytes/s.
    chip_pass_bandwidths: {dtype: {kind: bytes/s}} of passes over memory:
      operations other than matrix products. `PASSES` in accounting/memory.py
      lists the kinds. Without a value, a pass runs at chip_memory_bandwidth.
      CPUs need values, because arithmetic, not memory, limits their passes.
    chip_process_bytes: bytes of a process, besides the tensors of its step.
    chip_fused_attention: whether the backward pass recomputes attention weights
      with any REMAT, as on CPUs with a C++ compiler.
    chip_link_bandwidth: bytes/s of a chip's links to other chips of the pod,
      all links together.
    chip_link_dims: number of dimensions of the links' torus; 0 for a switch.
    chip_link_chips: maximum number of chips on one torus or switch; the network
      joins chips on different switches. None for no limit.
    chip_dcn_bandwidth: bytes/s of a chip's share of its host's network.
    chip_watts: power in watts, hosts included if the source says so.
    chip_hour_cost: price of one chip for one hour, in any currency.
    chip_mtbi_hours: mean time between interruptions that one chip causes.
    chip_restart_secs: seconds from an interruption until the run computes
      again. The default is that of the report on Gemini 2.5 (2507.06261,
      section 2.3) without elasticity: "10 or more" minutes.
  """

  chip_bfloat16_flops: _Rate = None
  chip_float32_flops: _Rate = None
  chip_efficiency: Annotated[float, _above_0()] = 0.76
  chip_devices: Annotated[int, _above_0(1024)] = 1
  chip_memory_bytes: _Rate = None
  chip_memory_bandwidth: _Rate = None
  chip_pass_bandwidths: Annotated[
    Mapping[str, Mapping[str, float]] | None, _check_bandwidths
  ] = None
  chip_process_bytes: _Rate = None
  chip_fused_attention: bool = False
  chip_link_bandwidth: _Rate = None
  chip_link_dims: Annotated[int, real(0, 6)] = 0
  chip_link_chips: Annotated[int | None, _above_0(10**9)] = None
  chip_dcn_bandwidth: _Rate = None
  chip_watts: Annotated[float | None, real(0, _MOST_RATE)] = None
  chip_hour_cost: Annotated[float | None, real(0, _MOST_RATE)] = None
  chip_mtbi_hours: _Rate = None
  chip_restart_secs: Annotated[float, real(0, _MOST_RATE)] = 600.0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.chip_efficiency > 1:
      raise UserError(
        f"CHIP_EFFICIENCY = {self.chip_efficiency!r}: a share, at most 1."
      )
