# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a training program on the host path or on virtual accelerators.

The tests give JAX eight virtual CPU devices (tests/conftest.py), so that a
process has two pods of four devices, or one of eight.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from palm_mtf._tf import tf
from palm_mtf.config import (
  LossConfig,
  MeshLayout,
  ModelConfig,
  PodsConfig,
  StepConfig,
)
from palm_mtf.executors.xla.executor import EXECUTOR
from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.step_functions import PodStep
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import TrainStep
from tests.mtf_testing import read_variables, train
from tests.settings import PALM_LOSS, PALM_OPTIMIZER, step_config

FEATURES = ("inputs", "targets", "segments", "loss_weights", "prefix")
BATCH_SIZE = 8


def build_on_accelerators(config: StepConfig, **more: object) -> StepPrograms:
  """Builds a training step of accelerators in the current tf.Graph."""
  here = EXECUTOR.open_here(config.mesh_layout, config.pods.num_pods)
  of_executor = {"devices": here.devices, "build": EXECUTOR.build_program}
  return build_train_program(config, **of_executor, **more)


def train_on(
  mesh: MeshLayout, num_pods: int, config: ModelConfig, *given, **how: object
) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
  """Returns what `train` does, on accelerators if the mesh is one of TPUs."""
  build = build_on_accelerators if mesh.tpu else build_train_program
  pods = PodsConfig(num_pods=num_pods, dcn_dtype="float32")
  settings = {"pods": pods, "build": build, "batch_size": BATCH_SIZE, **how}
  return train(config, *given, mesh=mesh, **settings)


def pod_step(
  model: ModelConfig,
  mesh: MeshLayout,
  *,
  num_rows: int = 4,
  loss: LossConfig = PALM_LOSS,
  dcn_dtype: str = "float32",
  frozen: Sequence[str] = (),
  features: Sequence[str] = ("inputs", "targets"),
) -> PodStep:
  """Returns the programs of a pod."""
  settings = {"num_rows": num_rows, "dcn_dtype": dcn_dtype, "frozen": frozen}
  settings |= {"model": model, "mesh_layout": mesh, "loss": loss, "seed": 0}
  settings |= {"optimizer": PALM_OPTIMIZER, "features": list(features)}
  return PodStep(StepSettings(**settings), "cpu")


def lower_gradients(made: PodStep, mesh: jax.sharding.Mesh) -> Any:
  """Returns the lowered program that finds gradients."""
  given = made.abstract_state(mesh), made.abstract_batch(mesh)
  return made.gradients(mesh).lower(*given, made.abstract_numbers(mesh))


class ProgramRun:
  """A program with initial variables."""

  def __init__(self, session: tf.Session, program: StepPrograms):
    self.session, self.program = session, program
    self.step = TrainStep(Client(session), program)
    session.run(program.initialize)

  def variables(self, pod: int = 0) -> dict[str, np.ndarray]:
    """Returns all variables of a pod."""
    return read_variables(self.session, self.program.pod_slices[pod])

  def fetch(self, build: Callable[[], Any], feed: Any = None) -> Any:
    """Builds tensors or operations, and runs them."""
    return self.session.run(build(), feed)


@contextlib.contextmanager
def run_of(
  config: ModelConfig,
  mesh: MeshLayout,
  *,
  num_pods: int = 1,
  features: Sequence[str] = FEATURES,
  batch_size: int = BATCH_SIZE,
  **more: object,
) -> Iterator[ProgramRun]:
  """Opens a run; on accelerators if `mesh` has TPU.

  `more` are an optimizer and a loss, instead of PaLM's.
  """
  build = build_on_accelerators if mesh.tpu else build_train_program
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.pod_devices, num_pods)) as session,
  ):
    pods = PodsConfig(num_pods=num_pods, dcn_dtype="float32")
    config = step_config(config, mesh, pods=pods, **more)
    how = {"batch_size": batch_size, "features": features}
    program = build(config, seed=3, **how)
    yield ProgramRun(session, program)
