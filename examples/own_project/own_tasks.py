# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Your own SeqIO task: sums of two numbers."""

import random

import seqio
import tensorflow as tf

NUM_EXAMPLES = {"train": 2000, "validation": 100}


def sums(
  split: str, shuffle_files: bool = False, seed: int | None = None
) -> tf.data.Dataset:
  """Returns the examples of a split: "12 plus 30 is ", with the target "42"."""
  numbers = random.Random(split)  # the same in every process
  pairs = [
    (numbers.randrange(100), numbers.randrange(100))
    for _ in range(NUM_EXAMPLES[split])
  ]
  return tf.data.Dataset.from_tensor_slices(
    {
      "inputs": [f"{a} plus {b} is " for a, b in pairs],
      "targets": [f"{a + b}" for a, b in pairs],
    }
  )


def accuracy(targets: list[str], predictions: list[str]) -> dict[str, float]:
  """Returns the percentage of predictions that are their targets."""
  pairs = list(zip(targets, predictions, strict=True))
  return {"accuracy": 100 * sum(a == b for a, b in pairs) / len(pairs)}


# SeqIO requires a vocabulary, but palm_mtf encodes with that of the run.
_UNUSED = seqio.ByteVocabulary()

seqio.TaskRegistry.add(
  "own_sums",
  source=seqio.FunctionDataSource(
    sums, splits=list(NUM_EXAMPLES), num_input_examples=NUM_EXAMPLES
  ),
  preprocessors=[seqio.preprocessors.tokenize],
  output_features={
    name: seqio.Feature(_UNUSED, add_eos=True) for name in ("inputs", "targets")
  },
  metric_fns=[accuracy],
)
