# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Training programs of benches, in a graph and a session of their own."""

# It imports no other file of this folder, as bench_command.py, and TensorFlow
# only when a program is built: a process may set itself up before.

import contextlib
from collections.abc import Iterator

from palm_mtf.config import AdafactorConfig, Config, MeshLayout, PalmConfig
from palm_mtf.data.batches.batches import Batches

ONE_DEVICE = MeshLayout(mesh_shape="", layout="")
_WARM_UP_STEPS = 2  # the first compiles, the second fills caches


@contextlib.contextmanager
def training_program(
  model: PalmConfig,
  optimizer: AdafactorConfig,
  *,
  batch_size: int,
  mesh_layout: MeshLayout = ONE_DEVICE,
  seed: int = 0,
  **settings: object,
) -> Iterator[tuple]:
  """Yields a session and its TrainProgram, the first weights drawn.

  Args:
    model: architecture.
    optimizer: schedule, clipping, decay and z-loss.
    batch_size: sequences in one step.
    mesh_layout: axes and layout rules, checked against `model`.
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
      model,
      mesh_layout,
      optimizer,
      batch_size=batch_size,
      seed=seed,
      **settings,
    )
    session.run(program.initialize)
    yield session, program


@contextlib.contextmanager
def warm_training(config: Config, batches: Batches) -> Iterator:
  """Yields the TrainStep of a run, compiled, with the first weights.

  Args:
    config: settings of the run, which has one pod and one batch size.
    batches: batches of the run.
  """
  from palm_mtf.training.step import TrainStep

  with training_program(
    config.model,
    config.optimizer,
    batch_size=config.run.batch_sizes.sizes[0],
    mesh_layout=config.mesh_layout,
    seed=config.run.seed,
    features=batches.features,
  ) as (session, program):
    step = TrainStep(session, program)
    for _ in range(_WARM_UP_STEPS):
      step.run(batches.batch(0), 0)
    session.run(program.initialize)
    yield step
