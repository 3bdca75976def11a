# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What `palm_mtf data inspect` and `palm_mtf data statistics` look at."""

import dataclasses

from palm_mtf.errors import UserError, check_count, check_globs


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectionConfig:
  """What `data inspect` and `data statistics` look at.

  Attributes:
    inspect_steps: steps, counted from 0, whose batches are shown.
    inspect_rows: rows shown of each batch.
    overlap_files: a glob, or several in a list, of a further evaluation set
      whose overlap with the training text is measured; None for none.
  """

  inspect_steps: list[int] | tuple[int, ...] = (0,)
  inspect_rows: int = 2
  overlap_files: str | list[str] | tuple[str, ...] | None = None

  def __post_init__(self):
    steps, files = self.inspect_steps, self.overlap_files
    if not isinstance(steps, (list, tuple)) or not steps:
      raise UserError(
        f"INSPECT_STEPS = {steps!r}: give a list of steps, such as [0, 1000]."
      )
    for step in steps:
      check_count("INSPECT_STEPS", step, minimum=0)
    check_count("INSPECT_ROWS", self.inspect_rows, minimum=0)
    check_globs("OVERLAP_FILES", files)
