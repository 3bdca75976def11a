# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The text of a search over layouts, for people."""

from collections.abc import Mapping, Sequence
from typing import Any


def search_text(
  records: Sequence[Mapping[str, Any]], num_devices: int, summary: str
) -> str:
  """Returns the table of the fastest layouts.

  Args:
    records: a layout each, fastest first.
    num_devices: devices of all pods.
    summary: a line behind the table.
  """
  lines = [
    f"layouts of {num_devices:,} devices, fastest first",
    f"{'s/step':>9}{'tokens/s':>12}{'MFU':>7}{'GiB':>7}  pods  microbatches  "
    f"{'REMAT':<9}  MESH_SHAPE and LAYOUT",
  ]
  for each in records:
    settings = each["settings"]
    lines += [
      f"{each['step_secs']:>9.4g}{each['tokens_per_sec']:>12,.0f}"
      f"{each['mfu']:>7.1%}{each['device_bytes'] / 2**30:>7.2f}  "
      f"{settings['NUM_PODS']:>4}  {settings['NUM_MICROBATCHES']:>12}  "
      f"{settings['REMAT']:<9}  {settings['MESH_SHAPE'] or '(one device)'}  "
      f"{_short(settings['LAYOUT'])}",
      f"{'':>9}{each['reason']}",
    ]
  return "\n".join([*lines, summary])


def _short(layout: str) -> str:
  """Returns rules by axis: data(batch) model(heads d_ff)."""
  by_axis: dict[str, list[str]] = {}
  for rule in filter(None, layout.split(",")):
    dim, axis = rule.split(":")
    by_axis.setdefault(axis, []).append(dim)
  return " ".join(f"{axis}({' '.join(x)})" for axis, x in by_axis.items())
