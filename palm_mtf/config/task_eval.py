# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which SeqIO tasks a model is evaluated on, in which form, and when."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from palm_mtf.errors import (
  UserError,
  are_texts,
  check_choice,
  check_count,
  check_real,
  check_texts,
)

NEWEST, EVERY = "newest", "every"


DRAWN, FIRST = "drawn", "first"
_MAX_SHOTS = 10_000  # a row holds the exemplars and the question


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotConfig:
  """The few-shot protocol: exemplars and a header before each question.

  Attributes:
    num_shots: exemplars before each example; None for all exemplars of a task's
      file in `exemplar_files`, and for the registered form of other tasks.
    exemplars: "drawn", from the training split for each example, by hashes of
      `seed`; or "first", the first of the training split for all examples.
    seed: seed of the draw.
    exemplar_files: {task: path}; the file's exemplars replace the training
      split (evaluation/exemplars.py).
    prompt_headers: {task: text before the exemplars}; "{group}" stands for the
      group of the example, such as MMLU's subject.
  """

  num_shots: int | None = None
  exemplars: str = DRAWN
  seed: int = 0
  exemplar_files: Mapping[str, str] | None = None
  prompt_headers: Mapping[str, str] | None = None

  def __post_init__(self) -> None:
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
    """Whether these settings change the registered form of a task."""
    return self.num_shots is not None or bool(
      self.file_of(task) or self.header_of(task)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEvalConfig:
  """How `palm_mtf evaluate`, and evaluations during training, measure tasks.

  Attributes:
    eval_tasks: names of SeqIO tasks or mixtures with metric functions; [] for
      the validation loss.
    eval_split: split of the tasks.
    eval_examples: number of each task's first examples; None for all.
    few_shot: exemplars and header before each example.
    answer_patterns: {task: regular expression}, whose only group matches the
      answer in an output (evaluation/few_shot.py).
    category_groups: {task: {group: categories}}, groups of a task's categories
      to average over, such as MMLU's four (evaluation/seqio_tasks.py).
    eval_checkpoints: "newest", a list of steps, or "every": all checkpoints,
      oldest first, and new checkpoints while another process trains, until
      TRAIN_STEPS.
    eval_wait_secs: seconds that "every" waits for the next checkpoint.
    task_eval_steps: training steps between evaluations on the tasks; a
      checkpoint is written for each. None turns them off.
    clean_subset: whether metrics are also given over the examples that the
      run's training text does not contain (evaluation/clean_subset.py).
    stride: tokens between the starts of two rows, where `score` reads a long
      text in several rows (generation/inference/scorer.py); None is half of
      sequence_length.
  """

  eval_tasks: list[str] | tuple[str, ...] = ()
  eval_split: str = "validation"
  eval_examples: int | None = None
  few_shot: FewShotConfig = dataclasses.field(default_factory=FewShotConfig)
  answer_patterns: Mapping[str, str] | None = None
  category_groups: Mapping[str, Mapping[str, Sequence[str]]] | None = None
  eval_checkpoints: str | list[int] | tuple[int, ...] = NEWEST
  eval_wait_secs: float = 3600.0
  task_eval_steps: int | None = None
  clean_subset: bool = False
  stride: int | None = None

  def __post_init__(self) -> None:
    names = self.eval_tasks
    if not are_texts(names):
      raise UserError(
        f"EVAL_TASKS = {names!r}: give a list of names of SeqIO tasks, such as "
        "'[\"my_task\"]', or [] for none."
      )
    if not isinstance(self.eval_split, str) or not self.eval_split:
      raise UserError(
        f"EVAL_SPLIT = {self.eval_split!r}: give the name of a split, such as "
        '"validation".'
      )
    if self.eval_examples is not None:
      check_count("EVAL_EXAMPLES", self.eval_examples)
    if not isinstance(self.clean_subset, bool):
      raise UserError(
        f"CLEAN_SUBSET = {self.clean_subset!r}: give True or False."
      )
    self._check_answer_patterns()
    self._check_category_groups()
    if self.stride is not None:
      check_count("STRIDE", self.stride)
    self._check_checkpoints()
    check_real("EVAL_WAIT_SECS", self.eval_wait_secs, 0.0, 1e9)
    if self.task_eval_steps is not None:
      check_count("TASK_EVAL_STEPS", self.task_eval_steps)
      if not names:  # checkpoints would be written for nothing
        raise UserError(
          f"TASK_EVAL_STEPS = {self.task_eval_steps}: no task is given; name "
          "tasks in EVAL_TASKS, or set TASK_EVAL_STEPS to None."
        )

  def _check_answer_patterns(self) -> None:
    check_texts(
      "ANSWER_PATTERNS",
      self.answer_patterns,
      '{"gsm8k": "The answer is (.*)"}',
    )
    for task, pattern in (self.answer_patterns or {}).items():
      what = f"ANSWER_PATTERNS: {pattern!r} of {task}"
      try:
        groups = re.compile(pattern).groups
      except re.error as error:
        raise UserError(
          f"{what}: not a regular expression: {error}; correct it."
        ) from None
      if groups != 1:
        raise UserError(
          f"{what}: has {groups} groups; put the answer into one (...), and "
          "all else into (?:...)."
        )

  def _check_category_groups(self) -> None:
    groups = self.category_groups
    if groups is not None and not (
      isinstance(groups, Mapping)
      and all(isinstance(each, Mapping) for each in groups.values())
      and all(
        isinstance(names, (list, tuple))
        and names
        and all(isinstance(name, str) for name in names)
        for each in groups.values()
        for names in each.values()
      )
    ):
      raise UserError(
        f"CATEGORY_GROUPS = {groups!r}: give lists of categories by group, and "
        'groups by task, such as {"mmlu": {"law": ["jurisprudence"]}}.'
      )

  def _check_checkpoints(self) -> None:
    steps = self.eval_checkpoints
    if isinstance(steps, str):
      check_choice("EVAL_CHECKPOINTS", steps, [NEWEST, EVERY])
    elif (
      not isinstance(steps, (list, tuple))
      or not steps
      or not all(type(step) is int and step > 0 for step in steps)
    ):
      raise UserError(
        f'EVAL_CHECKPOINTS = {steps!r}: give "{NEWEST}", "{EVERY}" or a list '
        "of steps, such as [1000, 2000]."
      )
