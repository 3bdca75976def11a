# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What-if curves: step time and MFU against one setting at a time."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from palm_mtf.accounting.plan import AnyConfig, fits, rates_of
from palm_mtf.accounting.step_time import predicted
from palm_mtf.config.mesh_layout import check
from palm_mtf.config.model import MAX_SIZES
from palm_mtf.config.pods import MAX_PODS
from palm_mtf.errors import UserError

_FACTORS = tuple(2.0**n for n in range(-6, 4))  # 1/64 to 8


def curves(config: AnyConfig) -> dict[str, list[dict[str, Any]]]:
  """Returns points by macro: value, seconds, tokens/s, MFU and whether it fits.

  CHIP_DCN_BANDWIDTH    all else as it is
  NUM_PODS              each with as many sequences
  GLOBAL_BATCH_SIZE     all else as it is
  SEQUENCE_LENGTH       in steps of as many tokens

  A value that does not divide is left out.

  Args:
    config: settings that fit together, with the largest batch of the run.
  """
  batch_size = config.run.batch_sizes.largest
  variants = {
    "CHIP_DCN_BANDWIDTH": _networks(config, batch_size),
    "NUM_PODS": _pods(config, batch_size),
    "GLOBAL_BATCH_SIZE": _batches(config, batch_size),
    "SEQUENCE_LENGTH": _lengths(config, batch_size),
  }
  found = {}
  for macro, points in variants.items():
    planned = [_point(*point) for point in points if _divides(*point[1:])]
    if len(planned) > 1:
      found[macro] = planned
  return found


_Point = tuple[float, AnyConfig, int]  # value, settings, batch size


def _networks(config: AnyConfig, batch_size: int) -> Iterator[_Point]:
  bandwidth = config.hardware.chip_dcn_bandwidth
  if config.pods.num_pods > 1 and bandwidth:
    for factor in _FACTORS:
      value = bandwidth * factor
      hardware = dataclasses.replace(config.hardware, chip_dcn_bandwidth=value)
      yield value, dataclasses.replace(config, hardware=hardware), batch_size


def _pods(config: AnyConfig, batch_size: int) -> Iterator[_Point]:
  if config.hardware.chip_dcn_bandwidth is None:
    return
  of_pod = batch_size // config.pods.num_pods
  for n in range(1, MAX_PODS + 1):
    pods = dataclasses.replace(config.pods, num_pods=n)
    yield n, dataclasses.replace(config, pods=pods), n * of_pod


def _batches(config: AnyConfig, batch_size: int) -> Iterator[_Point]:
  for factor in _FACTORS:
    yield batch_size * factor, config, int(batch_size * factor)


def _lengths(config: AnyConfig, batch_size: int) -> Iterator[_Point]:
  for factor in _FACTORS:
    length = int(config.model.sequence_length * factor)
    if 1 <= length <= MAX_SIZES["sequence_length"]:
      model = dataclasses.replace(config.model, sequence_length=length)
      rows = int(batch_size / factor)
      yield length, dataclasses.replace(config, model=model), rows


def _divides(config: AnyConfig, batch_size: int) -> bool:
  try:
    check(
      config.mesh_layout,
      config.model,
      batch_size,
      num_pods=config.pods.num_pods,
    )
  except UserError:
    return False
  return batch_size > 0


def _point(value: float, config: AnyConfig, batch_size: int) -> dict[str, Any]:
  secs = predicted(config, batch_size).total
  return {
    "value": value,
    "batch_size": batch_size,
    "step_secs": secs,
    **rates_of(config, batch_size, secs),
    "fits": fits(config, batch_size),
  }
