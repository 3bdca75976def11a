# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf plan --search`: the fastest layouts that fit, best first."""

import math
import os

from palm_mtf.accounting.plan import changes_between, rates_of
from palm_mtf.accounting.search import (
  Found,
  SearchResult,
  reason,
  search,
  shares,
)
from palm_mtf.accounting.step_time import device_rates
from palm_mtf.config import PlanConfig
from palm_mtf.config.device_mesh import MAX_DEVICES
from palm_mtf.errors import UserError, check_count
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.report.search_text import search_text

_NUM_SHOWN = 10


def print_search(
  config: PlanConfig,
  *,
  num_devices: int | None,
  output: str | None,
  as_json: bool,
) -> None:
  """Prints the fastest layouts, and writes the first as a gin file.

  Args:
    config: settings that fit together.
    num_devices: devices of all pods; None for those of the configuration.
    output: path of the gin file, or None.
    as_json: whether to print one JSON object a layout.

  Raises:
    UserError: no slice of TPUs has so many devices, or no layout fits into
      memory.
  """
  given = config.pods.num_pods * config.mesh_layout.num_devices
  num_devices = given if num_devices is None else num_devices
  check_count("--devices", num_devices, maximum=MAX_DEVICES)
  result = search(config, num_devices)
  has = device_rates(config).chip_memory_bytes
  if not result.fitting:
    enough = num_devices * math.ceil(result.least_bytes / has)
    raise UserError(
      f"--search: none of {result.num_candidates:,} candidates fits: the "
      f"smallest needs {result.least_bytes / 2**30:.1f} of {has / 2**30:.1f} "
      f"GiB a device; try --devices {enough}."
    )
  best = result.fitting[0]
  records = [_record(each, best) for each in result.fitting[:_NUM_SHOWN]]
  if as_json:
    print("\n".join(map(json_text, records)))
  else:
    print(search_text(records, num_devices, _summary(result, config)))
  if output:
    content = _gin_file(best.config, records[0], num_devices)
    write_atomically(os.path.expanduser(output), content.encode())


def _record(found: Found, best: Found) -> dict[str, object]:
  config, mesh = found.config, found.config.mesh_layout
  batch_size = config.run.batch_sizes.largest
  return {
    "settings": {
      "NUM_PODS": config.pods.num_pods,
      "TPU": mesh.tpu,
      "MESH_SHAPE": mesh.mesh_shape,
      "LAYOUT": mesh.layout,
      "NUM_MICROBATCHES": mesh.num_microbatches,
      "STEPS_PER_LOOP": mesh.steps_per_loop,
      "REMAT": config.model.remat,
    },
    "step_secs": found.step.total,
    **rates_of(config, batch_size, found.step.total),
    "device_bytes": found.device_bytes,
    "reason": shares(found)
    if found is best
    else f"slower by {reason(best, found)}",
  }


def _summary(result: SearchResult, config: PlanConfig) -> str:
  """Returns how many were planned, and where the given one stands."""
  text = (
    f"{len(result.fitting):,} of {result.num_candidates:,} candidates fit into "
    "memory"
  )
  for place, each in enumerate(result.fitting, 1):
    changed = changes_between(config, each.config)
    # Order and spaces of rules are the user's own.
    if _mesh_rules(each.config) == _mesh_rules(config) and not (
      changed.keys() - {"LAYOUT", "MESH_SHAPE"}
    ):
      return f"{text}; the given settings are number {place}"
  return text


def _mesh_rules(config: PlanConfig) -> tuple[dict[str, int], dict[str, str]]:
  """Returns axes and rules, however they are written."""
  return config.mesh_layout.axes, config.mesh_layout.rules


def _gin_file(
  config: PlanConfig, record: dict[str, object], num_devices: int
) -> str:
  lines = [
    f"# Found by `palm_mtf plan --search` for {num_devices:,} devices, CHIP = "
    f'"{config.run.chip}":',
    f"# {record['step_secs']:.4g} s a step predicted. After the recipe:",
    "#   palm_mtf train --gin_file=RECIPE --gin_file=THIS",
    *(f"{name} = {value!r}" for name, value in record["settings"].items()),
  ]
  return "\n".join(lines) + "\n"
