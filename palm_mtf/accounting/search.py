# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Search over layouts: every way to spread a step over a number of devices."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from palm_mtf.accounting.hardware import MEASURED
from palm_mtf.accounting.plan import AnyConfig, divisors, memory_parts
from palm_mtf.accounting.step_time import StepTime, device_rates, predicted
from palm_mtf.config.mesh_layout import MeshLayout, check
from palm_mtf.config.pods import MAX_PODS
from palm_mtf.config.tpu_slice import slice_with, tpu_slice
from palm_mtf.errors import UserError

_REMATS = ("none", "attention", "layer")
# What the model axis may split, and what is stored or lies split besides.
_OF_MODEL = ("heads", "d_ff", "vocab")

_MAX_CANDIDATES = 100_000  # a minute or two


@dataclasses.dataclass(frozen=True)
class Found:
  """One way to spread a step, with its prediction."""

  config: AnyConfig
  step: StepTime
  device_bytes: int


@dataclasses.dataclass(frozen=True)
class SearchResult:
  """What a search found.

  Attributes:
    fitting: those that fit into memory, fastest first.
    num_candidates: how many were planned.
    least_bytes: least memory of a device that any of them needs.
  """

  fitting: Sequence[Found]
  num_candidates: int
  least_bytes: int


def search(config: AnyConfig, num_devices: int) -> SearchResult:
  """Plans every candidate with the largest batch of the run.

  Args:
    config: architecture with its dtype, optimizer, batch and CHIP.
    num_devices: devices of all pods together.

  Raises:
    UserError: no slice of TPUs has so many devices, or there are too many
      candidates.
  """
  most = _most_candidates(config, num_devices)
  if most > _MAX_CANDIDATES:
    raise UserError(
      f"--search: up to {most:,} candidates for {num_devices:,} devices and "
      f"GLOBAL_BATCH_SIZE = {config.run.global_batch_size}, and at most "
      f"{_MAX_CANDIDATES:,} are planned; use numbers with fewer divisors, such "
      "as powers of 2."
    )
  batch_size = config.run.batch_sizes.largest
  found, num_candidates, least = [], 0, []
  for each in candidates(config, num_devices):
    num_candidates += 1
    needed = sum(memory_parts(each, batch_size).values())
    least.append(needed)
    if needed <= device_rates(each).chip_memory_bytes:
      found.append(Found(each, predicted(each, batch_size), needed))
  if not num_candidates:
    raise UserError(
      f"--devices = {num_devices}: no slice of TPUs that has a name makes pods "
      f"of so many devices; set TPU and MESH_SHAPE to one pod's, now TPU = "
      f'"{config.mesh_layout.tpu}".'
    )
  # Of equals the one with fewer rules.
  found.sort(key=lambda x: (x.step.total, len(x.config.mesh_layout.layout)))
  return SearchResult(found, num_candidates, min(least))


def candidates(config: AnyConfig, num_devices: int) -> Iterator[AnyConfig]:
  """Yields every configuration that divides evenly."""
  for num_pods, tpu, data_size, model_size in _meshes(config, num_devices):
    pods = dataclasses.replace(config.pods, num_pods=num_pods)
    for layout in _layouts(data_size, model_size):
      mesh = MeshLayout(
        mesh_shape=_mesh_shape(data_size, model_size),
        layout=layout,
        gradient_dtype=config.mesh_layout.gradient_dtype,
        tpu=tpu,
        # Pods exchange gradients after each step.
        steps_per_loop=config.mesh_layout.steps_per_loop
        if num_pods == 1
        else 1,
      )
      for parts in _microbatches(config, num_pods, data_size):
        layout_of_parts = dataclasses.replace(mesh, num_microbatches=parts)
        if not _divides(layout_of_parts, config, num_pods):
          continue
        for remat in _REMATS:
          yield dataclasses.replace(
            config,
            mesh_layout=layout_of_parts,
            pods=pods,
            model=dataclasses.replace(config.model, remat=remat),
          )


def _meshes(
  config: AnyConfig, num_devices: int
) -> Iterator[tuple[int, str, int, int]]:
  """Yields pods, slice of each, and its sizes of the data and model axes."""
  for num_pods in _pod_counts(config, num_devices):
    size = num_devices // num_pods
    tpu = _slice(config.mesh_layout.tpu, size)
    if tpu is not None:
      for model_size in divisors(size):
        yield num_pods, tpu, size // model_size, model_size


def _most_candidates(config: AnyConfig, num_devices: int) -> int:
  """Returns how many candidates there are if all of them divide evenly."""
  return sum(
    len([*_layouts(data_size, model_size)])
    * len([*_microbatches(config, num_pods, data_size)])
    * len(_REMATS)
    for num_pods, _, data_size, model_size in _meshes(config, num_devices)
  )


def shares(found: Found) -> str:
  """Returns what a step consists of, the largest part first."""
  step = found.step
  parts = {x: getattr(step, x) for x in ("products", "passes", "update")}
  parts["collectives"] = sum(step.collectives.values())
  parts["exchange"] = step.exchange
  largest = sorted(parts.items(), key=lambda x: -x[1])
  return ", ".join(
    f"{name} {secs / step.total:.0%}"
    for name, secs in largest
    if secs >= 0.005 * step.total
  )


def reason(best: Found, other: Found) -> str:
  """Returns the part of a step in which another candidate loses most."""
  parts = {
    x: getattr(other.step, x) - getattr(best.step, x)
    for x in ("products", "passes", "update", "exchange")
  }
  # Each kind of collective by itself: its axis says what to change.
  for key in {*best.step.collectives, *other.step.collectives}:
    name = f"{key[0]} over {'+'.join(key[1])}"
    lost = other.step.collectives.get(key, 0.0)
    parts[name] = lost - best.step.collectives.get(key, 0.0)
  name, secs = max(parts.items(), key=lambda x: x[1])
  return f"{name} {secs:+.3g} s"


def _pod_counts(config: AnyConfig, num_devices: int) -> Iterator[int]:
  hardware, pods = config.hardware, config.pods
  for n in divisors(num_devices):
    if n > MAX_PODS or (n > 1 and hardware.chip_dcn_bandwidth is None):
      continue
    # TPUs of a process are one pod.
    if n > 1 and config.mesh_layout.tpu and pods.pods == "in_process":
      continue
    # On a torus a pod's links end somewhere.
    most = (hardware.chip_link_chips or num_devices) * hardware.chip_devices
    is_torus = hardware.chip_link_dims and config.run.chip != MEASURED
    if not is_torus or num_devices // n <= most:
      yield n


def _slice(name: str, num_devices: int) -> str | None:
  """Returns the slice of TPUs for a pod, None where none is known."""
  if not name or tpu_slice(name).num_devices == num_devices:
    return name
  found = slice_with(name.partition("-")[0], num_devices)
  return found and found.name


def _mesh_shape(data_size: int, model_size: int) -> str:
  axes = {"data": data_size, "model": model_size}
  return ",".join(f"{x}:{size}" for x, size in axes.items() if size > 1)


def _layouts(data_size: int, model_size: int) -> Iterator[str]:
  """Yields the layouts that use every axis of a mesh."""
  of_data = [[]]
  if data_size > 1:
    of_data = [["batch:data"], ["batch:data", "d_model_stored:data"]]
  of_model: list[list[str]] = [[]]
  if model_size > 1:
    of_model = [
      [f"{dim}:model" for dim in dims] + residual
      for n in range(1, len(_OF_MODEL) + 1)
      for dims in itertools.combinations(_OF_MODEL, n)
      for residual in ([], ["d_model_residual:model"])
    ]
  for first, second in itertools.product(of_data, of_model):
    yield ",".join([*first[:1], *second, *first[1:]])


def _microbatches(
  config: AnyConfig, num_pods: int, data_size: int
) -> Iterator[int]:
  least = min(config.run.batch_sizes.sizes)
  yield from divisors(max(1, least // num_pods // data_size))


def _divides(mesh: MeshLayout, config: AnyConfig, num_pods: int) -> bool:
  try:
    sizes = config.run.batch_sizes.sizes
    check(mesh, config.model, *sizes, num_pods=num_pods)
  except UserError:
    return False
  return True
