# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The few-shot protocol: which exemplars and header stand before a question."""

import dataclasses
from collections.abc import Mapping

from palm_mtf.errors import UserError, check_choice, check_count, check_texts

DRAWN, FIRST = "drawn", "first"
_MAX_SHOTS = 10_000  # exemplars are one row with their question


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotConfig:
  """Exemplars of each task, and the header before them.

  Attributes:
    num_shots: exemplars before each example; None for all of a file of
      `exemplar_files`, and for tasks without one as they are registered.
    exemplars: "drawn" for each example from the training split, by hashes of
      `seed`; or "first", the first of the training split, the same for all.
    seed: seed of the draw.
    exemplar_files: {task: path}; the file's exemplars replace those of the
      training split (evaluation/exemplars.py).
    prompt_headers: {task: text before the exemplars}; "{group}" stands for the
      group of the example, such as MMLU's subject.
  """

  num_shots: int | None = None
  exemplars: str = DRAWN
  seed: int = 0
  exemplar_files: Mapping[str, str] | None = None
  prompt_headers: Mapping[str, str] | None = None

  def __post_init__(self):
    if self.num_shots is not None:
      check_count("NUM_SHOTS", self.num_shots, 0, _MAX_SHOTS)
    check_choice("EXEMPLARS", self.exemplars, [DRAWN, FIRST])
    if self.exemplars == FIRST and self.num_shots is None:
      raise UserError('EXEMPLARS = "first": of how many? Set NUM_SHOTS too.')
    check_texts(
      "EXEMPLAR_FILES", self.exemplar_files, '{"gsm8k": "cot_prompts.txt"}'
    )
    check_texts(
      "PROMPT_HEADERS", self.prompt_headers, '{"mmlu": "About {group}:"}'
    )

  def file_of(self, task: str) -> str | None:
    """Returns the path of the task's exemplars, or None."""
    return (self.exemplar_files or {}).get(task)

  def header_of(self, task: str) -> str:
    """Returns the header of a task, or ""."""
    return (self.prompt_headers or {}).get(task, "")

  def changes(self, task: str) -> bool:
    """Whether a task is evaluated in another form than it is registered in."""
    return self.num_shots is not None or bool(
      self.file_of(task) or self.header_of(task)
    )
