# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the evaluation examples that the training text does not contain.

As in PaLM (section 8), an example is contaminated if at least 70% of its word
8-grams occur anywhere in the training documents. The 8-grams come from the
example's inputs and targets, without exemplars. If one option of a question is
contaminated, all its options are. Examples of fewer than 8 words are clean. The
results are in MODEL_DIR/eval/contamination/my_task-validation-<hash>.json.
"""

import logging
import os
import urllib.parse
from collections.abc import Iterable, Sequence

import numpy as np

from palm_mtf.config import Config
from palm_mtf.data.filters.decide import MeasuringPool
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.sources.document import (
  TRAIN,
  Document,
  Source,
  hash_parts,
  num_repeats,
  read_with_progress,
)
from palm_mtf.data.sources.files import FileDigests, writable_folder
from palm_mtf.data.statistics.contamination import ContainedExamples
from palm_mtf.errors import UserError
from palm_mtf.evaluation.seqio_tasks import EvalTask
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.model_dir.sealed import read_sealed, seal

_logger = logging.getLogger(__name__)

_SEAL = "seal"
_VERSION = 1  # increase it if the definition of "contaminated" changes


def find_clean_examples(
  model_dir: str, config: Config, tasks: Iterable[EvalTask]
) -> dict[str, list[int]]:
  """Returns {name of a task: indices of its clean examples}.

  Compares only training text that passes the run's filters, and reads the text
  once for all tasks that have no stored result in MODEL_DIR.

  Raises:
    UserError: if the training text is missing or consists of token ids, or the
      disk is full.
  """
  folders = ModelDir(model_dir)
  sources = open_filtered(model_dir, config.data, config.model.sequence_length)
  folder = writable_folder(config.data.cache_folder, folders.tokens)
  with FileDigests(os.path.join(folder, "digests.json")) as digests:
    text = [source.fingerprint(digests) for source in sources]
  paths, found = {}, {}
  for task in tasks:
    # The file's name depends only on the training text and the task's examples,
    # so that the file is found even if other settings change.
    examples = [each.digest() for each in task.texts]
    key = hash_parts((_VERSION, text, examples), num_bytes=8)
    name = urllib.parse.quote(f"{task.name}-{task.split}-{key}.json", safe="")
    paths[task] = os.path.join(folders.contamination, name)
    found[task] = _read(paths[task])
  missing = [task for task, numbers in found.items() if numbers is None]
  if missing:
    for task, numbers in _search(sources, missing).items():
      content = {"examples": len(task.targets), "contaminated": numbers}
      write_atomically(paths[task], json_text(seal(content, _SEAL)).encode())
      found[task] = numbers
  clean = {}
  for task, numbers in found.items():
    contaminated, count = set(numbers), len(task.targets)
    _logger.info(
      f"{task.name}: the training text contains {len(numbers):,} of {count:,} "
      "examples"
    )
    clean[task.name] = [n for n in range(count) if n not in contaminated]
  return clean


def _search(
  sources: Sequence[Source], tasks: Sequence[EvalTask]
) -> dict[EvalTask, list[int]]:
  """Returns {task: indices of its contaminated examples}."""
  examples = ContainedExamples(text for task in tasks for text in task.texts)
  found = np.zeros(len(examples.table), bool)
  with MeasuringPool(None, examples) as pool:
    for source in sources:
      for measures in pool.measure(_read_training_texts(source)):
        for ngrams in measures.ngrams:
          found[ngrams] = True
  contained = examples.contained(found)
  ends = np.cumsum([len(task.texts) for task in tasks])[:-1]
  return {
    task: _complete_questions(task, np.flatnonzero(mine).tolist())
    for task, mine in zip(tasks, np.split(contained, ends), strict=True)
  }


def _complete_questions(task: EvalTask, contained: Sequence[int]) -> list[int]:
  """Returns `contained`, and the other options of the same questions."""
  questions = {task.questions[number] for number in contained}
  return [n for n, each in enumerate(task.questions) if each in questions]


def _read_training_texts(source: Source) -> Iterable[Document]:
  for split, document in read_with_progress(source, "Comparing"):
    if not isinstance(document.text, str):
      raise UserError(
        f"CLEAN_SUBSET = True: {source.name} makes token ids, which cannot be "
        "compared with the text of examples; set it to False."
      )
    if split == TRAIN and num_repeats(document):
      yield document


def _read(path: str) -> list[int] | None:
  try:
    return read_sealed(path, _SEAL)[0]["contaminated"]
  except (OSError, ValueError):
    return None  # missing or damaged: search again
