# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources of the data settings: TEXT_FILES, or the tasks of TASK."""

from palm_mtf.config import DataConfig
from palm_mtf.data.sources.document import Source
from palm_mtf.data.sources.text_files import TextFiles


def open_sources(
  data: DataConfig, sequence_length: int | None = None
) -> list[Source]:
  """Returns the sources of a run; their rates sum to 1.

  Args:
    data: the data settings of the run.
    sequence_length: tokens in a row, for preprocessors that cut token ids.

  Raises:
    UserError: files are missing, or TASK is no registered task.
  """
  if data.task is None:
    return [
      TextFiles(
        data.text_files,
        text_field=data.text_field,
        weight_field=data.weight_field,
        quality_field=data.filters.quality_field,
        validation_share=data.validation_share,
      )
    ]
  from palm_mtf.data.sources.seqio_task import open_task  # brings TensorFlow

  return open_task(data.task, data.validation_share, sequence_length)
