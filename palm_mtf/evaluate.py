# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf evaluate`: the validation loss of the newest checkpoint."""

import json
import math

from palm_mtf import layout
from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.checkpoints import check_same_model, newest_checkpoint
from palm_mtf.config import AdafactorConfig, DataConfig, PalmConfig, RunConfig
from palm_mtf.data.batches import split_batch
from palm_mtf.data.corpus import load_corpus
from palm_mtf.data.statistics import unigram_entropy
from palm_mtf.data.vocabulary import load_vocabulary
from palm_mtf.disk import check_model_dir
from palm_mtf.layout import MeshLayout
from palm_mtf.pods_config import PodsConfig


def evaluate(
  *,
  model_dir: str,
  model: PalmConfig,
  mesh: MeshLayout,
  pods: PodsConfig,
  optimizer: AdafactorConfig,
  data: DataConfig,
  run: RunConfig,
  as_json: bool = False,
) -> None:
  """Prints loss, perplexity and bits per byte of the validation text.

  Args:
    model_dir: of a training run.
    model: the architecture.
    mesh: devices and layout rules of one pod.
    pods: of the training; one of them evaluates, as many rows at once as there.
    optimizer: unused; a recipe is the same for every command.
    data: text and vocabulary.
    run: batch size and number of batches are read.
    as_json: print one JSON object instead of lines for people.

  Raises:
    UserError: there is no checkpoint, or it is of another model.
  """
  del optimizer
  check_model_dir(model_dir)
  batch_size = run.batch_sizes.sizes[0]
  layout.check(mesh, model, batch_size, num_pods=pods.num_pods)
  shapes = parameter_shapes(model)
  checkpoint = newest_checkpoint(model_dir, shapes)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  check_same_model(checkpoint, shapes, vocabulary.sha256)
  corpus = load_corpus(
    model_dir, data, vocabulary, model.sequence_length, run.seed
  )
  batches = list(
    corpus.validation_batches(
      batch_size=batch_size, num_rows=run.num_validation_rows
    )
  )
  # All input is known to be good; TensorFlow takes seconds.
  from palm_mtf.loaded_model import LoadedModel

  num_parts = pods.num_pods * mesh.num_microbatches
  parts = [x for batch in batches for x in split_batch(batch, num_parts)]
  with LoadedModel(
    checkpoint,
    model,
    mesh,
    batch_size=batch_size // num_parts,
    features=list(parts[0]),
  ) as loaded:
    loss = loaded.mean_nats(parts)
  bits_per_token = loss / math.log(2)
  results = {
    "checkpoint": checkpoint.path,
    "step": checkpoint.manifest.step,
    "validation_loss": loss,
    "perplexity": math.exp(loss),
    "bits_per_byte": bits_per_token / corpus.validation_bytes_per_token,
    "unigram_entropy": unigram_entropy(batches),
  }
  if as_json:
    print(json.dumps(results))
    return
  for name, value in results.items():
    text = f"{value:.4f}" if isinstance(value, float) else value
    print(f"{name:16} {text}")
