# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the validation loss of a run with quantized weights.

  python -m tools.bench quantized_loss --model_dir runs/quickstart

The loss is over the rows that `palm_mtf evaluate` reads, for the newest
checkpoint and each WEIGHT_DTYPE, by the program that scores.
"""

import argparse
import math
from collections.abc import Iterator, Sequence

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.console import configure_logging
from palm_mtf.data.batches.corpus import Batch, corpus_of_run
from palm_mtf.errors import UserError
from tools.bench.command import REQUIRED, Flag

WEIGHT_DTYPES = ("activation", "int8", "int4")
BOUNDS = {"loss": (0, math.inf), "perplexity": (1, math.inf)}
FLAGS = {"--model_dir": Flag(None, "a training run", settings=REQUIRED)}


def _measure_loss(
  checkpoint: Checkpoint,
  config: ModelConfig,
  batches: Sequence[Batch],
  weight_dtype: str,
) -> float:
  """Returns the mean of -log p over all targets, in nats per token."""
  import numpy as np

  from palm_mtf.generation.decode.score_program import ScoreRows
  from palm_mtf.generation.inference.sessions import LoadedDecoder, mean_losses

  mesh = MeshLayout(mesh_shape="", layout="")
  with LoadedDecoder(checkpoint, config, mesh, weight_dtype) as loaded:
    rows, length = batches[0]["inputs"].shape
    score = loaded.build(ScoreRows(rows, length, ["token_loss"]), "")

    def losses(batch: Batch) -> Iterator[tuple[float, float]]:
      given = {name: batch[name] for name in ("inputs", "targets")}
      given["num_given"] = np.zeros([rows])
      token_loss = loaded.client.call(score, given)["token_loss"]
      weights = batch.get("loss_weights", np.ones(token_loss.shape))
      return zip(token_loss.ravel(), weights.ravel(), strict=True)

    return mean_losses(losses, batches)[0]


def measure_run(model_dir: str) -> dict:
  """Returns loss and perplexity of each of WEIGHT_DTYPES.

  "perplexity_ratio" is the perplexity divided by that of "activation".

  Raises:
    UserError: if there is no run with a checkpoint, or its rows are packed.
  """
  _, config = load_run("evaluate", model_dir, {})
  model, run, data = config.model, config.run, config.data
  checkpoint, vocabulary = open_newest(model_dir, config)
  corpus = corpus_of_run(model_dir, config, vocabulary)
  batches = list(
    corpus.validation_batches(
      batch_size=run.batch_sizes.sizes[0], num_rows=run.num_validation_rows
    )
  )
  # The decoder has no mask between documents.
  if "segments" in batches[0]:
    raise UserError(
      f'PACKING = "{data.packing}": rows hold several documents, of which a '
      'decoder sees one; measure a run with PACKING = "joined" or "single".'
    )
  losses = {
    weight_dtype: _measure_loss(checkpoint, model, batches, weight_dtype)
    for weight_dtype in WEIGHT_DTYPES
  }
  return {
    "step": checkpoint.manifest.step,
    "activation_dtype": model.activation_dtype,
    **{
      weight_dtype: {
        "loss": loss,
        "perplexity": math.exp(loss),
        "perplexity_ratio": math.exp(loss - losses["activation"]),
      }
      for weight_dtype, loss in losses.items()
    },
  }


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields one record."""
  configure_logging()
  yield measure_run(chosen.model_dir)


def row(record: dict) -> str:
  """Returns the whole table."""
  step, dtype = record["step"], record["activation_dtype"]
  lines = [f"step {step}, {dtype}"]
  lines.append(f"{'weights':<10} {'loss':>8} {'perplexity':>11} {'ratio':>8}")
  lines += [
    f"{name:<10} {record[name]['loss']:>8.5f} "
    f"{record[name]['perplexity']:>11.5f} "
    f"{record[name]['perplexity_ratio']:>8.5f}"
    for name in WEIGHT_DTYPES
  ]
  return "\n".join(lines)
