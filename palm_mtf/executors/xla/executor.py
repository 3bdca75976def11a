# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The executor of accelerators: XLA compiles programs, and JAX runs them."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf.config import (
  LossConfig,
  MeshLayout,
  ModelConfig,
  OptimizerConfig,
  PodsConfig,
)
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.executors.executor import (
  Executor,
  OpenDecoder,
  OpenLoss,
  open_loss,
)
from palm_mtf.executors.xla import pod_arrays
from palm_mtf.executors.xla.decode_client import PodDecoder
from palm_mtf.executors.xla.devices import AcceleratorDevices, find_devices
from palm_mtf.executors.xla.host_calls import describe_failure
from palm_mtf.executors.xla.parts import LoweringError
from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.stages_builder import StagesBuilder
from palm_mtf.executors.xla.start_hosts import start_hosts
from palm_mtf.executors.xla.step_builder import StepBuilder
from palm_mtf.executors.xla.whole_model import WholeSettings, name_loss_function
from palm_mtf.generation.decode.weights import DecodeSettings
from palm_mtf.json_text import named_text
from palm_mtf.mesh.cpu_gpu import Devices
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.features import ReadFeatures
from palm_mtf.programs.loss_function import LossFunction, PalmLoss
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.connect import open_pod
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.client.pod_hosts import LocalDevices, PodHosts
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.server.clients import free_memory
from palm_mtf.runtime.server_info import ServerInfo


class XlaExecutor:
  """Runs programs on TPUs and GPUs; see `Executor`."""

  describe_failure = staticmethod(describe_failure)

  def build_program(
    self,
    loss_function: LossFunction,
    mesh_layout: DeviceMesh,
    optimizer: OptimizerConfig,
    *,
    batch_size: int,
    pods: PodsConfig,
    devices: AcceleratorDevices,
    read: ReadFeatures | None = None,
  ) -> StepPrograms:
    """Builds a training step of any model in the current tf.Graph."""
    begin = loss_function.first_backward
    num_rows, dcn_dtype = batch_size // pods.num_pods, pods.dcn_dtype
    if isinstance(loss_function, PalmLoss):
      step = loss_function.step
      settings = StepSettings(
        model=step.model,
        mesh_layout=step.mesh_layout,
        optimizer=optimizer,
        loss=step.loss,
        features=list(loss_function.features),
        num_rows=num_rows,
        dcn_dtype=dcn_dtype,
        seed=loss_function.seed,
        frozen=list(loss_function.frozen),
      )
      builder = StagesBuilder if mesh_layout.stages > 1 else StepBuilder
      return builder(settings, devices, read).build(pods, begin)
    whole = WholeSettings(
      loss_function=name_loss_function(loss_function),
      mesh_layout=_to_device_mesh(mesh_layout),
      optimizer=optimizer,
      num_rows=num_rows,
      dcn_dtype=dcn_dtype,
    )
    programs = StepBuilder(whole, devices, read).build(pods, begin)
    try:
      pod_arrays.make_programs(named_text(whole), 0, 1).lower()
    except LoweringError as error:
      operation, reason = error.args
      raise UserError(
        f"the model function's operation {operation} cannot run on TPUs: "
        f"{reason.rstrip('.')}; "
        'use another operation, or set TPU = "" to train on CPUs.'
      ) from error
    return programs

  def open_here(self, mesh: DeviceMesh, num_pods: int) -> LocalDevices:
    """Takes the accelerators of this process; UserError if some are missing."""
    num_parts = num_pods * mesh.stages
    find_devices(mesh, pod=num_parts - 1)
    client = "/device:cpu:0"
    devices = AcceleratorDevices(
      client,
      [[Process(client)]] * num_parts,
      [0] * mesh.num_devices,
      num_stages=mesh.stages,
    )
    config = session_config(1, num_parts)
    config.device_count["GPU"] = 0  # TensorFlow leaves the GPUs to JAX
    release = functools.partial(free_memory, devices.name)
    return LocalDevices(devices, config, release)

  def start(
    self, mesh: DeviceMesh, pods: PodsConfig, hosts: PodHosts
  ) -> Devices:
    """Starts JAX on the hosts; UserError if one has other devices."""
    assert isinstance(mesh, MeshLayout)  # servers run no other model
    return start_hosts(mesh, pods, hosts)

  def find_places(
    self, places: Sequence[Sequence[Place]]
  ) -> Sequence[Sequence[Place]]:
    """Returns device 0 of each server, the only one that TensorFlow has."""
    return [[x._replace(device=0) for x in pod] for pod in places]

  def check_servers(self, infos: Mapping[str, ServerInfo], dtype: str) -> None:
    """Accepts all servers: accelerators compute in every ACTIVATION_DTYPE."""

  @contextlib.contextmanager
  def open_loss(
    self,
    config: ModelConfig,
    mesh_layout: MeshLayout,
    pods: PodsConfig,
    *,
    batch_size: int,
    features: Sequence[str],
  ) -> Iterator[OpenLoss]:
    """Opens the first pod of ISLANDS, or this process's accelerators."""
    mesh_layout, pods = _first_stage(mesh_layout, pods)
    settings = StepSettings(  # without optimizer slots
      model=config,
      mesh_layout=dataclasses.replace(mesh_layout, num_microbatches=1),
      optimizer=None,
      loss=LossConfig(z_loss=0.0),
      features=list(features),
      num_rows=batch_size,
      dcn_dtype="float32",
      seed=0,
    )
    with self._open_pod(mesh_layout, pods) as (client, devices):
      with client.graph.as_default():
        program = StepBuilder(settings, devices, None).build_loss()
      # The client reads checkpoints, because a server may lack the files.
      yield open_loss(client, Process(devices.client), program)

  @contextlib.contextmanager
  def open_decoder(
    self, settings: DecodeSettings, pods: PodsConfig, *, for_steps: bool
  ) -> Iterator[OpenDecoder]:
    """Opens the first pod of ISLANDS, or this process's accelerators."""
    mesh_layout, pods = _first_stage(settings.mesh_layout, pods)
    settings = dataclasses.replace(settings, mesh_layout=mesh_layout)
    with self._open_pod(mesh_layout, pods) as (client, devices):
      programs = PodDecoder(settings, devices)
      with client.graph.as_default():
        layers = programs.make_layers()
      yield OpenDecoder(client, Process(devices.client), layers, programs.build)

  @contextlib.contextmanager
  def _open_pod(
    self, mesh: MeshLayout, pods: PodsConfig
  ) -> Iterator[tuple[Client, AcceleratorDevices]]:
    with open_pod(self, mesh, pods) as (client, devices):
      assert isinstance(devices, AcceleratorDevices)  # `self` has opened them
      yield client, devices


def _to_device_mesh(layout: DeviceMesh) -> DeviceMesh:
  """Returns the settings that a model other than PaLM has, too."""
  names = [x.name for x in dataclasses.fields(DeviceMesh)]
  return DeviceMesh(**{name: getattr(layout, name) for name in names})


def _first_stage(
  mesh: MeshLayout, pods: PodsConfig
) -> tuple[MeshLayout, PodsConfig]:
  """Returns a mesh without stages, and ISLANDS with servers of one stage.

  The devices of one stage run a trained model.
  """
  islands = pods.islands
  if mesh.stages > 1 and islands and not isinstance(islands, str):
    first = islands[0]
    # On accelerators a server's device numbers in ISLANDS have no meaning.
    names = [x.partition("/")[0] for x in first]
    islands = [names[: max(1, len(names) // mesh.stages)]]
  return (
    dataclasses.replace(mesh, stages=1),
    dataclasses.replace(pods, islands=islands),
  )


EXECUTOR: Executor = XlaExecutor()
