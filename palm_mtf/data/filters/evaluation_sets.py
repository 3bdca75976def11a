# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The evaluation examples that no document of a run may contain."""

import functools
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence

from palm_mtf.config import DataConfig
from palm_mtf.data.sources.document import Document
from palm_mtf.data.sources.read_files import MACROS
from palm_mtf.data.sources.task_examples import evaluation_examples
from palm_mtf.data.sources.text_files import TextFiles
from palm_mtf.data.statistics.contained_examples import ContainedExamples

_logger = logging.getLogger(__name__)


class EvaluationSets:
  """The examples of DECONTAMINATE_TASKS and DECONTAMINATE_FILES."""

  def __init__(self, data: DataConfig):
    """Takes the data settings of a run; reads nothing yet."""
    self._data = data

  def __bool__(self) -> bool:
    filters = self._data.filters
    return bool(filters.decontaminate_tasks or filters.decontaminate_files)

  @functools.cached_property
  def fingerprint(self) -> str:
    """A hash of all examples, in any order.

    Raises:
      UserError: as the tasks and files do.
    """
    digests = sorted({each.digest(16) for each in self._examples()})
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()

  def read(self) -> ContainedExamples:
    """Returns the 8-grams of all examples."""
    found = ContainedExamples(self._examples())
    _logger.info(
      f"documents that contain one of {found.num_examples:,} evaluation "
      f"examples are removed; {found.num_short:,} of fewer than 8 words are "
      "not looked for"
    )
    return found

  def _examples(self) -> Iterator[Document]:
    filters = self._data.filters
    tasks = filters.decontaminate_tasks
    sets = [evaluation_examples(name, "DECONTAMINATE_TASKS") for name in tasks]
    if filters.decontaminate_files:
      setting = "DECONTAMINATE_FILES"
      sets.append(read_all(filters.decontaminate_files, self._data, setting))
    return itertools.chain(*sets)


def read_all(
  globs: str | Sequence[str], data: DataConfig, setting: str
) -> Iterator[Document]:
  """Yields every document of files of an evaluation set.

  Args:
    globs: one glob or several.
    data: data settings, of which TEXT_FIELD is read.
    setting: setting that holds the globs, for messages.

  Raises:
    UserError: as `TextFiles`.
  """
  files = TextFiles(
    globs,
    text_field=data.text_field,
    validation_share=data.validation_share,
    name=setting,
    settings=MACROS._replace(files=setting),
  )
  # Both splits: none of an evaluation set is trained on.
  for _, document in files.documents():
    yield document
  files.report_skipped()
