# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What plans need to know of this machine (`palm_mtf plan --calibrate`).

Small models train a few steps. Of each, another kind of passes
(accounting/memory_traffic.py) takes much of the step beside products, whose
rate is measured apart; what the kinds take together is solved for each.
"""

import dataclasses
import time
from collections.abc import Mapping

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.accounting.flops import device_flops
from palm_mtf.accounting.memory import device_bytes
from palm_mtf.accounting.memory_traffic import step_traffic
from palm_mtf.accounting.plan import tensor_bytes
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.pods import PodsConfig
from palm_mtf.machine.host_memory import largest_resident_bytes
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.rates.measure import measured_rates

_MESH = MeshLayout(mesh_shape="", layout="")
_OPTIMIZER = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.9,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1.0,
  weight_decay_exponent=2.0,
  z_loss=1e-4,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
  """A model of one layer that trains to be timed, and its sequences."""

  d_model: int
  d_ff: int
  vocab_size: int
  sequence_length: int
  batch_size: int

  def model(self, dtype: str) -> PalmConfig:
    """Returns its architecture."""
    return PalmConfig(
      num_layers=1,
      d_model=self.d_model,
      num_heads=self.d_model // 64,
      d_kv=64,
      d_ff=self.d_ff,
      vocab_size=self.vocab_size,
      sequence_length=self.sequence_length,
      activation_dtype=dtype,
    )


# By the kind of passes that each is for.
PROBES = {
  "blocks": Probe(
    d_model=512, d_ff=2048, vocab_size=256, sequence_length=128, batch_size=16
  ),
  "attention": Probe(
    d_model=512, d_ff=512, vocab_size=256, sequence_length=1024, batch_size=2
  ),
  "loss": Probe(
    d_model=256, d_ff=256, vocab_size=16384, sequence_length=128, batch_size=8
  ),
  "weights": Probe(
    d_model=512, d_ff=2048, vocab_size=4096, sequence_length=128, batch_size=1
  ),
}
_WARM_UP_STEPS, _MIN_STEPS, _MIN_SECS = 2, 4, 1.5
_ROUNDS = 100  # until nothing changes any more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
  """Rates of this machine, of all its cores together.

  Attributes:
    flops: FLOP/s of products, by dtype.
    memory_bandwidth: bytes/s that are read.
    pass_bandwidths: bytes/s of passes, by dtype and kind.
    process_bytes: memory of a process that trains, beside the step's tensors.
  """

  flops: Mapping[str, float]
  memory_bandwidth: float
  pass_bandwidths: Mapping[str, Mapping[str, float]]
  process_bytes: int


def calibration() -> Calibration:
  """Measures this machine; takes half a minute where nothing else runs."""
  # First of all: what a process had at most it does not forget.
  first, model = PROBES["blocks"], PROBES["blocks"].model("float32")
  step_secs(first, "float32")
  tensors = tensor_bytes(
    model, _MESH, PodsConfig(), _OPTIMIZER, first.batch_size
  )
  process_bytes = largest_resident_bytes() - sum(tensors.values())
  rates = measured_rates()
  memory_bandwidth = rates.pop("memory")
  return Calibration(
    flops=rates,
    memory_bandwidth=memory_bandwidth,
    pass_bandwidths={
      dtype: _pass_bandwidths(dtype, rates[dtype], memory_bandwidth)
      for dtype in rates
    },
    process_bytes=process_bytes,
  )


def step_secs(probe: Probe, dtype: str) -> float:
  """Returns the least seconds of some training steps."""
  # Other programs only slow a step down.
  shape = [probe.batch_size, probe.sequence_length]
  tokens = np.random.default_rng(0).integers(probe.vocab_size, size=shape)
  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    program = build_train_program(
      probe.model(dtype), _MESH, _OPTIMIZER, batch_size=len(tokens), seed=0
    )
    session.run(program.initialize)
    run = session.make_callable(
      [program.metrics, program.update],
      [*program.pods[0].features.values(), program.step],
    )
    times = []
    while len(times) < _WARM_UP_STEPS + _MIN_STEPS or sum(times) < _MIN_SECS:
      start = time.perf_counter()
      run(tokens, tokens, len(times))
      times.append(time.perf_counter() - start)
  return min(times[_WARM_UP_STEPS:])


def _pass_bandwidths(
  dtype: str, flops: float, memory_bandwidth: float
) -> dict[str, float]:
  traffic, secs = [], []
  for probe in PROBES.values():
    model, rows = probe.model(dtype), probe.batch_size
    tokens = rows * probe.sequence_length
    of_step = step_traffic(
      model, _MESH, device_bytes(model, _MESH, _OPTIMIZER), rows
    )
    traffic.append([of_step[kind] for kind in PROBES])
    products = device_flops(model, _MESH, tokens) / flops
    secs.append(step_secs(probe, dtype) - products)
  solved = solved_secs(np.array(traffic), np.array(secs), 1 / memory_bandwidth)
  return {kind: 1 / x for kind, x in zip(PROBES, solved, strict=True)}


def solved_secs(
  traffic: np.ndarray, secs: np.ndarray, least: float
) -> np.ndarray:
  """Returns seconds a byte of each kind, [kinds], none below `least`.

  Args:
    traffic: bytes of each probe by kind, [probes, kinds]; the probe of a kind
      has most of its bytes in it.
    secs: what each probe takes beside products, [probes].
    least: seconds a byte at the bandwidth of memory, which no pass beats.
  """
  # Gauss-Seidel, held to the bound.
  solved = np.zeros(len(secs))
  for _ in range(_ROUNDS):
    for i, row in enumerate(traffic):
      others = row @ solved - row[i] * solved[i]
      solved[i] = max(least, (secs[i] - others) / row[i])
  return solved
