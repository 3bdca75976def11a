# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The executor of hosts: TensorFlow sessions on CPUs, or GPUs without JAX."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from palm_mtf._tf import tf
from palm_mtf.config import MeshLayout, ModelConfig, PodsConfig
from palm_mtf.executors.executor import (
  Executor,
  OpenDecoder,
  OpenLoss,
  open_loss,
)
from palm_mtf.executors.host.products import fastest_products
from palm_mtf.executors.host.starter import HostStarter
from palm_mtf.executors.host.step_session import step_session_config
from palm_mtf.generation.decode.functions import LocalPrograms
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.generation.decode.weights import DecodeSettings
from palm_mtf.mesh.session import session_config
from palm_mtf.native.decoding import BY_FLAGS
from palm_mtf.programs.forward_program import build_forward_program
from palm_mtf.programs.train_program import build_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.processes import Process

_THIS_PROCESS = Process("/device:cpu:0")


class HostExecutor(HostStarter):
  """Runs programs on the devices of TensorFlow; see `Executor`."""

  build_program = staticmethod(build_program)

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
    """Opens a session of this process."""
    session = tf.Session(
      graph=tf.Graph(), config=session_config(mesh_layout.num_devices)
    )
    with Client(session) as client:
      with client.graph.as_default():
        program = build_forward_program(
          config, mesh_layout, batch_size=batch_size, features=features
        )
      yield open_loss(client, _THIS_PROCESS, program)

  @contextlib.contextmanager
  def open_decoder(
    self, settings: DecodeSettings, pods: PodsConfig, *, for_steps: bool
  ) -> Iterator[OpenDecoder]:
    """Opens a session of this process."""
    given = settings.model, settings.mesh_layout, settings.weight_dtype
    is_one = settings.mesh_layout.num_devices == 1  # or no kernel is packed
    products = BY_FLAGS
    if settings.is_measured and is_one:
      products = fastest_products()
    graph = tf.Graph()
    with graph.as_default():
      model = build_decode_model(*given, products)
    model = dataclasses.replace(model, mix=settings.mix)
    config = session_config(settings.mesh_layout.num_devices)
    # For packed weights, leave the threads to C++ products, which limit theirs.
    if for_steps and not model.is_packed:
      config = step_session_config(*given)
    with Client(tf.Session(graph=graph, config=config)) as client:
      build = LocalPrograms(model).build
      # If C++ does not run the steps, XLA compiles parts of them, and the cache
      # of what XLA compiles needs TensorFlow's Python package.
      bare = config.SerializeToString() if model.is_native else b""
      yield OpenDecoder(client, _THIS_PROCESS, model.layers, build, bare)


EXECUTOR: Executor = HostExecutor()
