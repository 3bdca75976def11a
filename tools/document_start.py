# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures held-out documents after token 0 and after [eod].

  python -m tools.document_start runs/quickstart

With PACKING "joined", a row begins with token 0, also in the middle of a
document, and [eod] stands before every document except the first in a row.
Prints the mean difference between the two log-likelihoods of a document's first
SEQUENCE_LENGTH tokens.
"""

import argparse
import statistics

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.config import Config
from palm_mtf.console import configure_logging
from palm_mtf.data.batches.corpus import corpus_of_run
from palm_mtf.generation.inference.scorer import Example, Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder


def measure_differences(model_dir: str, config: Config) -> list[float]:
  """Returns log p after [eod] minus log p after 0 per document, in nats.

  Args:
    model_dir: MODEL_DIR of a training run.
    config: settings of the run.
  """
  model = config.model
  checkpoint, vocabulary = open_newest(model_dir, config)
  corpus = corpus_of_run(model_dir, config, vocabulary)
  documents = [
    Example([], tokens.read(begin, min(end, begin + model.sequence_length))[0])
    for tokens in [store.validation.tokens for store in corpus.stores]
    for begin, _, end in tokens.spans().tolist()
  ]
  with LoadedDecoder(checkpoint, model, config.mesh_layout) as loaded:
    log_p = [
      dict(Scorer(loaded, start_id=start).log_likelihoods(documents))
      for start in (0, vocabulary.eod_id)
    ]
  return [log_p[1][i] - log_p[0][i] for i in range(len(documents))]


def main() -> None:
  """Prints the comparison."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("model_dir", metavar="MODEL_DIR")
  model_dir = parser.parse_args().model_dir
  configure_logging()
  _, config = load_run("evaluate", model_dir, {})
  found = measure_differences(model_dir, config)
  error = statistics.stdev(found) / len(found) ** 0.5
  print(
    f"{len(found)} documents: [eod] over 0, nats per document: "
    f"{statistics.fmean(found):.3f} +- {error:.3f}"
  )


if __name__ == "__main__":
  main()
