# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuations of texts by a checkpoint."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import Config
from palm_mtf.data.batches.packing import document_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

if TYPE_CHECKING:  # imports TensorFlow, which the checks do not need
  from palm_mtf.generation.inference.generator import Generator


def continue_prompts(
  checkpoint: Checkpoint, config: Config, vocabulary: Vocabulary
) -> list[str]:
  """Returns the model's continuation of each of PROMPTS."""
  prompts = config.run.prompts
  # Without prompts TensorFlow need not even be imported.
  if not prompts:
    return []
  with open_generator(checkpoint, config, vocabulary) as loaded:
    return [each.text for (each,) in loaded.continuations(prompts)]


@contextlib.contextmanager
def open_generator(
  checkpoint: Checkpoint, config: Config, vocabulary: Vocabulary
) -> Iterator["Generator"]:
  """Opens a checkpoint for decoding, and closes it behind the body."""
  # ACTIVATION_DTYPE is resolved already; the checkpoint is of this model.
  from palm_mtf.generation.inference.decoder_session import LoadedDecoder
  from palm_mtf.generation.inference.generator import Generator

  with LoadedDecoder(
    checkpoint,
    config.model,
    config.mesh_layout,
    config.decode.weight_dtype,
    for_steps=True,
  ) as loaded:
    yield Generator(
      loaded,
      vocabulary,
      config.decode,
      sample_tokens=config.run.sample_tokens,
      seed=config.run.seed,
      start_id=document_start(config.data.packing, vocabulary.eod_id),
    )
