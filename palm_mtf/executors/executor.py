# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of executors, which run programs on the devices of pods."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from palm_mtf.config import MeshLayout, ModelConfig, OptimizerConfig, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.generation.decode.functions import BuildProgram
from palm_mtf.generation.decode.weights import DecodeSettings, LayerWeights
from palm_mtf.mesh.slices import Slice, variables_of
from palm_mtf.programs.features import ReadFeatures
from palm_mtf.programs.loss_function import LossFunction
from palm_mtf.programs.step_programs import LossProgram, StepPrograms
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.pod_hosts import Starter
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.program import Program, state_of


class OpenDecoder(NamedTuple):
  """Decoding weights on devices, before their values are loaded."""

  client: Client
  process: Process  # that reads the checkpoint
  layers: Sequence[LayerWeights]  # load them in turn, to save memory
  build: BuildProgram
  # Serialized ConfigProto. A session with it runs the saved graph of programs
  # without TensorFlow's Python package, and gives the same texts
  # (generation/inference/kept_decoder.py). b"" if no session can.
  session: bytes = b""


class OpenLoss(NamedTuple):
  """A pod that computes losses of batches of one size."""

  client: Client
  process: Process  # that reads the checkpoint
  slices: Mapping[str, list[Slice]]  # of the weights, by name in checkpoints
  # Takes a batch's features by name. Returns the mean loss, in nats per target,
  # and the sum of the loss weights, [] float32 each.
  program: Program


def open_loss(client: Client, process: Process, built: LossProgram) -> OpenLoss:
  """Returns the loss of a built program; `process` reads the checkpoint."""
  reads = state_of(variables_of([built.slices]))
  outputs = [built.loss, built.weight_sum]
  program = Program(built.features, outputs, reads=reads)
  return OpenLoss(client, process, built.slices, program)


class Executor(Starter, Protocol):
  """Runs programs on the devices of pods."""

  def build_program(
    self,
    loss_function: LossFunction,
    mesh_layout: DeviceMesh,
    optimizer: OptimizerConfig,
    *,
    batch_size: int,
    pods: PodsConfig,
    devices: Any,
    read: ReadFeatures | None = None,
  ) -> StepPrograms:
    """Builds a training step of any model in the current tf.Graph.

    Args:
      loss_function: the model and the loss of a microbatch.
      mesh_layout: mesh of each pod, and layout rules.
      batch_size: rows in one step, over all pods.
      devices: devices of the pods, which this executor has opened.
      read: builds the operations by which servers read features; None if the
        client feeds all features.

    Raises UserError if the devices cannot run an operation of the model.
    """

  def open_loss(
    self,
    config: ModelConfig,
    mesh_layout: MeshLayout,
    pods: PodsConfig,
    *,
    batch_size: int,
    features: Sequence[str],
  ) -> AbstractContextManager[OpenLoss]:
    """Opens the first pod, with weights but without optimizer slots."""

  def open_decoder(
    self, settings: DecodeSettings, pods: PodsConfig, *, for_steps: bool
  ) -> AbstractContextManager[OpenDecoder]:
    """Opens the first pod for decoding.

    `for_steps` tells whether decoding steps, rather than forward passes, will
    take most of the time; steps use fewer threads.
    """
