# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf plan`: computes the time, memory and cost that a run will take."""

import dataclasses
import importlib.util
import math
import os
import shutil
from collections.abc import Mapping
from typing import Any

from palm_mtf.accounting import search
from palm_mtf.accounting.hardware import MEASURED, check_run
from palm_mtf.accounting.plan import (
  changes_between,
  describe_step,
  plan_of,
  rates_of,
)
from palm_mtf.accounting.step_time import device_rates
from palm_mtf.compilation.described_gpus import GPU_CHIPS
from palm_mtf.config import PlanConfig
from palm_mtf.config.device_mesh import MAX_DEVICES
from palm_mtf.config.tpu_slice import chip_of
from palm_mtf.errors import UserError, check_count
from palm_mtf.json_text import json_text
from palm_mtf.machine import cache_folder
from palm_mtf.machine.activation_dtype import resolve_dtype
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.report import plans


def plan(
  *,
  model_dir: str,
  config: PlanConfig,
  is_search: bool,
  is_compiled: bool,
  is_steps: bool,
  num_devices: int | None,
  output: str | None,
  as_json: bool,
) -> None:
  """Prints the plan of a run: the time, memory and cost that the run needs.

  Raises UserError if settings or flags do not fit together; if the plan needs
  an unknown rate of the chip, such as its FLOP/s; if the compiler is not
  installed; if a compiled step or every layout needs more memory than the chip
  has; or if no TPU slice has `num_devices` devices.
  """
  del model_dir
  given = {"--search": is_search, "--compile": is_compiled, "--steps": is_steps}
  asked = [flag for flag, is_given in given.items() if is_given]
  if len(asked) > 1:
    raise UserError(
      f"{' and '.join(asked)}: each prints something else; give one of them."
    )
  if (num_devices is not None or output) and not is_search:
    raise UserError("--devices and --output are of a search; add --search.")
  config = check_settings(config)
  if is_steps:
    on_gpus = config.run.chip in GPU_CHIPS
    on_accelerators = bool(config.mesh_layout.tpu) or on_gpus
    record = describe_step(config, on_accelerators=on_accelerators)
    print(json_text(record) if as_json else plans.format_step(record))
  elif is_compiled:
    _print_compiled(config, as_json=as_json)
  elif is_search:
    _print_search(
      config, num_devices=num_devices, output=output, as_json=as_json
    )
  else:
    record = plan_of(config)
    print(json_text(record) if as_json else plans.format_plan(record))


def check_settings(config: PlanConfig) -> PlanConfig:
  """Returns the settings with ACTIVATION_DTYPE = "auto" resolved to a dtype.

  Raises UserError if model sizes, mesh, batch size, pods and FROZEN do not fit
  together, or CHIP is not known.
  """
  check_run(config)
  model = config.model
  if config.run.chip == MEASURED:
    model = resolve_dtype(model, config.mesh_layout)
  elif model.activation_dtype == "auto":
    model = dataclasses.replace(model, activation_dtype="bfloat16")
  return dataclasses.replace(config, model=model)


def _print_compiled(config: PlanConfig, *, as_json: bool) -> None:
  """Prints a plan, and a table of a step's costs as compiled and as planned."""
  _check_can_compile(config)
  record = plan_of(config)
  try:
    # This imports JAX and TensorFlow, which other plans do not need.
    from palm_mtf.compilation.run import compile_run
  except ImportError as error:
    raise UserError(
      f"--compile needs JAX 0.10 ({error}): pip install 'palm_mtf[compile]'"
    ) from None
  compiled = compile_run(config)
  if as_json:
    print(json_text({**record, "compiled": compiled}))
  else:
    print(
      f"{plans.format_plan(record)}\n{plans.format_compiled(compiled, record)}"
    )


def _check_can_compile(config: PlanConfig) -> None:
  tpu, chip = config.mesh_layout.tpu, config.run.chip
  if not tpu:
    _check_can_compile_for_gpu(config)
    return
  of_tpu = chip_of(tpu)
  if chip != of_tpu:
    raise UserError(
      f'--compile, TPU = "{tpu}" and CHIP = {chip!r}: it compares with the '
      f'plan of the same chip; set CHIP = "{of_tpu}".'
    )
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      "--compile needs libtpu, the compiler of TPUs, which is not installed: "
      "pip install 'palm_mtf[compile]'"
    )


def _check_can_compile_for_gpu(config: PlanConfig) -> None:
  chip = config.run.chip
  if chip not in GPU_CHIPS:
    raise UserError(
      f'--compile, TPU = "" and CHIP = {chip!r}: set TPU, as in '
      "layouts/tpu_v4_8.gin, or CHIP to a GPU whose compiler it has: "
      f"{', '.join(GPU_CHIPS)}."
    )
  # JAX's plugin runs ptxas, which NVIDIA's Python package or CUDA has.
  has_assembler = importlib.util.find_spec("nvidia") or shutil.which("ptxas")
  if not (importlib.util.find_spec("jax_cuda12_plugin") and has_assembler):
    raise UserError(
      "--compile needs jax-cuda12-plugin and ptxas, the compiler of GPUs, "
      "which are not installed: pip install 'palm_mtf[compile_gpu]'"
    )


def calibrate(*, as_json: bool) -> None:
  """Measures rates, such as FLOP/s, and stores them for CHIP = "measured"."""
  path = cache_folder.measured_hardware()
  try:
    # Open the cache folder before measuring, which takes half a minute, so that
    # an error with the folder appears immediately.
    with cache_folder.open_cache(os.path.dirname(path), make=True):
      # Import TensorFlow here: this takes seconds, and plans do not need it.
      from palm_mtf.rates.calibration import calibration

      macros = _round(calibration())
    text = "\n".join(f"{name} = {value!r}" for name, value in macros.items())
    cache_folder.write_cached(path, f"{text}\n".encode())
  except cache_folder.CacheError as error:
    raise UserError(f"the measured rates cannot be kept: {error}.") from None
  print(json_text({"file": path, **macros}) if as_json else f"{path}\n{text}")


def _round(value: Any) -> Any:
  """Rounds one or a dict of measured numbers to four significant digits."""
  if isinstance(value, Mapping):
    return {key: _round(each) for key, each in value.items()}
  return value if isinstance(value, bool) else float(f"{value:.4g}")


_NUM_SHOWN = 10


def _print_search(
  config: PlanConfig,
  *,
  num_devices: int | None,
  output: str | None,
  as_json: bool,
) -> None:
  """Prints the fastest layouts, and writes the fastest layout to `output`."""
  given = config.pods.num_pods * config.mesh_layout.pod_devices
  num_devices = given if num_devices is None else num_devices
  check_count("--devices", num_devices, maximum=MAX_DEVICES)
  result = search.search(config, num_devices)
  has = device_rates(config).chip_memory_bytes
  if not result.fitting:
    enough = num_devices * math.ceil(result.least_bytes / has)
    raise UserError(
      f"--search: none of {result.num_candidates:,} candidates fits: the "
      f"smallest needs {result.least_bytes / 2**30:.1f} of {has / 2**30:.1f} "
      f"GiB per device; try --devices {enough}."
    )
  best = result.fitting[0]
  records = [_make_record(each, best) for each in result.fitting[:_NUM_SHOWN]]
  if as_json:
    print("\n".join(map(json_text, records)))
  else:
    print(plans.format_search(records, num_devices, _summarize(result, config)))
  if output:
    settings, secs = records[0]["settings"], records[0]["step_secs"]
    lines = [
      f"# Found by `palm_mtf plan --search` for {num_devices:,} devices, CHIP "
      f'= "{config.run.chip}":',
      f"# {secs:.4g} s per step predicted. After the recipe:",
      "#   palm_mtf train --gin_file=RECIPE --gin_file=THIS",
      *(f"{name} = {value!r}" for name, value in settings.items()),
    ]
    content = "\n".join([*lines, ""]).encode()
    write_atomically(os.path.expanduser(output), content)


def _make_record(found: search.Found, best: search.Found) -> dict[str, object]:
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
      "STAGES": mesh.stages,
      "REMAT": config.model.remat,
    },
    "step_secs": found.step.total,
    **rates_of(config, batch_size, found.step.total),
    "device_bytes": found.device_bytes,
    "reason": search.shares(found)
    if found is best
    else f"slower by {search.reason(best, found)}",
  }


def _summarize(result: search.SearchResult, config: PlanConfig) -> str:
  text = (
    f"{len(result.fitting):,} of {result.num_candidates:,} candidates fit into "
    "memory"
  )
  for place, each in enumerate(result.fitting, 1):
    changed = changes_between(config, each.config)
    # Compare parsed rules, because the user may have written the same rules in
    # another order or with other spaces.
    mesh, given = each.config.mesh_layout, config.mesh_layout
    is_same = (mesh.axes, mesh.rules) == (given.axes, given.rules)
    if is_same and not changed.keys() - {"LAYOUT", "MESH_SHAPE"}:
      return f"{text}; the given settings are number {place}"
  return text
