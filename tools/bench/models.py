# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The models that cases train and decode, and their training programs."""

# TensorFlow is imported only when a program is built, so that a process can
# first change its own settings.

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from palm_mtf.architecture.parameters import parameter_shapes, parse_name
from palm_mtf.cli import gin_files
from palm_mtf.config import (
  MeshLayout,
  ModelConfig,
  OptimizerConfig,
  PodsConfig,
)
from palm_mtf.machine.activation_dtype import native_bfloat16
from tests.settings import PALM_OPTIMIZER, step_config

BATCH_SIZE = 8  # sequences in a step of one pod
ONE_DEVICE = MeshLayout(mesh_shape="", layout="")
WARM_UP_STEPS = 2  # not timed: the first compiles, the second fills caches


def _sizes(layers: int, width: int, vocab: int) -> dict[str, int]:
  return {
    "num_layers": layers,
    "d_model": width,
    "num_heads": width // 64,
    "d_kv": 64,
    "d_ff": 4 * width,
    "vocab_size": vocab,
    "sequence_length": 256,
  }


SIZES = {
  "4.8M": _sizes(4, 256, 4096),
  "26.6M": _sizes(6, 512, 8192),
  "113M": _sizes(12, 768, 16384),
  "125M": _sizes(12, 768, 32000),
  "1010M": _sizes(16, 2048, 32000),
}
_EXPERTS_PER_TOKEN = 2
_LLAMA = {
  "block": "serial",
  "norm": "rms_norm",
  "norm_epsilon": 1e-5,
  "attention": "grouped_query",
  "num_kv_heads": 3,
  "logits_scale": 1.0,
}
_SMOLLM2 = {**_LLAMA, **_sizes(30, 576, 49152), "d_ff": 1536}
# {name: settings of a block}; the blocks of SmolLM2 have its own size, 135M,
# and that of a SmolLM2 whose MLPs became four experts each.
BLOCKS = {
  "palm": {},
  "llama": _LLAMA,
  "mistral": {**_LLAMA, "num_kv_heads": 2},
  "mixtral": {
    **_LLAMA,
    "num_kv_heads": 2,
    "mlp": "experts",
    "num_experts": 10,
    "experts_per_token": _EXPERTS_PER_TOKEN,
  },
  "smollm2": _SMOLLM2,
  "smollm2_experts": {
    **_SMOLLM2,
    "mlp": "experts",
    "num_experts": 4,
    "experts_per_token": _EXPERTS_PER_TOKEN,
  },
}
# Blocks that are files of gin/models.
PRESETS = ("gemma3_270m",)
# Two blocks whose tokens use equally many parameters, but for the routers.
EXPERTS_AND_MLP = ("mistral", "mixtral")


def fast_dtype_here() -> str:
  """Returns the dtype that "auto" means on this machine, without TPUs."""
  return "bfloat16" if native_bfloat16() else "float32"


def benchmark_config(
  dtype: str, size: str = "26.6M", block: str = "palm"
) -> ModelConfig:
  """Returns the architecture of one of SIZES, and of BLOCKS or PRESETS.

  A block with its own size ignores `size`.
  """
  if block in PRESETS:
    files = ["recipes/quickstart.gin", f"models/{block}.gin"]
    loaded = gin_files.load("train", files, ["MODEL_DIR='none'"])
    return dataclasses.replace(loaded.build()[1].model, activation_dtype=dtype)
  settings = {**SIZES[size], **BLOCKS[block]}
  if block == "mixtral":
    settings["d_expert"] = settings["d_ff"] // _EXPERTS_PER_TOKEN
  return ModelConfig(activation_dtype=dtype, **settings)


def num_parameters(config: ModelConfig) -> int:
  """Returns the number of parameters, norm scales included, as in the peers."""
  return sum(
    math.prod(shape)
    for name, shape in parameter_shapes(config).items()
    if not parse_name(name).is_state
  )


def random_tokens(model: ModelConfig, batch_size: int) -> np.ndarray:
  """Returns random ids, [batch_size, sequence_length], int64."""
  shape = [batch_size, model.sequence_length]
  return np.random.default_rng(0).integers(model.vocab_size, size=shape)


@contextlib.contextmanager
def training_program(
  model: ModelConfig,
  optimizer: OptimizerConfig = PALM_OPTIMIZER,
  *,
  batch_size: int,
  mesh_layout: MeshLayout = ONE_DEVICE,
  seed: int = 0,
  **settings: object,
) -> Iterator[tuple]:
  """Yields a session and its TrainProgram with initial weights.

  Args:
    model: architecture.
    optimizer: one of the optimizers, with its schedule and clipping.
    batch_size: number of sequences in one step.
    mesh_layout: mesh axes and layout rules, checked against `model`.
    seed: seed of the initial weights.
    **settings: further arguments of build_train_program.
  """
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config
  from palm_mtf.programs.train_program import build_train_program

  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh_layout.num_devices)) as session,
  ):
    program = build_train_program(
      step_config(model, mesh_layout, optimizer),
      batch_size=batch_size,
      seed=seed,
      **settings,
    )
    session.run(program.initialize)
    yield session, program


@contextlib.contextmanager
def pod_cluster(pods: PodsConfig, mesh: MeshLayout) -> Iterator:
  """Yields the cluster of the pods' servers, which this process starts."""
  from palm_mtf.runtime.client.local_servers import PodServers
  from palm_mtf.runtime.host_functions import HOST_MODULES

  # Servers start before this process imports TensorFlow.
  with PodServers(pods, mesh, HOST_MODULES) as servers:
    from palm_mtf.executors.choose import executor_of
    from palm_mtf.runtime.client.connect import connect
    from palm_mtf.runtime.server_info import read_info

    places = servers.places()  # empty if the pods are in this process
    addresses = {place.address for pod in places for place in pod}
    infos = {x: read_info(x, pods.pod_timeout_secs) for x in addresses}
    yield connect(executor_of(mesh), pods, mesh, places, infos)
