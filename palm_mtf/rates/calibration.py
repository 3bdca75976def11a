# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What plans need to know of this machine (`palm_mtf plan --calibrate`).

Small models train a few steps. Of each, another kind of passes
(accounting/memory_traffic.py) takes much of the step beside products, whose
rate is measured apart; what the kinds take together is solved for each.
"""

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.accounting.flops import device_flops
from palm_mtf.accounting.hardware import as_computed
from palm_mtf.accounting.memory import device_bytes
from palm_mtf.accounting.memory_traffic import step_traffic
from palm_mtf.accounting.plan import tensor_bytes
from palm_mtf.config.hardware import HardwareConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.pods import PodsConfig
from palm_mtf.machine.host_memory import largest_resident_bytes
from palm_mtf.mesh.host.devices import local_devices
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.rates.measure import read_bytes_per_sec
from palm_mtf.rates.pace import pace, undisturbed_secs

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
_WARM_UP_STEPS, _STEPS = 2, 5
_ROUNDS = 100  # until nothing changes any more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
  """Rates of this machine, of all its cores together.

  Attributes:
    flops: FLOP/s of products, by dtype.
    memory_bandwidth: bytes/s that are read.
    pass_bandwidths: bytes/s of passes, by dtype and kind.
    process_bytes: memory of a process that trains, beside the step's tensors.
    has_fused_attention: see `HardwareConfig`.
  """

  flops: Mapping[str, float]
  memory_bandwidth: float
  pass_bandwidths: Mapping[str, Mapping[str, float]]
  process_bytes: int
  has_fused_attention: bool


def calibration() -> Calibration:
  """Measures this machine; takes half a minute where nothing else runs."""
  # First of all: what a process had at most it does not forget. Of the loss:
  # what products hold beside their factors and results counts too.
  process_bytes = _process_bytes(PROBES["loss"])
  memory_bandwidth = read_bytes_per_sec()
  flops, pass_bandwidths = {}, {}
  for dtype in ("float32", "bfloat16"):
    flops[dtype], pass_bandwidths[dtype] = _rates(dtype, memory_bandwidth)
  return Calibration(
    flops=flops,
    memory_bandwidth=memory_bandwidth,
    pass_bandwidths=pass_bandwidths,
    process_bytes=process_bytes,
    has_fused_attention=_hardware().chip_fused_attention,
  )


def _hardware() -> HardwareConfig:
  # What there is to know of this machine before anything is measured.
  threads = local_devices(1).native_threads
  return HardwareConfig(chip_fused_attention=threads > 0)


@contextlib.contextmanager
def training_step(probe: Probe, dtype: str) -> Iterator[Callable[[], object]]:
  """Yields a call that trains a probe for a step, after some steps."""
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
    steps = itertools.count()

    def step() -> None:
      run(tokens, tokens, next(steps))

    for _ in range(_WARM_UP_STEPS):
      step()
    yield step


def _process_bytes(probe: Probe) -> int:
  """Returns the most memory of this process beside the tensors of a probe."""
  with training_step(probe, "float32"):
    pass
  model = as_computed(probe.model("float32"), _hardware())
  tensors = tensor_bytes(
    model, _MESH, PodsConfig(), _OPTIMIZER, probe.batch_size
  )
  return largest_resident_bytes() - sum(tensors.values())


def _rates(
  dtype: str, memory_bandwidth: float
) -> tuple[float, dict[str, float]]:
  """Returns the FLOP/s of products, and the bytes/s of passes by kind."""
  timed = {}
  with pace(tf.as_dtype(dtype)) as machine:
    for kind, probe in PROBES.items():
      with training_step(probe, dtype) as step:
        timed[kind] = [machine.timed(step) for _ in range(_STEPS)]
  traffic, secs = [], []
  for kind, probe in PROBES.items():
    model = as_computed(probe.model(dtype), _hardware())
    rows = probe.batch_size
    kept = device_bytes(model, _MESH, _OPTIMIZER)
    of_step = step_traffic(model, _MESH, kept, rows)
    traffic.append([of_step[x] for x in PROBES])
    flops = device_flops(model, _MESH, rows * probe.sequence_length)
    times = [undisturbed_secs(*x, machine.best_secs) for x in timed[kind]]
    secs.append(statistics.median(times) - flops / machine.flops_per_sec)
  solved = solved_secs(np.array(traffic), np.array(secs), 1 / memory_bandwidth)
  bandwidths = {x: 1 / secs for x, secs in zip(PROBES, solved, strict=True)}
  return machine.flops_per_sec, bandwidths


def solved_secs(
  traffic: np.ndarray, secs: np.ndarray, least: float
) -> np.ndarray:
  """Returns seconds a byte of each kind, [kinds], none below `least`.

  Args:
    traffic: bytes of each probe by kind, [probes, kinds]; the probe of a kind
      has most of its bytes in it.
    secs: seconds of each probe without its products, [probes].
    least: seconds a byte at the bandwidth of memory, which no pass beats.
  """
  # Gauss-Seidel, held to the bound.
  solved = np.zeros(len(secs))
  for _ in range(_ROUNDS):
    for i, row in enumerate(traffic):
      others = row @ solved - row[i] * solved[i]
      solved[i] = max(least, (secs[i] - others) / row[i])
  return solved
