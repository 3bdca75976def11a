# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The evaluation examples that no document of a run may contain."""

from collections.abc import Iterator, Sequence
from typing import Any

from palm_mtf.config import DataConfig
from palm_mtf.data.sources.document import TRAIN, Document
from palm_mtf.data.sources.seqio_steps import (
  apply_steps,
  kind_of_feature,
  read_examples,
  split_at_tokenize,
)
from palm_mtf.data.sources.seqio_task import find_provider, import_seqio
from palm_mtf.data.sources.text_files import MACROS, TextFiles
from palm_mtf.errors import UserError
from palm_mtf.user_code import user_code

_BATCH = 32  # examples per element of the tf.data.Dataset


def read_evaluation_sets(data: DataConfig) -> Iterator[Document]:
  """Yields the examples in DECONTAMINATE_TASKS and DECONTAMINATE_FILES.

  Raises:
    UserError: a task or a file cannot be read.
  """
  for name in data.filters.decontaminate_tasks:
    yield from evaluation_examples(name, "DECONTAMINATE_TASKS")
  if globs := data.filters.decontaminate_files:
    yield from read_all(globs, data, "DECONTAMINATE_FILES")


def read_all(
  globs: str | Sequence[str], data: DataConfig, setting: str
) -> Iterator[Document]:
  """Yields every document in the files of an evaluation set.

  Args:
    data: data settings, whose TEXT_FIELD applies to these files too.
    setting: name of the setting that holds the globs, for messages.

  Raises:
    UserError: a file cannot be read; see `TextFiles`.
  """
  files = TextFiles(
    globs,
    text_field=data.text_field,
    validation_share=data.validation_share,
    name=setting,
    settings=MACROS._replace(files=setting),
  )
  # Read both splits, because all documents here are for evaluation.
  for _, document in files.documents():
    yield document
  files.report_skipped()


def evaluation_examples(name: str, setting: str) -> Iterator[Document]:
  """Yields the examples of a task or mixture from all splits except "train".

  Args:
    setting: name of the setting that holds `name`, for messages.

  Raises:
    UserError: `name` is not registered, the code of a task fails, or a task has
      only the split "train" or makes no text.
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
      yield from _read_split(task, split, setting)


def _read_split(task: Any, split: str, setting: str) -> Iterator[Document]:
  where = f"{setting}: {task.name}, split {split!r}"
  with user_code(where):
    seqio = import_seqio(task.name, setting)
    # Skip `tokenize`, because documents and examples are compared as text.
    to_text, _ = split_at_tokenize(task, seqio)
    dataset = apply_steps(task, to_text, split=split, seqio=seqio, where=where)
    specs = dataset.element_spec
    names = [name for name in ("inputs", "targets") if name in specs]
    if not names or any(kind_of_feature(specs[x]) != "text" for x in names):
      raise UserError(
        f"{where}: its preprocessors make no texts 'inputs' and 'targets'; let "
        "them end in seqio.preprocessors.tokenize, or give another task."
      )
    if "unconditional" in specs:  # drop answer options without their question
      dataset = dataset.filter(lambda example: ~example["unconditional"])
    dataset = dataset.map(lambda example: {n: example[n] for n in names})
    dataset = dataset.batch(_BATCH)
  for batch in read_examples(dataset, where):
    for values in zip(*(batch[name] for name in names), strict=True):
      texts = [value.decode("utf-8", "replace") for value in values]
      yield Document(texts[-1], inputs=texts[0] if len(texts) > 1 else None)
