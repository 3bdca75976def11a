# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan: predicted memory, traffic, time and cost of a run on its CHIP."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from palm_mtf.accounting import communication, flops, memory, newton_schulz
from palm_mtf.accounting.goodput import goodput
from palm_mtf.accounting.hardware import MEASURED, peak_of_devices
from palm_mtf.accounting.step_time import StepTime, device_rates, predict_step
from palm_mtf.accounting.work import AnyConfig, Work
from palm_mtf.architecture.parameters import (
  distinct_parameters,
  first_stage_in_backward,
  parse_name,
)
from palm_mtf.config.mesh_layout import check_layout
from palm_mtf.errors import UserError
from palm_mtf.steps.plan import num_kept, plan_step

REMATS = ("none", "attention", "layer")
_MAX_CALLS = 100_000  # each is an object: millions take gigabytes
_HOUR = 3600
_JOULES_OF_KWH = 3.6e6


def memory_parts(
  config: AnyConfig, batch_size: int, stage: int | None = None
) -> dict[str, int]:
  """Returns {use of memory, such as "weights": bytes on a device at the peak}.

  The device is in pipeline stage `stage`; for None, in the stage that needs the
  most memory.
  """
  if stage is None:
    stages = range(config.mesh_layout.stages)
    of_stages = (memory_parts(config, batch_size, x) for x in stages)
    return max(of_stages, key=lambda x: sum(x.values()))
  tensors = tensor_bytes(Work.of(config, batch_size).in_stage(stage))
  pods, num_devices = config.pods, config.mesh_layout.num_devices
  if pods.pods == "in_process":  # one process has all devices
    num_devices *= pods.num_pods * config.mesh_layout.stages
  # A process also needs memory for code and buffers: count a device's share.
  process = round((config.hardware.chip_process_bytes or 0) / num_devices)
  return {**({"process": process} if process else {}), **tensors}


def tensor_bytes(work: Work) -> dict[str, int]:
  """Returns {part of the memory: a device's peak bytes}, of tensors only.

  `work` is that of one stage, if there are several.
  """
  mesh, more, microbatches = work.mesh, {}, 1
  kept, activations = memory.device_bytes(work), memory.Activations(work)
  if mesh.stages > 1:
    microbatches = num_kept(work.stage, mesh)
    more["waiting"] = activations.waiting_bytes()
  elif mesh.num_microbatches > 1:
    # Besides the step's gradients, which the update reads (`kept.gradients`),
    # accumulators of equal size hold the sums of all but the last microbatch.
    more["microbatch sums"] = kept.gradients
  frozen, outer = kept.frozen_weights, memory.outer_bytes(work)
  return {
    "weights": kept.weights,
    **({"frozen weights": frozen} if frozen else {}),
    "slots": kept.slots,
    **({"outer state": outer} if outer else {}),
    "gradients": kept.gradients,
    **more,
    "activations": microbatches * activations.kept_bytes(),
    "weight copies": memory.weight_copy_bytes(work),
    # The maximum: working memory is free before other pods' gradients arrive,
    # and their buffers are free when the optimizer multiplies.
    "buffers": max(
      activations.working_bytes(),
      memory.exchange_bytes(work),
      newton_schulz.buffer_bytes(work),
    ),
  }


def describe_step(
  config: AnyConfig, *, on_accelerators: bool
) -> dict[str, Any]:
  """Returns the step of the first batch size as data, with bytes of its edges.

  `on_accelerators` is an argument of `plan_step`.

  Raises UserError if the step has more than _MAX_CALLS calls.
  """
  mesh, pods, frozen = config.mesh_layout, config.pods, config.run.frozen
  passes = 2 * mesh.stages + 1 if mesh.stages > 1 else not on_accelerators
  num_calls = pods.num_pods * passes * mesh.num_microbatches
  if num_calls > _MAX_CALLS:
    raise UserError(
      f"--steps: NUM_PODS = {pods.num_pods}, STAGES = {mesh.stages} and "
      f"NUM_MICROBATCHES = {mesh.num_microbatches} make {num_calls:,} calls, "
      f"and at most {_MAX_CALLS:,} are printed; set lower numbers."
    )
  plan = plan_step(
    mesh,
    pods,
    config.exchange,
    on_accelerators=on_accelerators,
    first_backward=first_stage_in_backward(config.model, frozen, mesh.stages),
  )
  work = Work.of(config, config.run.batch_sizes.size(0))
  sizes = [communication.edge_bytes(x, work) for x in plan.edges]
  return {
    "nodes": [x._asdict() for x in plan.nodes],
    "edges": [
      {"kind": type(x).__name__, **x._asdict(), "bytes": num_bytes}
      for x, num_bytes in zip(plan.edges, sizes, strict=True)
    ],
    "streams": [[x._asdict() for x in stream] for stream in plan.streams],
    "last": plan.last._asdict(),
  }


def fits(config: AnyConfig, batch_size: int) -> bool:
  """Returns whether a step of `batch_size` sequences fits into memory."""
  needed = sum(memory_parts(config, batch_size).values())
  return needed <= device_rates(config).chip_memory_bytes


def changes_between(old: AnyConfig, new: AnyConfig) -> dict[str, object]:
  """Returns {macro: new value} of settings to change from `old` to `new`."""
  return {
    field.name.upper(): getattr(after, field.name)
    for before, after in (
      (old.model, new.model),
      (old.mesh_layout, new.mesh_layout),
      (old.pods, new.pods),
    )
    for field in dataclasses.fields(after)
    if getattr(before, field.name) != getattr(after, field.name)
  }


def nearest_fit(config: AnyConfig, batch_size: int) -> AnyConfig | None:
  """Returns the configuration with the fewest changes that fits into memory.

  Of several with equally few changes, returns the fastest; None if none fits.
  """
  found = []
  for each in _smaller(config, batch_size):
    if fits(each, batch_size):
      num_changes = len(changes_between(config, each))
      found.append((num_changes, predict_step(each, batch_size).total, each))
  return min(found, key=lambda x: x[:2])[2] if found else None


def _smaller(config: AnyConfig, batch_size: int) -> Iterator[AnyConfig]:
  """Yields `config`, then variants of it that take less memory."""
  mesh = config.mesh_layout
  layouts, batch_axis = [mesh.layout], mesh.rules.get("batch")
  if batch_axis and "d_model_stored" not in mesh.rules:
    layouts.append(f"{mesh.layout},d_model_stored:{batch_axis}")
  rows = batch_size // config.pods.num_pods // mesh.axis_size_of("batch")
  parts = [n for n in divisors(rows) if n >= mesh.num_microbatches]
  remats = REMATS[REMATS.index(config.model.remat) :]
  for layout, remat, n in itertools.product(layouts, remats, parts):
    new = dataclasses.replace(
      config,
      mesh_layout=dataclasses.replace(mesh, layout=layout, num_microbatches=n),
      model=dataclasses.replace(config.model, remat=remat),
    )
    if divides(new, batch_size):
      yield new


def divides(config: AnyConfig, *batch_sizes: int) -> bool:
  """Returns whether pods and mesh axes divide the model and batches evenly."""
  mesh, num_pods = config.mesh_layout, config.pods.num_pods
  try:
    check_layout(mesh, config.model, *batch_sizes, num_pods=num_pods)
  except UserError:
    return False
  return all(batch_sizes)


def divisors(n: int) -> list[int]:
  """Returns the divisors of n, a whole number above 0, in ascending order."""
  small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
  return [*small, *(n // d for d in reversed(small) if d * d < n)]


def plan_of(config: AnyConfig) -> dict[str, Any]:
  """Returns the plan of a run: nested dicts of numbers, in bytes and seconds.

  ACTIVATION_DTYPE must not be "auto".

  Raises UserError if a rate of CHIP, such as its peak FLOP/s, is not known.
  """
  batch_size = config.run.batch_sizes.largest
  step = predict_step(config, batch_size)
  parts = memory_parts(config, batch_size)
  available = device_rates(config).chip_memory_bytes
  does_fit = sum(parts.values()) <= available
  nearest = None if does_fit else nearest_fit(config, batch_size)
  parameters: collections.Counter[str] = collections.Counter()
  for each in distinct_parameters(config.model):
    name = parse_name(each.name)
    if not name.is_state:
      parameters[name.kind] += math.prod(each.shape) * each.count
  return {
    "parameters": dict(parameters),
    "active_parameters": flops.active_parameters(config.model),
    "flops_per_token": {
      "forward": dict(flops.forward_flops(config.model)),
      "training": dict(flops.train_flops(config.model, config.run.frozen)),
      "recomputed": dict(
        flops.recomputed_flops(config.model, config.run.frozen)
      ),
      "model": flops.train_flops_per_token(config.model, config.run.frozen),
    },
    "device_bytes": parts,
    "stage_bytes": [
      sum(memory_parts(config, batch_size, stage).values())
      for stage in range(config.mesh_layout.stages)
    ],
    "memory_bytes": available,
    "cache_bytes_per_token": memory.cache_bytes_per_token(config.model),
    "fits": does_fit,
    "nearest": nearest and changes_between(config, nearest),
    "moved": _list_collectives(config, step, batch_size),
    "batch_size": batch_size,
    "step_secs": step.total,
    "parts": step.parts,
    "hidden_exchange_secs": step.hidden_exchange,
    **rates_of(config, batch_size, step.total),
    "run": _run(config),
  }


def plan_if_known(config: AnyConfig) -> dict[str, Any] | None:
  """Returns the plan of a run; None if a rate of CHIP is not known.

  Plans know only PaLM's block, and no MODEL_FUNCTION.
  """
  if config.model.model_function:
    return None
  try:
    return plan_of(config)
  except UserError:
    return None


def rates_of(
  config: AnyConfig, batch_size: int, secs: float
) -> dict[str, float]:
  """Returns tokens per second, MFU and HFU if a step takes `secs` seconds."""
  num_devices = config.pods.num_pods * config.mesh_layout.pod_devices
  hardware = config.hardware
  if config.run.chip == MEASURED:
    peak = getattr(hardware, f"chip_{config.model.activation_dtype}_flops")
  else:
    peak = peak_of_devices(config.run.chip, hardware, num_devices)
  tokens_per_sec = batch_size * config.model.sequence_length / secs
  given = tokens_per_sec, config.model, peak, config.run.frozen
  return {"tokens_per_sec": tokens_per_sec, **flops.utilization(*given)}


def _list_collectives(
  config: AnyConfig, step: StepTime, batch_size: int
) -> list[dict[str, Any]]:
  """Returns, per collective, its bytes per device and step, and its seconds."""
  devices = config.mesh_layout.num_devices
  moved = [
    {
      "kind": kind,
      "axes": list(axes),
      "link": "pod",
      "bytes": step.moved[kind, axes] / devices,
      "secs": secs,
    }
    for (kind, axes), secs in step.collectives.items()
  ]
  if config.pods.num_pods > 1:
    sent = communication.dcn_bytes(Work.of(config, batch_size))
    moved.append(
      {
        "kind": "exchange",
        "axes": ["pods"],
        "link": "dcn",
        "bytes": sent / config.pods.num_pods / devices,
        "secs": step.exchange + step.hidden_exchange,
      }
    )
  return moved


def run_secs(config: AnyConfig) -> float:
  """Returns the predicted seconds of all training steps together."""
  pairs, end = config.run.batch_sizes.pairs, config.run.train_steps
  starts = [*(min(start, end) for start, _ in pairs), end]
  return sum(
    (then - start) * predict_step(config, size).total
    for (start, then), (_, size) in zip(
      itertools.pairwise(starts), pairs, strict=True
    )
    if then > start
  )


def _run(config: AnyConfig) -> dict[str, float | None]:
  run, rates = config.run, device_rates(config)
  secs = run_secs(config)
  rows = run.batch_sizes.rows_before(run.train_steps)
  num_pods = config.pods.num_pods
  num_devices = num_pods * config.mesh_layout.pod_devices
  chip_secs = secs * num_devices
  watts, cost = rates.chip_watts, rates.chip_hour_cost
  interrupted = {}
  if hours := config.hardware.chip_mtbi_hours:
    mtbf = hours * _HOUR * config.hardware.chip_devices / num_devices
    step_secs = secs / run.train_steps
    restart = config.hardware.chip_restart_secs
    kept = min(run.checkpoint_steps, run.train_steps) * step_secs
    interrupted["goodput"] = goodput(mtbf, kept, restart)
    if config.exchange.is_diloco:  # a learner continues from the last sync
      kept = config.exchange.outer_steps * step_secs
    of_learner = goodput(num_pods * mtbf, kept, restart)
    interrupted["goodput_of_learners"] = of_learner
  return {
    "steps": run.train_steps,
    "tokens": rows * config.model.sequence_length,
    "secs": secs,
    "chip_hours": chip_secs / config.hardware.chip_devices / _HOUR,
    "kwh": None if watts is None else chip_secs * watts / _JOULES_OF_KWH,
    "cost": None if cost is None else chip_secs / _HOUR * cost,
    **interrupted,
  }
