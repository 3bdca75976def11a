# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Registers SeqIO tasks as T5 users write them, and reads registered tasks."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import gin
import numpy as np
import seqio
import tensorflow as tf

from palm_mtf.data.sources.seqio_task import open_task

TEXTS = [f"line {i}: caf\u00e9 \U0001f600" for i in range(300)]
# Tests fail if a task's own vocabulary is loaded.
UNREACHABLE = seqio.SentencePieceVocabulary("gs://nowhere/t5.model", 100)
REKEY = functools.partial(
  seqio.preprocessors.rekey, key_map={"targets": "text"}
)
TOKENIZE = seqio.preprocessors.tokenize
T5_STEPS = [
  REKEY,
  TOKENIZE,
  seqio.CacheDatasetPlaceholder(),
  seqio.preprocessors.append_eos_after_trim,
]


@contextlib.contextmanager
def registries_restored() -> Iterator[None]:
  """Removes the tasks and mixtures that the body registers."""
  kept = [
    (registry, dict(registry._REGISTRY))
    for registry in (seqio.TaskRegistry, seqio.MixtureRegistry)
  ]
  yield
  for registry, names in kept:
    registry._REGISTRY.clear()
    registry._REGISTRY.update(names)


def add(
  name,
  source,
  steps=T5_STEPS,
  features=("targets",),
  vocabulary=None,
  **evaluation,
):
  """Registers a task; `evaluation` has metric_fns and a postprocess_fn."""
  vocabulary = vocabulary or UNREACHABLE
  return seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=steps,
    output_features={f: seqio.Feature(vocabulary) for f in features},
    **evaluation,
  )


def add_lines(name, path, steps=T5_STEPS, **keywords):
  source = seqio.TextLineDataSource({"train": str(path)})

  def to_text(dataset):
    return dataset.map(lambda line: {"text": line})

  return add(name, source, [to_text, *steps], **keywords)


def add_examples(name, examples: dict, steps=T5_STEPS, **keywords):
  """Registers a task with examples {split: {feature: values}}."""

  def read(split, shuffle_files=False, seed=None):
    assert not shuffle_files
    return tf.data.Dataset.from_tensor_slices(examples[split])

  source = seqio.FunctionDataSource(read, splits=tuple(examples))
  return add(name, source, steps, **keywords)


def open_one(name, share=0.1, sequence_length=None):
  (source,) = open_task(name, share, sequence_length)
  return source


def texts_of(source, split="train") -> list[str]:
  return [d.text for name, d in source.documents() if name == split]


def bind(**bindings: object) -> None:
  """Sets parameters of palm_mtf.tasks as a gin file does; "__" is the dot."""
  modules = dict.fromkeys(name.partition("__")[0] for name in bindings)
  gin.clear_config()
  gin.parse_config(
    [
      "from __gin__ import dynamic_registration",
      *(f"from palm_mtf.tasks import {name}" for name in modules),
      *(f"{k.replace('__', '.')} = {v!r}" for k, v in bindings.items()),
    ]
  )


def examples_of(name: str) -> list[dict]:
  """Returns the validation examples of a task or mixture, in their order."""
  task = seqio.get_mixture_or_task(name)
  dataset = task.get_dataset(split="validation", shuffle=False, seed=42)
  return list(dataset.as_numpy_iterator())


def text_of(example: dict, feature: str) -> str:
  return example[f"{feature}_pretokenized"].decode()


def targets_of(name: str, examples: list[dict]) -> list:
  """Returns the targets that the metric functions of a task get."""
  task = seqio.get_mixture_or_task(name)
  return [
    task.postprocess_fn(text_of(e, "targets"), example=e, is_target=True)
    for e in examples
  ]


def scores_of(name: str, examples: list[dict], likelihood) -> dict[str, float]:
  """Returns the metrics of a model whose scores are `likelihood(example)`."""
  targets = targets_of(name, examples)
  scores = [float(likelihood(example)) for example in examples]
  results = {}
  for metric in seqio.get_mixture_or_task(name).score_metric_fns:
    results |= metric(targets, scores)
  return results


def mean_score(targets, scores) -> dict[str, float]:
  assert len(targets) == len(scores)
  return {"mean_score": np.mean(scores)}


def exact(targets, predictions) -> dict[str, float]:
  same = [t == p for t, p in zip(targets, predictions, strict=True)]
  return {"exact": np.mean(same)}


@dataclasses.dataclass
class Says:
  """Answers that the test chooses."""

  texts: list[list[str]] = ()
  numbers: list[float] = ()

  def predictions(self):
    return self.texts

  def scores(self):
    return self.numbers

  def prediction_scores(self):
    return [[-float(len(x)) for x in texts] for texts in self.texts]
