# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures what plans need to know about this machine (`plan --calibrate`).

Matrix products are timed separately, and small models (probes) train for a few
steps. The rest of a step's time goes to other operations, which pass over
memory; accounting/memory.py lists the kinds of passes. Each probe spends most
of this rest on a different kind of pass, and gives one linear equation for the
seconds per byte of all kinds.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.accounting.flops import device_flops
from palm_mtf.accounting.hardware import describe_remat
from palm_mtf.accounting.memory import (
  Activations,
  device_bytes,
  update_traffic,
  weight_traffic,
)
from palm_mtf.accounting.plan import tensor_bytes
from palm_mtf.accounting.work import Work
from palm_mtf.config import (
  AdafactorConfig,
  HardwareConfig,
  LossConfig,
  MeshLayout,
  ModelConfig,
  PodsConfig,
  StepConfig,
)
from palm_mtf.machine.host_memory import largest_resident_bytes
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.matmul import matmul
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.rates.measure import (
  PRODUCT_FLOPS,
  PRODUCT_SIZE,
  caller,
  make_variable,
  read_bytes_per_sec,
  seconds_of,
)
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program

_MESH = MeshLayout(mesh_shape="", layout="")
_OPTIMIZER = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.9,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1.0,
  weight_decay_exponent=2.0,
)


class Probe(NamedTuple):
  """A one-layer model, which is trained to time passes over memory."""

  model: ModelConfig
  batch_size: int

  def model_in(self, dtype: str) -> ModelConfig:
    """Returns the architecture with `dtype` as activation dtype."""
    return dataclasses.replace(self.model, activation_dtype=dtype)

  def work_in(self, dtype: str) -> Work:
    """Returns the work of a step with `dtype` as activation dtype."""
    model = describe_remat(self.model_in(dtype), _unmeasured_hardware())
    return Work(
      model=model,
      mesh=_MESH,
      optimizer=_OPTIMIZER,
      pods=PodsConfig(),
      rows=self.batch_size,
    )


def _make_probe(*, batch_size: int, d_model: int, **sizes: int) -> Probe:
  heads = {"num_heads": d_model // 64, "d_kv": 64}
  model = ModelConfig(num_layers=1, d_model=d_model, **heads, **sizes)
  return Probe(model, batch_size)


# {kind of pass: probe}. Apart from matrix products, a probe spends most of its
# time on this kind of pass.
PROBES = {
  "blocks": _make_probe(
    batch_size=16, d_model=512, d_ff=2048, vocab_size=256, sequence_length=128
  ),
  "attention": _make_probe(
    batch_size=2, d_model=512, d_ff=512, vocab_size=256, sequence_length=1024
  ),
  "loss": _make_probe(
    batch_size=8, d_model=256, d_ff=256, vocab_size=16384, sequence_length=128
  ),
  "weights": _make_probe(
    batch_size=1, d_model=512, d_ff=2048, vocab_size=4096, sequence_length=128
  ),
}
_WARM_UP_STEPS, _STEPS = 2, 5
_ROUNDS = 100  # iterations of solve_secs, enough to converge
# How long `Pace` times products before a call and again after it: this share of
# the call's time, but at least _LEAST_SECS.
_SHARE, _LEAST_SECS = 0.15, 0.1


def calibration() -> dict[str, Any]:
  """Measures this machine; takes half a minute if no other program runs.

  Returns {macro: value} for CHIP = "measured" (`HardwareConfig`), with the
  rates of all cores together.
  """
  # Measure the process's memory first, because its peak never falls. Train the
  # probe "loss" meanwhile, because large products need large buffers.
  process_bytes = _process_bytes(PROBES["loss"])
  memory_bandwidth = read_bytes_per_sec()
  flops, pass_bandwidths = {}, {}
  for dtype in ("float32", "bfloat16"):
    flops[dtype], pass_bandwidths[dtype] = _rates(dtype, memory_bandwidth)
  # A copy between virtual devices or pods reads and writes each byte, so its
  # bandwidth is half of the memory's.
  copied = memory_bandwidth / 2
  return {
    "CHIP_BFLOAT16_FLOPS": flops["bfloat16"],
    "CHIP_FLOAT32_FLOPS": flops["float32"],
    "CHIP_EFFICIENCY": 1.0,  # the FLOP/s above are measured, not a peak
    "CHIP_MEMORY_BYTES": os.sysconf("SC_PHYS_PAGES")
    * os.sysconf("SC_PAGE_SIZE"),
    "CHIP_MEMORY_BANDWIDTH": memory_bandwidth,
    "CHIP_PASS_BANDWIDTHS": pass_bandwidths,
    "CHIP_PROCESS_BYTES": process_bytes,
    "CHIP_FUSED_ATTENTION": _unmeasured_hardware().chip_fused_attention,
    "CHIP_LINK_BANDWIDTH": copied,
    "CHIP_DCN_BANDWIDTH": copied,
  }


def _unmeasured_hardware() -> HardwareConfig:
  threads = local_devices(1).native_threads
  return HardwareConfig(chip_fused_attention=threads > 0)


@contextlib.contextmanager
def training_step(probe: Probe, dtype: str) -> Iterator[Callable[[], object]]:
  """Yields a function that trains a probe for one step, after warm-up steps."""
  shape = [probe.batch_size, probe.model.sequence_length]
  tokens = np.random.default_rng(0).integers(probe.model.vocab_size, size=shape)
  config = session_config(1)
  with tf.Graph().as_default(), Client(tf.Session(config=config)) as client:
    settings = StepConfig(
      model=probe.model_in(dtype),
      mesh_layout=_MESH,
      optimizer=_OPTIMIZER,
      loss=LossConfig(z_loss=1e-4),
    )
    program = build_train_program(settings, batch_size=len(tokens), seed=0)
    client.call(Program(operations=[program.initialize]))
    update, steps = program.update, itertools.count()
    # Every feature, inputs and targets, has the same tokens.
    rows = {x: tokens for x in update.inputs if x in program.rows}

    def step() -> None:
      number = next(steps)
      scalars = {"step": number, "slot_step": number}
      scalars |= {"first_pod": 0, "microbatch": 0}
      client.call(update, rows | scalars)

    for _ in range(_WARM_UP_STEPS):
      step()
    yield step


def _process_bytes(probe: Probe) -> int:
  """Returns the bytes of a process besides its tensors: code, buffers, ..."""
  with training_step(probe, "float32"):
    pass
  tensors = tensor_bytes(probe.work_in("float32"))
  return largest_resident_bytes() - sum(tensors.values())


def _rates(
  dtype: str, memory_bandwidth: float
) -> tuple[float, dict[str, float]]:
  """Returns the FLOP/s of matrix products, and {kind of pass: bytes/s}."""
  timed = {}
  with pace(tf.as_dtype(dtype)) as machine:
    for kind, probe in PROBES.items():
      with training_step(probe, dtype) as step:
        timed[kind] = [machine.time_call(step) for _ in range(_STEPS)]
  traffic, secs = [], []
  for kind, probe in PROBES.items():
    work = probe.work_in(dtype)
    traffic.append(pass_bytes(work))
    times = [undisturbed_secs(*x, machine.best_secs) for x in timed[kind]]
    of_products = device_flops(work) / machine.flops_per_sec
    secs.append(statistics.median(times) - of_products)
  solved = solve_secs(np.array(traffic), np.array(secs), 1 / memory_bandwidth)
  bandwidths = {x: 1 / secs for x, secs in zip(PROBES, solved, strict=True)}
  return machine.flops_per_sec, bandwidths


def pass_bytes(work: Work) -> list[int]:
  """Returns the bytes of a step's passes of each kind, in the probes' order."""
  update = update_traffic(device_bytes(work))
  found = {**Activations(work).traffic(), "weights": update}
  found["weights"] += weight_traffic(work)
  return [found[kind] for kind in PROBES]


class Pace:
  """Times calls, and matrix products before and after each call.

  The products show how much other programs slow the call down, because products
  and calls are assumed to be slowed down equally.
  """

  def __init__(self, multiply: Callable[[], object]):
    """Takes a function that computes a matrix product of PRODUCT_FLOPS."""
    self.best_secs = math.inf  # seconds of the fastest product so far
    self._multiply = multiply
    self._last_secs = 0.0

  @property
  def flops_per_sec(self) -> float:
    """FLOP/s of the fastest product so far."""
    return PRODUCT_FLOPS / self.best_secs

  def time_call(self, call: Callable[[], object]) -> tuple[float, float]:
    """Returns seconds of the call, and mean seconds of a product around it."""
    before = self._time_products()
    self._last_secs = seconds_of(call)
    return self._last_secs, (before + self._time_products()) / 2

  def _time_products(self) -> float:
    least = max(_LEAST_SECS, _SHARE * self._last_secs)
    times = []
    while sum(times) < least:
      times.append(seconds_of(self._multiply))
    self.best_secs = min(self.best_secs, *times)
    return statistics.mean(times)


def undisturbed_secs(
  secs: float, product_secs: float, best_secs: float
) -> float:
  """Returns the seconds that a call would take if no other program ran.

  A call of 3 s, with products around it at 1.5 times their shortest, gives 2 s.
  """
  return secs * min(1.0, best_secs / product_secs)


@contextlib.contextmanager
def pace(dtype: tf.DType) -> Iterator[Pace]:
  """Yields a `Pace` whose products are in `dtype`, as those of the calls."""
  config = session_config(1)
  with tf.Graph().as_default(), Client(tf.Session(config=config)) as client:
    factor = make_variable(client, [PRODUCT_SIZE, PRODUCT_SIZE], dtype)
    multiply = caller(client, matmul(factor, factor).op)
    multiply()  # the first call is slower, because it prepares the operation
    yield Pace(multiply)


def solve_secs(
  traffic: np.ndarray, secs: np.ndarray, least: float
) -> np.ndarray:
  """Returns seconds per byte for each kind of pass, [kinds].

  Args:
    traffic: bytes that each probe moves by kind of pass, [probes, kinds]; most
      bytes of each row are on the diagonal.
    secs: seconds of each probe without its matrix products, [probes].
    least: lower bound, the seconds per byte at the memory bandwidth.
  """
  # Solve traffic @ solved = secs by Gauss-Seidel. Values are at least `least`,
  # because a pass cannot be faster than memory.
  solved = np.zeros(len(secs))
  for _ in range(_ROUNDS):
    for i, row in enumerate(traffic):
      others = row @ solved - row[i] * solved[i]
      solved[i] = max(least, (secs[i] - others) / row[i])
  return solved
