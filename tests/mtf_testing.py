# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a model with given parameters on any mesh, for tests.

A mesh of n devices is n virtual CPU devices of this process.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import (
  LossConfig,
  MeshLayout,
  ModelConfig,
  OptimizerConfig,
  PodsConfig,
)
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.generation.inference.sessions import load_weights
from palm_mtf.mesh import cpu_gpu as devices
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import Slice, names_of
from palm_mtf.model.dims import model_dims
from palm_mtf.model.loss import cross_entropy, weighted_mean
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import TrainStep
from tests import oracle, settings

SINGLE = MeshLayout(mesh_shape="", layout="")
ONE_POD = PodsConfig()
PALM_OPTIMIZER = settings.PALM_OPTIMIZER

# Every dimension that can be split is split, by itself and with others.
LAYOUTS = {
  "batch over data": ("data:2", "batch:data"),
  "heads over model": ("model:2", "heads:model"),
  "d_ff over model": ("model:2", "d_ff:model"),
  "vocab over model": ("model:2", "vocab:model"),
  "vocab over four": ("model:4", "vocab:model"),
  "two axes but no batch": (
    "data:2,model:2",
    "d_ff:data,vocab:data,heads:model",
  ),
  "all over data and model": (
    "data:2,model:2",
    "batch:data,heads:model,d_ff:model,vocab:model",
  ),
  "padded vocab over three": ("model:3", "vocab:model"),
  "fully sharded": ("data:4", "batch:data,d_model_stored:data"),
  "PaLM's 2D": (
    "data:2,model:2",
    "batch:data,heads:model,d_ff:model,vocab:model,"
    "d_model_stored:data,d_model_residual:model",
  ),
}

# Tokens move to the devices of their experts, and weights are stored split.
MOVED = MeshLayout(
  mesh_shape="data:2,model:2",
  layout="batch:data,experts:data,heads:model,d_ff:model,vocab:model,"
  "d_model_stored:data,d_model_residual:model",
)

# Steps that `train` takes, and sequences per step.
NUM_STEPS, BATCH_SIZE = 5, 4


def mesh_layout(name: str, **changes: object) -> MeshLayout:
  """Returns one of LAYOUTS."""
  mesh_shape, layout = LAYOUTS[name]
  return MeshLayout(mesh_shape=mesh_shape, layout=layout, **changes)


def small_config(**changes: object) -> ModelConfig:
  """Returns a model of two layers in which no two sizes are equal."""
  settings = dict(
    num_layers=2,
    d_model=24,
    num_heads=4,
    d_kv=10,
    d_ff=36,
    vocab_size=44,
    sequence_length=9,
    activation_dtype="float32",
  )
  return ModelConfig(**{**settings, **changes})


def random_tokens(config: ModelConfig, batch_size: int, seed: int) -> dict:
  """Returns inputs and targets, [batch, length] int32, as training has them."""
  rng = np.random.default_rng(seed)
  shape = [batch_size, config.sequence_length]
  targets = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
  inputs = np.zeros_like(targets)
  inputs[:, 1:] = targets[:, :-1]
  return {"inputs": inputs, "targets": targets}


def random_documents(config: ModelConfig, batch_size: int, seed: int) -> dict:
  """Returns packed rows of random tokens, with segments and loss_weights.

  A row holds two documents of 2 to 4 tokens, segments 1 and 2, and padding,
  segment 0. A document's inputs are its targets moved right by one, with token
  0 first. Loss weights are drawn from 0, 0.5 and 1; padding has weight 0.
  """
  rng = np.random.default_rng(seed)
  batch = random_tokens(config, batch_size, seed)
  segments = np.zeros_like(batch["inputs"])
  for row in range(batch_size):
    first, second = rng.integers(2, 5, size=2)
    segments[row, :first] = 1
    segments[row, first : first + second] = 2
    batch["inputs"][row, [0, first]] = 0
  weights = rng.choice(np.float32([0, 0.5, 1]), size=segments.shape)
  weights[:, 0] = 1
  weights[segments == 0] = 0
  return {**batch, "segments": segments, "loss_weights": weights}


def random_examples(config: ModelConfig, batch_size: int, seed: int) -> dict:
  """Returns random_documents whose first 1 to 3 inputs are a prefix."""
  batch = random_documents(config, batch_size, seed)
  rng = np.random.default_rng(seed + 1)
  prefix = np.zeros_like(batch["segments"])
  for row, number in itertools.product(range(batch_size), (1, 2)):
    (inside,) = np.nonzero(batch["segments"][row] == number)
    prefix[row, inside[: rng.integers(1, 4)]] = 1
  return {**batch, "prefix": prefix}


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
  """Returns |actual - expected| / |expected|, Euclidean norms."""
  difference = np.linalg.norm(np.asarray(actual, np.float64) - expected)
  return float(difference / np.linalg.norm(expected))


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
  """Lets a test build graphs as on a machine without a C++ compiler."""
  monkeypatch.setattr(devices, "threads_here", lambda: 0)


def placement(mesh: MeshLayout) -> CpuGpuPlacement:
  """Returns virtual CPU devices for `mesh`."""
  names = [f"/device:cpu:{i}" for i in range(mesh.num_devices)]
  return CpuGpuPlacement(mesh, names, devices.threads_here())


def load_parameters(
  session: tf.Session,
  slices: Mapping[str, Sequence],
  params: Mapping[str, np.ndarray],
) -> None:
  """Writes each parameter's slices; `params` are whole, by name.

  There is only one run, because TensorFlow searches the graph in each run.
  """
  writes, feed = [], {}
  assert params.keys() <= {*names_of(slices)}
  for part in itertools.chain(*slices.values()):
    if not params.keys() >= set(part.names):
      continue
    if not hasattr(part.variable, "initializer"):  # on an accelerator
      values = [params[x][slice_indices(part.spec)] for x in part.names]
      padded = np.stack(values) if len(values) > 1 else values[0]
      given = tf.placeholder(part.variable.dtype, padded.shape)
      writes.append(part.variable.assign(given))
      feed[given] = padded
      continue
    (name,) = part.names
    value = params[name]
    padded = np.zeros(part.variable.shape, value.dtype)
    if part.spec is not None:
      padded[tuple(map(slice, part.sizes))] = value[slice_indices(part.spec)]
    write = part.variable.initializer
    writes.append(write)
    feed[write.inputs[1]] = padded
  session.run(writes, feed)


def load_decode_model(
  session: tf.Session, model: DecodeModel, params: Mapping[str, np.ndarray]
) -> None:
  """Makes a model's weights from whole parameters, by name."""
  load_weights(
    Client(session),
    model.layers,
    lambda slices: load_parameters(
      session, slices, {name: params[name] for name in slices}
    ),
  )


def slice_indices(spec: str) -> tuple[slice, ...]:
  """Parses TensorFlow's description of a slice, such as "8 4 0,4:0,4"."""
  if not spec:
    return ()
  parts = spec.rsplit(maxsplit=1)[-1].split(":")
  pairs = [map(int, part.split(",")) for part in parts]
  return tuple(slice(begin, begin + size) for begin, size in pairs)


def read_variables(
  session: tf.Session, slices: Mapping[str, Sequence]
) -> dict[str, np.ndarray]:
  """Returns variables from their slices, after checking that copies agree."""
  values = session.run(
    {name: [part.read() for part in parts] for name, parts in slices.items()}
  )
  return {
    name: _whole(parts, [x[i] if len(names) > 1 else x for x in values[key]])
    for key, parts in slices.items()
    for names in [parts[0].names]
    for i, name in enumerate(names)
  }


def _whole(parts: Sequence, values: Sequence[np.ndarray]) -> np.ndarray:
  spec = parts[0].spec
  shape = spec.split()[:-1] if spec else parts[0].sizes
  whole = np.full([int(size) for size in shape], np.nan)
  for part, value in zip(parts, values, strict=True):
    if part.spec is None:  # padding only
      continue
    value = value[tuple(map(slice, part.sizes))]
    index = slice_indices(part.spec)
    if not part.is_first:
      np.testing.assert_array_equal(whole[index], value.astype(np.float64))
    whole[index] = value
  assert not np.isnan(whole).any()
  return whole


class PodComparison:
  """Compares each slice of every pod with the first pod's, to the bit."""

  def __init__(self, session: tf.Session, program: StepPrograms):
    reads = [
      {
        f"{name}/{i}": part.read()
        for name, parts in slices.items()
        for i, part in enumerate(parts)
      }
      for slices in program.pod_slices
    ]
    self._read = session.make_callable(reads)

  def check(self) -> None:
    """Fails with the pod and the variable that differs."""
    first, *others = self._read()
    for index, other in enumerate(others, start=1):
      assert other.keys() == first.keys()
      for name, value in first.items():
        assert other[name].tobytes() == value.tobytes(), f"pod {index}: {name}"


def oracle_slots(adafactor: oracle.Adafactor) -> dict[str, np.ndarray]:
  """Returns the moments of the oracle under the names of a checkpoint."""
  slots = {
    f"{name}/second_moment": v for name, v in adafactor.second_moments.items()
  }
  for name, row_sums in adafactor.row_sums.items():
    column_sums = adafactor.column_sums[name]
    slots[f"{name}/second_moment_row"] = row_sums / column_sums.size
    slots[f"{name}/second_moment_column"] = column_sums / row_sums.size
  if adafactor.optimizer.beta1:
    slots |= {f"{name}/momentum": m for name, m in adafactor.momenta.items()}
  return slots


def feed_of(
  made: StepPrograms, batch: Mapping[str, np.ndarray], step: int
) -> dict[tf.Tensor, object]:
  """Returns what the last call of a step is fed."""
  values = {"step": step, "slot_step": step, "first_pod": 0, "microbatch": 0}
  for name in made.update.inputs.keys() - values.keys():
    feature, first, size = made.rows[name]
    values[name] = batch[feature][first : first + size]
  return {made.update.inputs[name]: value for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A lowered graph, and the results of one `call`; see `CpuGpuLowering`."""

  tensors: dict[str, tf.Tensor]
  operations: tf.Operation
  initialize: tf.Operation
  slices: list[dict[str, list[Slice]]]


def lower(
  placements: Mapping[mtf.Mesh, CpuGpuPlacement],
  tensors: Mapping[str, mtf.Tensor],
  operations: Sequence[mtf.Operation] = (),
) -> Lowered:
  """Lowers all meshes of one graph; see `CpuGpuLowering.call`."""
  first, *_ = placements.values()  # all have the same class
  lowering = first.lower(placements)
  values, done = lowering.call(tensors, operations)
  return Lowered(values, done, lowering.initialize, lowering.slices)


@dataclasses.dataclass(frozen=True)
class ModelResult:
  """The result of `run_model`; `gradients` has the names of variables.

  `z_loss` is None if `loss` includes it.
  """

  logits: np.ndarray
  loss: float
  z_loss: float | None
  gradients: dict[str, np.ndarray]


def lowered_values(
  build: Callable[..., dict[str, mtf.Tensor]],
  mesh: MeshLayout = SINGLE,
  dtype: type = np.float32,
  **arrays: tuple[np.ndarray, list[mtf.Dimension]],
) -> dict[str, np.ndarray]:
  """Returns the values that `build` computes; arrays: (array, dimensions)."""
  with tf.Graph().as_default():
    mtf_mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = {
      name: mtf.import_tf_tensor(mtf_mesh, tf.constant(array), mtf.Shape(dims))
      for name, (array, dims) in arrays.items()
    }
    lowered = lower({mtf_mesh: placement(mesh)}, build(**inputs))
    with tf.Session(config=session_config(mesh.num_devices)) as session:
      return session.run(
        {name: tf.cast(t, dtype) for name, t in lowered.tensors.items()}
      )


def run_model(
  config: ModelConfig,
  params: Mapping[str, np.ndarray],
  batch: Mapping[str, np.ndarray],
  *,
  mesh: MeshLayout = SINGLE,
  z_loss: float = 1e-4,
  backward: bool = True,
) -> ModelResult:
  """Returns logits, both losses and the gradients of their sum.

  `batch` is of random_tokens, random_documents or random_examples. Without
  `backward` there are no gradients, and the graph has half of its operations.
  """
  with tf.Graph().as_default():
    mtf_mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dims = model_dims(config, len(batch["inputs"]), mesh)
    features = {}
    for name, value in batch.items():
      length = mtf.Dimension("length", value.shape[1])
      features[name] = mtf.import_tf_tensor(
        mtf_mesh, tf.constant(value), mtf.Shape([dims.batch, length])
      )
    weights = TrainedWeights(mtf_mesh, config, dims, seed=0)
    palm = Palm(config, dims, weights, neighbours=features.get("neighbours"))
    logits = palm.logits(
      features["inputs"], features.get("segments"), features.get("prefix")
    )
    nats, log_z = cross_entropy(logits, features["targets"])
    weights = features.get("loss_weights")
    fetches = {
      "logits": logits,
      "loss": weighted_mean(nats, weights),
      "z_loss": z_loss * weighted_mean(mtf.square(log_z), weights),
    }
    variables = list(mtf_mesh.graph.trainable_variables) if backward else []
    gradients = mtf.gradients(
      [fetches["loss"] + fetches["z_loss"]], [v.value for v in variables]
    )
    for variable, gradient in zip(variables, gradients, strict=True):
      fetches[f"gradient of {variable.name}"] = gradient
    lowered: Lowered = lower({mtf_mesh: placement(mesh)}, fetches)
    lowered.tensors["logits"] = lowered.tensors["logits"][
      ..., : config.vocab_size
    ]
    with tf.Session(config=session_config(mesh.num_devices)) as session:
      load_parameters(session, lowered.slices[0], params)
      values = session.run(
        {name: tf.cast(t, tf.float32) for name, t in lowered.tensors.items()}
      )
  return ModelResult(
    logits=values["logits"],
    loss=float(values["loss"]),
    z_loss=float(values["z_loss"]),
    gradients={
      v.name: values[f"gradient of {v.name}"][tuple(map(slice, v.sizes))]
      for v in variables
    },
  )


@contextlib.contextmanager
def training(
  config: ModelConfig,
  optimizer: OptimizerConfig,
  features: Sequence[str],
  *,
  mesh: MeshLayout = SINGLE,
  seed: int = 0,
  batch_size: int = BATCH_SIZE,
  pods: PodsConfig = ONE_POD,
  loss: LossConfig = settings.PALM_LOSS,
  frozen: Sequence[str] = (),
  build: Callable[..., StepPrograms] = build_train_program,
) -> Iterator[Callable[..., tuple[dict[str, np.ndarray], list[dict]]]]:
  """Yields a function that trains on batches; each call starts at step 0.

  It returns every variable and the metrics of each step. The initial weights
  are its second argument, or drawn with `seed`. After each step all pods are
  compared to the bit. `build` builds the program.
  """
  with (
    tf.Graph().as_default(),
    tf.Session(
      config=session_config(mesh.pod_devices, pods.num_pods)
    ) as session,
  ):
    program = build(
      settings.step_config(config, mesh, optimizer, loss=loss, pods=pods),
      batch_size=batch_size,
      seed=seed,
      features=list(features),
      frozen=frozen,
    )
    step = TrainStep(Client(session), program)
    pods_are_equal = PodComparison(session, program).check

    def run(batches, params=None):
      session.run(program.initialize)
      for slices in program.pod_slices:
        load_parameters(session, slices, params or {})
      metrics = []
      for number, batch in enumerate(batches):
        metrics.append(step.run(batch, number))
        if len(program.pod_slices) > 1:
          pods_are_equal()
      return read_variables(session, program.slices), metrics

    yield run


def train(
  config: ModelConfig,
  optimizer: OptimizerConfig = PALM_OPTIMIZER,
  *,
  rows: Callable[..., dict] = random_tokens,
  params: Mapping[str, np.ndarray] | None = None,
  num_steps: int = NUM_STEPS,
  batch_size: int = BATCH_SIZE,
  **settings: object,
) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
  """Returns every variable after `num_steps` steps, and the metrics of each.

  `rows` makes a batch of `batch_size` sequences from the number of a step; see
  `training` for `params` and `settings`.
  """
  batches = [
    rows(config, batch_size=batch_size, seed=step) for step in range(num_steps)
  ]
  with training(
    config, optimizer, batches[0], batch_size=batch_size, **settings
  ) as run:
    return run(batches, params)
