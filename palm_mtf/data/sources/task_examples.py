# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of the evaluation examples of SeqIO tasks."""

from collections.abc import Iterator
from typing import Any

from palm_mtf.data.sources.document import TRAIN, Document
from palm_mtf.data.sources.seqio_steps import (
  apply_steps,
  kind,
  split_at_tokenize,
)
from palm_mtf.data.sources.seqio_task import (
  find_provider,
  import_seqio,
)
from palm_mtf.errors import UserError
from palm_mtf.user_code import user_code

_BATCH = 32  # examples that TensorFlow hands over at once


def evaluation_examples(name: str, setting: str) -> Iterator[Document]:
  """Yields the examples of a task or mixture, of all splits but "train".

  Args:
    name: name of the task or mixture.
    setting: setting that names it, for messages.

  Raises:
    UserError: nothing of that name is registered, or its code fails; or a task
      has no other split, or makes no text.
  """
  seqio = import_seqio(name, setting)
  for task in seqio.get_subtasks(find_provider(name, setting)):
    with user_code(f"{setting}: the splits of {task.name}"):
      splits = [split for split in task.splits if split != TRAIN]
    if not splits:
      raise UserError(
        f"{setting} = {name!r}: {task.name} has no split but {TRAIN!r}; give a "
        "task with examples for evaluation."
      )
    for split in splits:
      yield from _texts(task, split, setting)


def _texts(task: Any, split: str, setting: str) -> Iterator[Document]:
  """Yields the examples of a split without unconditional options."""
  where = f"{setting}: {task.name}, split {split!r}"
  with user_code(where):
    seqio = import_seqio(task.name, setting)
    # Texts as they are before `tokenize`, whatever the vocabulary.
    to_text, _ = split_at_tokenize(task, seqio)
    dataset = apply_steps(
      task,
      to_text,
      split=split,
      sequence_length=None,
      seqio=seqio,
      where=where,
    )
    specs = dataset.element_spec
    names = [name for name in ("inputs", "targets") if name in specs]
    if not names or any(kind(specs[name]) != "text" for name in names):
      raise UserError(
        f"{where}: its preprocessors make no texts 'inputs' and 'targets'; let "
        "them end in seqio.preprocessors.tokenize, or give another task."
      )
    if "unconditional" in specs:  # an option alone, without its question
      dataset = dataset.filter(lambda example: ~example["unconditional"])
    dataset = dataset.map(lambda example: {n: example[n] for n in names})
    batches = dataset.batch(_BATCH).as_numpy_iterator()
  while True:
    with user_code(where):
      batch = next(batches, None)
    if batch is None:
      return
    for values in zip(*(batch[name] for name in names), strict=True):
      texts = [value.decode("utf-8", "replace") for value in values]
      yield Document(texts[-1], inputs=texts[0] if len(texts) > 1 else None)
