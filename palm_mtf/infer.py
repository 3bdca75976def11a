# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf generate`: what the newest checkpoint adds to PROMPTS."""

import json

from palm_mtf import layout
from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.checkpoints import (
  Checkpoint,
  check_same_model,
  newest_checkpoint,
)
from palm_mtf.config import AdafactorConfig, DataConfig, PalmConfig, RunConfig
from palm_mtf.data.vocabulary import Vocabulary, load_vocabulary
from palm_mtf.disk import check_model_dir
from palm_mtf.errors import UserError
from palm_mtf.layout import MeshLayout
from palm_mtf.sampling import check_prompts, continue_texts


def generate(
  *,
  model_dir: str,
  model: PalmConfig,
  mesh: MeshLayout,
  optimizer: AdafactorConfig,
  data: DataConfig,
  run: RunConfig,
  as_json: bool = False,
) -> None:
  """Prints a continuation of each of `run.prompts`.

  Args:
    model_dir: of a training run.
    model: the architecture.
    mesh: devices and layout rules.
    optimizer: unused; a recipe is the same for every command.
    data: the vocabulary is read.
    run: prompts, sample_tokens and seed are read.
    as_json: print one JSON object a prompt instead of text for people.

  Raises:
    UserError: there is no checkpoint or no prompt, the checkpoint is of another
      model, or a prompt is too long.
  """
  del optimizer
  check_model_dir(model_dir)
  layout.check(mesh, model)
  if not run.prompts:
    raise UserError(
      "PROMPTS = []: give at least one text to continue, such as "
      "--gin.PROMPTS='[\"def \"]'."
    )
  shapes = parameter_shapes(model)
  checkpoint = newest_checkpoint(model_dir, shapes)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  check_same_model(checkpoint, shapes, vocabulary.sha256)
  check_prompts(run, vocabulary, model.sequence_length)
  texts = continue_prompts(checkpoint, model, mesh, vocabulary, run)
  for prompt, text in zip(run.prompts, texts, strict=True):
    if as_json:
      print(json.dumps({"prompt": prompt, "continuation": text}))
    else:
      print(f"--- {prompt!r}\n{prompt}{text}\n")


def continue_prompts(
  checkpoint: Checkpoint,
  model: PalmConfig,
  mesh: MeshLayout,
  vocabulary: Vocabulary,
  run: RunConfig,
) -> list[str]:
  """Returns what the model of `checkpoint` adds to each of `run.prompts`."""
  if not run.prompts:
    return []
  # All input is known to be good; TensorFlow takes seconds.
  from palm_mtf.loaded_model import LoadedModel

  # A split batch has rows for each slice, be they filled by a prompt or not.
  slices = mesh.axis_size_of("batch")
  batch_size = -(-len(run.prompts) // slices) * slices
  with LoadedModel(checkpoint, model, mesh, batch_size=batch_size) as loaded:
    return continue_texts(
      loaded,
      vocabulary,
      run.prompts,
      sample_tokens=run.sample_tokens,
      seed=run.seed,
    )
