# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Search for the fastest pods, mesh, layout, microbatches and REMAT."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from palm_mtf.accounting.hardware import MEASURED
from palm_mtf.accounting.plan import REMATS, divides, divisors, memory_parts
from palm_mtf.accounting.step_time import StepTime, device_rates, predict_step
from palm_mtf.accounting.work import AnyConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.pods import MAX_PODS
from palm_mtf.config.tpu_slice import BOXES, tpu_slice
from palm_mtf.errors import UserError

# Dimensions that the mesh axis "model" may split.
_OF_MODEL = ("heads", "d_ff", "vocab")

_MAX_CANDIDATES = 100_000  # a search of so many takes a minute or two


@dataclasses.dataclass(frozen=True)
class Found:
  """A candidate's settings, and the predictions for these settings."""

  config: AnyConfig
  step: StepTime
  device_bytes: int


@dataclasses.dataclass(frozen=True)
class SearchResult:
  """The results of a search."""

  fitting: Sequence[Found]  # candidates that fit into memory, fastest first
  num_candidates: int  # number of all candidates
  least_bytes: int  # per device, of the candidate that needs the fewest bytes


def search(config: AnyConfig, num_devices: int) -> SearchResult:
  """Predicts time and memory of a step for every candidate.

  A candidate is a choice of the number of pods, mesh, layout, number of
  microbatches and REMAT for `num_devices` devices in all pods together. All
  other settings are those of `config`, with the run's largest batch size.

  Raises UserError if no TPU slice fits `num_devices`, or candidates are too
  many.
  """
  most = sum(  # at most: some layouts do not divide the model
    len([*_layouts(config, data_size, model_size)])
    * len(_microbatch_counts(config, num_pods, data_size))
    * len(REMATS)
    for num_pods, _, data_size, model_size in _meshes(config, num_devices)
  )
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
      found.append(Found(each, predict_step(each, batch_size), needed))
  if not num_candidates:
    raise UserError(
      f"--devices = {num_devices}: no TPU slice that has a name makes pods of "
      "so many devices; set TPU and MESH_SHAPE for one pod (TPU is now "
      f'"{config.mesh_layout.tpu}").'
    )
  # Of equally fast candidates, the simplest comes first: the shortest layout.
  found.sort(key=lambda x: (x.step.total, len(x.config.mesh_layout.layout)))
  return SearchResult(found, num_candidates, min(least))


def candidates(config: AnyConfig, num_devices: int) -> Iterator[AnyConfig]:
  """Yields every candidate whose layout divides the model and all batches."""
  for num_pods, tpu, data_size, model_size in _meshes(config, num_devices):
    pods = dataclasses.replace(config.pods, num_pods=num_pods)
    axes = {"data": data_size, "model": model_size}
    for layout in _layouts(config, data_size, model_size):
      mesh = MeshLayout(
        mesh_shape=",".join(f"{x}:{n}" for x, n in axes.items() if n > 1),
        layout=layout,
        gradient_dtype=config.mesh_layout.gradient_dtype,
        tpu=tpu,
        # Pods exchange gradients after each step, so one call is one step.
        steps_per_loop=config.mesh_layout.steps_per_loop
        if num_pods == 1
        else 1,
      )
      for parts in _microbatch_counts(config, num_pods, data_size):
        found = dataclasses.replace(
          config,
          mesh_layout=dataclasses.replace(mesh, num_microbatches=parts),
          pods=pods,
        )
        if divides(found, *config.run.batch_sizes.sizes):
          for remat in REMATS:
            model = dataclasses.replace(config.model, remat=remat)
            yield dataclasses.replace(found, model=model)


def _meshes(
  config: AnyConfig, num_devices: int
) -> Iterator[tuple[int, str, int, int]]:
  """Yields (number of pods, TPU of a pod, sizes of its axes data and model)."""
  for num_pods in _pod_counts(config, num_devices):
    size = num_devices // num_pods
    tpu = find_slice(config.mesh_layout.tpu, size)
    if tpu is not None:
      for model_size in divisors(size):
        yield num_pods, tpu, size // model_size, model_size


def shares(found: Found) -> str:
  """Returns what takes a step's time, such as "products 80%, passes 20%"."""
  total = found.step.total
  largest = sorted(found.step.parts.items(), key=lambda x: -x[1])
  return ", ".join(
    f"{name} {secs / total:.0%}"
    for name, secs in largest
    if secs >= 0.005 * total
  )


def reason(best: Found, other: Found) -> str:
  """Returns what makes `other` slower than `best`, as in "update +0.2 s"."""
  parts = {
    x: getattr(other.step, x) - getattr(best.step, x)
    for x in ("products", "passes", "update", "exchange")
  }
  # Collectives are compared per axis, because the result names an axis.
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
    # The TPUs of one process make only one pod.
    if n > 1 and config.mesh_layout.tpu and pods.pods == "in_process":
      continue
    # Links join at most this many devices. A pod on a torus cannot have more.
    most = (hardware.chip_link_chips or num_devices) * hardware.chip_devices
    is_torus = hardware.chip_link_dims and config.run.chip != MEASURED
    if not is_torus or num_devices // n <= most:
      yield n


def find_slice(name: str, num_devices: int) -> str | None:
  """Returns the name of a TPU slice with `num_devices` TensorFlow devices.

  The TPU is of the kind in `name`, such as "v4-128". The result is "" if `name`
  is "" (no TPU), and None if no slice has so many devices.

  A v4 or v5p slice may be any box of cubes of 4 x 4 x 4 chips. If several boxes
  have the wanted size, the result names the most cubic box.
  """
  if not name or tpu_slice(name).num_devices == num_devices:
    return name
  kind = name.partition("-")[0]
  # The number in the name of a v4 or v5p slice counts cores, two per device.
  num_cores = num_devices * (2 if kind in BOXES else 1)
  try:
    return tpu_slice(f"{kind}-{num_cores}").name
  except UserError:
    num_cubes, rest = divmod(num_devices, 4**3)
  if kind not in BOXES or rest:
    return None
  boxes = (
    (x, y, num_cubes // (x * y))
    for x in divisors(num_cubes)
    for y in divisors(num_cubes // x)
    if x <= y <= num_cubes // (x * y)
  )
  return f"{kind}-" + "x".join(str(4 * n) for n in min(boxes, key=sum))


def _layouts(
  config: AnyConfig, data_size: int, model_size: int
) -> Iterator[str]:
  """Yields layouts such as "batch:data,heads:model"; no axis is left unused."""
  of_data = [[]]
  if data_size > 1:
    of_data = [["batch:data"], ["batch:data", "d_model_stored:data"]]
    if config.model.has_experts:  # tokens move to the devices of their experts
      of_data += [[*x, "experts:data"] for x in of_data]
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


def _microbatch_counts(
  config: AnyConfig, num_pods: int, data_size: int
) -> list[int]:
  least = min(config.run.batch_sizes.sizes)
  return divisors(max(1, least // num_pods // data_size))
