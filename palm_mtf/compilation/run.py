# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of a pod on a machine without the pod's accelerators.

Thus `plan --compile` shows whether a run fits. The TPU's own compiler, libtpu,
and XLA's compiler for NVIDIA GPUs need only descriptions of the devices.
"""

import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from palm_mtf.accounting.communication import axes_bandwidth
from palm_mtf.accounting.plan import changes_between, memory_parts, nearest_fit
from palm_mtf.accounting.step_time import device_rates
from palm_mtf.architecture.block import model_of
from palm_mtf.architecture.parameters import frozen_in_stage
from palm_mtf.compilation.described_gpus import describe_gpu, describe_hosts
from palm_mtf.compilation.hlo_text import (
  Collective,
  CompiledText,
  find_axes,
  read_excess,
)
from palm_mtf.compilation.stage_programs import device_bytes, list_programs
from palm_mtf.config import DecodeConfig, PlanConfig
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.errors import UserError
from palm_mtf.executors.xla.decode_arrays import PodPrograms, abstract_inputs
from palm_mtf.executors.xla.devices import first_line, order_tpus
from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.stage_functions import StageStep
from palm_mtf.executors.xla.step_functions import PodStep
from palm_mtf.generation.decode.generate_program import (
  AdvanceTexts,
  PromptBatch,
  StartTexts,
)
from palm_mtf.generation.decode.weights import DecodeSettings
from palm_mtf.json_text import named_text
from palm_mtf.steps.plan import stage_layers

# Clock of a TPU core in Hz, to turn the compiler's cycles into seconds:
# Jouppi et al. 2020 (v2, v3) and 2023 (v4). The clock of v5p follows from its
# peak: 8 units of 128 x 128 multiplications and additions. That of v6e is not
# published, and does not follow in this way.
_CLOCKS = {"v2": 700e6, "v3": 940e6, "v4": 1050e6, "v5p": 1750e6}

# libtpu's names of configurations in which a chip's two cores are one device.
# For other kinds of chips, libtpu's default is right.
_CONFIGURATIONS = {"v4": "megacore"}
# libtpu reads these variables when JAX loads libtpu. The first variable lets
# several processes load libtpu at once; this is safe, because none opens a TPU.
# The other variables keep libtpu from querying a TPU VM's metadata server.
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v4-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
}

# XLA can generate Triton code for matrix products, but it fails for some
# products if no GPU can time tile sizes. So let all products call cuBLAS.
_CUDA_OPTIONS = {"xla_gpu_enable_triton_gemm": False}

_MAX_TRIES = 3  # settings that `_suggest` compiles before it gives up
_GIB = 2**30


class _TooLargeError(Exception):
  """A program needs `needed` bytes per device, more than `available`."""

  def __init__(self, needed: float, available: float):
    super().__init__(f"{needed / _GIB:.2f} of {available / _GIB:.2f} GiB")
    self.needed, self.available = needed, available


def compile_run(config: PlanConfig) -> dict[str, Any]:
  """Compiles a run's programs; returns their memory, traffic and time as JSON.

  Bytes are per device. Traffic and time are those of a training step with the
  run's largest batch. "programs" and "decoding" list the programs of training
  and of decoding: each has its memory, and as "secs" the time to compile it.
  The outermost "secs" has "compute" (not for GPUs and v6e), the TPU compiler's
  estimate of cycles divided by the clock rate. It also has "collectives", the
  bytes that a device sends divided by the bandwidth of its links.

  `config` has TPU, or one of GPU_CHIPS as CHIP. Raises UserError if the devices
  are unknown, or the training step does not fit.
  """
  try:
    return _compile_run(config)
  except _TooLargeError as error:
    raise UserError(_suggest(config, error)) from None


def _suggest(config: PlanConfig, error: _TooLargeError) -> str:
  """Returns an error message that names settings with which the step fits."""
  line = (
    f"{_given(config)}: the compiled step does not fit: it needs {error} per "
    "device; "
  )
  batch_size = config.run.batch_sizes.largest
  planned = sum(memory_parts(config, batch_size).values())
  # Assume that the memory of the compiled step exceeds the plan's by the same
  # factor for all settings. The plan then has to fit into `memory` bytes.
  memory = planned * error.available / error.needed
  for _ in range(_MAX_TRIES):
    smaller = dataclasses.replace(
      config,
      hardware=dataclasses.replace(
        config.hardware, chip_memory_bytes=memory * config.hardware.chip_devices
      ),
    )
    found = nearest_fit(smaller, batch_size)
    if found is None:
      break
    found = dataclasses.replace(found, hardware=config.hardware)
    try:
      peak = _compile_run(found)["peak_bytes"]
    except _TooLargeError as again:
      planned = sum(memory_parts(found, batch_size).values())
      memory = planned * again.available / again.needed
      continue
    changes = changes_between(config, found).items()
    settings = ", ".join(f"{name} = {value!r}" for name, value in changes)
    return f"{line}with {settings} it needs {peak / _GIB:.2f} GiB and fits."
  return (
    f"{line}no value of REMAT, number of microbatches or split storage of "
    "weights was found that fits: use more devices, or a LAYOUT that splits "
    "more."
  )


def _compile_run(config: PlanConfig) -> dict[str, Any]:
  """Like `compile_run`, but raises _TooLargeError if the step does not fit."""
  layout, rates = config.mesh_layout, device_rates(config)
  programs, collectives, cycles = [], [], 0
  for record, compiled, times in _compile_programs(config):
    text = CompiledText(compiled.as_text())
    programs.append(record)
    collectives += [
      dataclasses.replace(x, times=times * x.times)
      for x in text.collectives
      if times
    ]
    cycles += times * text.estimated_cycles
  peak = max(x["peak_bytes"] for x in programs)
  if peak > rates.chip_memory_bytes:
    raise _TooLargeError(peak, rates.chip_memory_bytes)
  moved = _add_up(collectives, config)
  secs = {"collectives": sum(x["secs"] for x in moved)}
  if clock := _CLOCKS.get(_kind(config)):
    secs = {"compute": cycles / clock, **secs}
  return {
    "target": layout.tpu or f"{layout.num_devices:,} {config.run.chip}",
    "compiler": _compiler(config),
    "programs": programs,
    "peak_bytes": peak,
    "moved": moved,
    "cycles": cycles,
    "secs": secs,
    "decoding": compile_decoding(config),
  }


def compile_decoding(config: PlanConfig) -> dict[str, Any]:
  """Compiles the prefill and the steps of decoding; returns their memory.

  The batch has one sequence for each part into which the mesh splits it. Half
  of a sequence is the prompt, and half is generated. A program that does not
  fit has an "error" in place of its memory.
  """
  model, layout = config.model, config.mesh_layout
  num_texts = layout.axis_size_of("batch")
  half = model.sequence_length // 2
  sizes = PromptBatch(
    num_prompts=num_texts,
    prompt_tokens=half + 1,
    max_tokens=half,
    num_tokens=model.vocab_size,
    end_ids=(0,),
  )
  settings = DecodeSettings(
    model=model, mesh_layout=layout, weight_dtype="activation"
  )
  made = PodPrograms(settings, _devices(config), _platform(config))
  weights, greedy = made.abstract_weights(), DecodeConfig(temperature=0.0)
  start, advance = (
    named_text(x(greedy, sizes)) for x in (StartTexts, AdvanceTexts)
  )
  programs = []
  for name, function, state in (
    ("prefill", start, []),
    ("steps", advance, made.abstract_state(start, weights)),
  ):
    given = (weights, state, abstract_inputs(function))
    try:
      record, _ = _compile(config, name, made.get_function(function), given)
    except _TooLargeError as error:
      record = {"program": name, "error": f"does not fit: {error}"}
    programs.append(record)
  return {"texts": num_texts, "programs": programs}


def _compile_programs(
  config: PlanConfig,
) -> list[tuple[dict[str, Any], Any, int]]:
  """Returns what `_compile` returns for each program of a training step.

  The last item is the number of times that a step runs the program.
  """
  made = PodStep(_settings(config), _platform(config))
  mesh = made.model.placement.make_mesh(_devices(config))
  state, numbers = made.abstract_state(mesh), made.abstract_numbers(mesh)
  batch, (changed, frozen) = made.abstract_batch(mesh), made.split(state)
  if config.mesh_layout.stages > 1:
    return _compile_stages(config, made, mesh)
  if config.pods.num_pods == 1:
    given = changed, frozen, batch, numbers
    return [(*_compile(config, "step", made.step(mesh), given), 1)]
  given = state, batch, numbers
  gradients = made.gradients(mesh)
  parts, losses = jax.eval_shape(gradients, *given)
  sums, losses = (
    jax.tree.map(
      lambda x, spec=spec: jax.ShapeDtypeStruct(
        x.shape, jnp.float32, sharding=NamedSharding(mesh, spec)
      ),
      shapes,
    )
    for shapes, spec in (
      (parts, PartitionSpec(mesh.axis_names)),
      (losses, PartitionSpec()),
    )
  )
  update = made.update_of_parts(mesh), (changed, sums, losses, numbers)
  # JAX drops arguments that a program does not read, so the memory analysis of
  # `gradients` lacks the optimizer slots. Add the slots, which stay in memory.
  kept = device_bytes(
    {name: x for name, x in state.items() if name not in made.model.reads}
  )
  return [
    (*_compile(config, "gradients", gradients, given, kept), 1),
    (*_compile(config, "update", *update), 1),
  ]


def _compile_stages(
  config: PlanConfig, made: PodStep, mesh: jax.sharding.Mesh
) -> list[tuple[dict[str, Any], Any, int]]:
  """Compiles the programs of the stages of a pod.

  Like stages have like programs, so only the first of them is compiled. As in
  the plan, a step's time and traffic are those of stage 0.
  """
  model, layout, frozen = config.model, config.mesh_layout, config.run.frozen
  layers, found = model_of(model).layers, {}
  for stage, own in enumerate(stage_layers(model.num_layers, layout.stages)):
    frozen_here = frozen_in_stage(model, frozen, stage, layout.stages)
    key = not stage, layers[own.start : own.stop], frozen_here
    found.setdefault(key, stage)
  compiled = []
  for stage in found.values():
    step = StageStep(_settings(config), made, mesh, stage)
    several = config.pods.num_pods > 1
    for each in list_programs(step, _settings(config), exchanges=several):
      name = f"stage {stage}, {each.name}"
      record = _compile(config, name, each.function, each.given, each.kept)
      compiled.append((*record, 0 if stage else each.times))
  return compiled


def _settings(config: PlanConfig) -> StepSettings:
  # A plan has no data, so assume all features that a run can have: "segments"
  # for packed documents, "loss_weights" for a source with inputs and targets.
  features = ["inputs", "targets", "segments", "loss_weights"]
  if config.model.has_prefix:
    features.append("prefix")
  if config.loss.preference_beta is not None:
    features.append("reference")
  features += config.loss.teacher_features
  return StepSettings(
    model=config.model,
    mesh_layout=config.mesh_layout,
    optimizer=config.optimizer,
    loss=config.loss,
    features=features,
    num_rows=config.run.batch_sizes.largest // config.pods.num_pods,
    dcn_dtype=config.pods.dcn_dtype,
    seed=config.run.seed,
    frozen=config.run.frozen,
  )


def _kind(config: PlanConfig) -> str:
  return config.mesh_layout.tpu.partition("-")[0]


def _platform(config: PlanConfig) -> str:
  return "tpu" if config.mesh_layout.tpu else "cuda"


def _given(config: PlanConfig) -> str:
  if config.mesh_layout.tpu:
    return f'TPU = "{config.mesh_layout.tpu}"'
  return f'CHIP = "{config.run.chip}"'


def _compiler(config: PlanConfig) -> str:
  package = "libtpu" if config.mesh_layout.tpu else "jax-cuda12-pjrt"
  return f"{package} {importlib.metadata.version(package)}"


def _devices(config: PlanConfig) -> Sequence[Any]:
  """Returns descriptions of a pod's devices, in the order of the mesh."""
  # Keep JAX from opening accelerators, because this process runs no program.
  # Disable the compilation cache: JAX cannot read it for described devices.
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_enable_compilation_cache", False)
  layout = config.mesh_layout
  describe = _describe_tpus if layout.tpu else _describe_gpus
  try:
    found = describe(config)
  except Exception as error:  # JAX and compilers do not say what they raise
    raise UserError(
      f"{_given(config)}: {_compiler(config)} cannot compile for it "
      f"({first_line(error)})."
    ) from None
  return order_tpus(layout, found) if layout.tpu else found


def _describe_tpus(config: PlanConfig) -> Sequence[Any]:
  where = tpu_slice(config.mesh_layout.tpu)
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  return topologies.get_topology_desc(
    platform="tpu",
    topology_name=f"{_kind(config)}:{'x'.join(map(str, where.chips))}",
    chip_config_name=_CONFIGURATIONS.get(_kind(config), "default"),
  ).devices


def _describe_gpus(config: PlanConfig) -> Sequence[Any]:
  chip = config.run.chip
  return topologies.get_topology_desc(
    platform="cuda",
    topology_name=chip,
    topology=describe_hosts(config.mesh_layout.num_devices, config.hardware),
    target_config=describe_gpu(chip, config.hardware),
  ).devices


def _compile(
  config: PlanConfig,
  name: str,
  function: Any,
  given: Sequence[Any],
  kept: int = 0,
) -> tuple[dict[str, Any], Any]:
  """Compiles a program for the pod of `config`.

  Args:
    given: shape, dtype and sharding of the function's arguments.
    kept: bytes per device of arrays that the program does not read, but that
      stay in memory while the program runs.

  Returns:
    A record with `name`, the bytes in a device's memory while the program runs,
    and the seconds of the compilation; and the compiled program.
  """
  begin = time.monotonic()
  lowered = function.lower(*given)
  try:
    options = {} if config.mesh_layout.tpu else _CUDA_OPTIONS
    compiled = lowered.compile(options)
  except jax.errors.JaxRuntimeError as error:
    if found := read_excess(str(error)):
      raise _TooLargeError(*found) from None
    raise
  secs = time.monotonic() - begin
  found = compiled.memory_analysis()
  parts = {
    "kept_bytes": kept,
    "argument_bytes": found.argument_size_in_bytes,
    # Bytes of results that do not reuse the memory of donated arguments.
    "result_bytes": found.output_size_in_bytes - found.alias_size_in_bytes,
    "temporary_bytes": found.temp_size_in_bytes,
    "code_bytes": found.generated_code_size_in_bytes,
  }
  peak = sum(parts.values())
  record = {"program": name, "peak_bytes": peak, **parts, "secs": secs}
  return record, compiled


def _add_up(
  collectives: Sequence[Collective], config: PlanConfig
) -> list[dict[str, Any]]:
  """Sums the times, bytes and secs of collectives by kind and mesh axes."""
  layout, rates = config.mesh_layout, device_rates(config)
  names, sizes = list(layout.axes), list(layout.axes.values())
  total: dict[tuple[Any, ...], dict[str, Any]] = {}
  for each in collectives:
    axes = tuple(names[i] for i in find_axes(each, sizes) or ())
    bandwidth = rates.chip_link_bandwidth
    if axes:
      bandwidth = axes_bandwidth(layout, axes, rates, each.kind)
    record = {
      "kind": each.kind,
      "axes": [*axes],
      "groups": len(each.groups),
      "group_devices": len(each.groups[0]),
      **dict.fromkeys(("times", "bytes", "secs"), 0),
    }
    record = total.setdefault((each.kind, axes), record)
    sent = each.times * each.sent_bytes
    record["times"] += each.times
    record["bytes"] += sent
    record["secs"] += sent / bandwidth
  return [*total.values()]
