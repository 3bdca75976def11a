# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One chip's rates and memory, from the gin/hardware file that CHIP names."""

import dataclasses
from collections.abc import Iterable, Mapping

from palm_mtf.errors import UserError

# The largest values of these macros. For all other rates the limit is
# _MOST_RATE, so that products of rates do not overflow.
_MOST = {"CHIP_DEVICES": 1024, "CHIP_LINK_DIMS": 6, "CHIP_LINK_CHIPS": 10**9}
_MOST_RATE = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareConfig:
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
    chip_pass_bandwidths: {dtype: {kind: bytes/s}} of passes, which are
      operations other than matrix products; `PASSES` in accounting/memory.py
      lists the kinds. Without a value, a pass runs at chip_memory_bandwidth.
      CPUs need values, because their arithmetic limits passes.
    chip_process_bytes: memory of a process besides the tensors of its step.
    chip_fused_attention: whether the backward pass recomputes attention weights
      with any REMAT, as on CPUs with a C++ compiler.
    chip_link_bandwidth: bytes/s of a chip's links to other chips of the pod,
      all links together.
    chip_link_dims: number of dimensions of the links' torus; 0 for a switch.
    chip_link_chips: maximum number of chips on one torus or switch; the network
      joins chips on different switches. None for no limit.
    chip_dcn_bandwidth: bytes/s of a chip's share of its host's network.
    chip_watts: power, hosts included if the source says so.
    chip_hour_cost: price of one chip for one hour, in any currency.
  """

  chip_bfloat16_flops: float | None = None
  chip_float32_flops: float | None = None
  chip_efficiency: float = 0.76
  chip_devices: int = 1
  chip_memory_bytes: float | None = None
  chip_memory_bandwidth: float | None = None
  chip_pass_bandwidths: Mapping[str, Mapping[str, float]] | None = None
  chip_process_bytes: float | None = None
  chip_fused_attention: bool = False
  chip_link_bandwidth: float | None = None
  chip_link_dims: int = 0
  chip_link_chips: int | None = None
  chip_dcn_bandwidth: float | None = None
  chip_watts: float | None = None
  chip_hour_cost: float | None = None

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      name, value = field.name.upper(), getattr(self, field.name)
      if value is None and field.default is None:
        continue
      if isinstance(field.default, bool):
        if not isinstance(value, bool):
          raise UserError(f"{name} = {value!r}: give True or False.")
        continue
      if name == "CHIP_PASS_BANDWIDTHS":
        _check_bandwidths(name, value)
        continue
      is_number = type(value) in (int, float)
      most = _MOST.get(name, _MOST_RATE)
      if not is_number or not 0 <= value <= most:
        raise UserError(
          f"{name} = {value!r}: give a number from 0 to {most:g}."
        )
      may_be_0 = name in ("CHIP_LINK_DIMS", "CHIP_WATTS", "CHIP_HOUR_COST")
      if not value and not may_be_0:
        raise UserError(f"{name} = {value!r}: give a number above 0.")
    if self.chip_efficiency > 1:
      raise UserError(
        f"CHIP_EFFICIENCY = {self.chip_efficiency!r}: a share, at most 1."
      )


def _check_bandwidths(name: str, value: object) -> None:
  """Raises UserError unless `value` is {dtype: {kind of pass: bytes/s}}."""
  dtypes: Iterable[object] = (
    value.values() if isinstance(value, Mapping) else [value]
  )
  rates = [
    rate
    for kinds in dtypes
    for rate in (kinds.values() if isinstance(kinds, Mapping) else [None])
  ]
  are_rates = all(
    isinstance(x, (int, float))
    and not isinstance(x, bool)
    and 0 < x <= _MOST_RATE
    for x in rates
  )
  if not are_rates:
    raise UserError(
      f"{name} = {value!r}: give bytes/s by dtype and kind, as in "
      '{"float32": {"blocks": 5e9}}.'
    )
