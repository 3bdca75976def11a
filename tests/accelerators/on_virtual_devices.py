# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of accelerators for this process's virtual CPU devices.

conftest.py gives JAX eight virtual devices, so that a process has two pods of
four devices, or one of eight.
"""

from palm_mtf.accelerators import train_program
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.programs.train_program import TrainProgram
from palm_mtf.runtime.client.connect import accelerators_here


def build_train_program(
  config: object,
  mesh_layout: MeshLayout,
  optimizer: object,
  *,
  pods: PodsConfig,
  **more: object,
) -> TrainProgram:
  """Builds a training step of accelerators in the current tf.Graph."""
  return train_program.build_train_program(
    config,
    mesh_layout,
    optimizer,
    pods=pods,
    devices=accelerators_here(mesh_layout, pods.num_pods).devices,
    **more,
  )
