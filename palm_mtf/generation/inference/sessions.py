# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sessions with a checkpoint's weights, for decoding or for the loss."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import CheckpointProcesses, CheckpointReader
from palm_mtf.config import (
  Config,
  DecodeConfig,
  MeshLayout,
  ModelConfig,
  PodsConfig,
)
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.errors import UserError
from palm_mtf.executors.choose import decodes_on_accelerators, decoding_executor
from palm_mtf.generation.decode.functions import DecodeFunction, Effect
from palm_mtf.generation.decode.generate_program import (
  DecodePrograms,
  build_decode_programs,
)
from palm_mtf.generation.decode.prompt_batch import PromptBatch
from palm_mtf.generation.decode.weights import DecodeSettings, LayerWeights
from palm_mtf.machine.host_memory import free_garbage, release_file_pages
from palm_mtf.mesh.slices import Slice
from palm_mtf.retrieval.keys import KeyIndex
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program


def load_weights(
  client: Client,
  layers: Sequence[LayerWeights],
  restore: Callable[[Mapping[str, Sequence[Slice]]], None],
) -> None:
  """Makes the decoding weights of all layers from a checkpoint.

  `restore` takes {name of a checkpoint's variable: its slices on devices}, and
  reads the checkpoint's values into the slices.
  """
  # A checkpoint is float32, up to eight times as large as the weights, so keep
  # only one layer of the checkpoint in memory at a time.
  for i, layer in enumerate(layers):
    restore(layer.slices)
    client.call(Program(operations=[layer.prepare]))
    if i == 0:  # later layers hardly run the code read so far; free it
      release_file_pages()
  # Free host memory now, because the caller compiles the first program next,
  # which takes more memory than anything before.
  free_garbage()
  release_file_pages()


class LoadedDecoder(contextlib.AbstractContextManager):
  """Decoding weights on devices; as a context manager, frees them at the end.

  The mesh splits a batch into `num_slices` slices, so the number of rows in a
  batch must be a multiple of `num_slices`.
  """

  def __init__(
    self,
    checkpoint: Checkpoint,
    config: ModelConfig,
    mesh: MeshLayout,
    weight_dtype: str = "activation",
    *,
    pods: PodsConfig | None = None,
    for_steps: bool = False,
    index: KeyIndex | None = None,
    is_measured: bool = False,
  ):
    # `for_steps`: whether decoding steps, rather than forward passes, will take
    # most of the time. Then the session gets only the threads that steps use.
    # `is_measured`: see `DecodeSettings`.
    free_garbage()  # so that an earlier LoadedDecoder takes no memory
    self.config = config.merged  # the model of the decoding weights
    self._texts: dict[tuple[DecodeConfig, PromptBatch], DecodePrograms] = {}
    self.index = index  # with an index of keys
    # Tokens stand after the virtual positions of an adapter.
    self.num_virtual = config.adapter_length or 0
    self.num_slices = mesh.axis_size_of("batch")
    pods = pods or PodsConfig()
    # Accelerators cannot call Python between the steps of a compiled program.
    self._calls_python = not decodes_on_accelerators(mesh, pods)
    settings = DecodeSettings(
      model=config,
      mesh_layout=mesh,
      weight_dtype=weight_dtype,
      mix=index.mix if index and self._calls_python else None,
      is_measured=is_measured,
    )
    executor = decoding_executor(mesh, pods)
    # If loading fails, `scope` closes the client, and the error names the
    # server that was lost, if any.
    with contextlib.ExitStack() as scope:
      self.client, process, layers, self._build, session = scope.enter_context(
        executor.open_decoder(settings, pods, for_steps=for_steps)
      )
      # keep_programs.py needs these to keep a graph.
      self.layers, self.session_config = layers, session
      reader = CheckpointReader(self.client, CheckpointProcesses(process))
      parts = [[layer.slices] for layer in layers]
      with reader.open_model(checkpoint, parts) as restore:
        load_weights(self.client, layers, lambda slices: restore([slices]))
      self._scope = scope.pop_all()

  @classmethod
  def of_run(
    cls, checkpoint: Checkpoint, config: Config, *, for_steps: bool = False
  ) -> "LoadedDecoder":
    """Loads a run's checkpoint; ACTIVATION_DTYPE is resolved in `config`."""
    index = None
    if config.decode.knn_index and config.decode.knn_weight:
      index = KeyIndex(config.decode, checkpoint.blake2b, config.model)
    return cls(
      checkpoint,
      config.model,
      config.mesh_layout,
      config.decode.weight_dtype,
      pods=config.pods,
      for_steps=for_steps,
      index=index,
      is_measured=True,
    )

  def build(self, function: DecodeFunction, state: str) -> Program:
    """Builds a program; those of one `state` share tensors, e.g. the cache.

    Raises UserError if an index of keys should change texts on accelerators.
    """
    makes_texts = function.effect is Effect.MAKES
    if self.index and makes_texts and not self._calls_python:
      raise UserError(
        "KNN_INDEX: accelerators score texts with an index, but only CPUs "
        'generate with one; leave it out, or set TPU = "" on a CPU.'
      )
    with self.client.graph.as_default():
      return self._build(function, state)

  def build_texts(
    self, decode: DecodeConfig, sizes: PromptBatch
  ) -> DecodePrograms:
    """Returns the programs that continue a batch of prompts; builds them once.

    The first run of each program compiles the program.
    """
    if (decode, sizes) not in self._texts:
      found = build_decode_programs(self.build, decode, sizes)
      self._texts[decode, sizes] = found
    return self._texts[decode, sizes]

  def close(self) -> None:
    """Closes the client, and frees the weights."""
    self._scope.close()

  def __exit__(self, *error: object) -> None:
    self._scope.__exit__(*error)


def mean_losses(
  losses: Callable[[Batch], Iterable[Sequence[float]]], batches: Iterable[Batch]
) -> list[float]:
  """Returns weighted means over all `batches`; first -log p per target in nats.

  `losses` returns (*means, sum of loss weights) for each part of a batch.
  """
  parts = [part for batch in batches for part in losses(batch)]
  *means, weights = zip(*parts, strict=True)
  return [float(np.average(x, weights=weights)) for x in means]


def compute_mean_loss(
  checkpoint: Checkpoint,
  model: ModelConfig,
  mesh: MeshLayout,
  batches: Sequence[Batch],
  pods: PodsConfig | None = None,
) -> float:
  """Returns a checkpoint's mean loss (nats per target) on batches of one shape.

  Memory holds only weights: no gradients and no optimizer slots.
  """
  pods = pods or PodsConfig()
  opened = decoding_executor(mesh, pods).open_loss(
    model,
    mesh,
    pods,
    batch_size=len(batches[0]["targets"]),
    features=list(batches[0]),
  )
  with opened as (client, process, slices, program):
    reader = CheckpointReader(client, CheckpointProcesses(process))
    with reader.open_model(checkpoint) as restore:
      restore([slices])
    (loss,) = mean_losses(lambda x: [client.call(program, x)], batches)
    return loss
