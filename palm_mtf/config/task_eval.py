# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which SeqIO tasks a model is evaluated on, in which form, and when."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from palm_mtf.config.checked import (
  Checked,
  Count,
  are_pairs,
  real,
  text,
  texts,
  texts_by_task,
  whole,
)
from palm_mtf.errors import UserError, are_texts, check_choice, check_real

NEWEST, EVERY = "newest", "every"
DRAWN, FIRST = "drawn", "first"
_MAX_SHOTS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotConfig(Checked):
  """The few-shot protocol: exemplars and a header before each question.

  Attributes:
    num_shots: number of exemplars before each example. None means all exemplars
      of the task's file in `exemplar_files`; without a file, the prompts are
      those that the SeqIO task itself makes.
    exemplars: "drawn": exemplars are drawn from the training split for each
      example. "first": all examples have the first exemplars of the split.
    seed: seed with which exemplars are drawn.
    exemplar_files: {task: path}; the file's exemplars replace the training
      split (evaluation/few_shot.py).
    prompt_headers: {task: text before the exemplars}; "{group}" stands for the
      group of the example, such as MMLU's subject.
  """

  num_shots: Annotated[int | None, whole(0, _MAX_SHOTS)] = None
  exemplars: Literal["drawn", "first"] = "drawn"
  seed: int = 0
  exemplar_files: Annotated[
    Mapping[str, str] | None, texts_by_task('{"gsm8k": "cot_prompts.txt"}')
  ] = None
  prompt_headers: Annotated[
    Mapping[str, str] | None, texts_by_task('{"mmlu": "About {group}:"}')
  ] = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.exemplars == FIRST and self.num_shots is None:
      raise UserError('EXEMPLARS = "first": of how many? Set NUM_SHOTS too.')

  def file_of(self, task: str) -> str | None:
    """Returns the path of the task's exemplar file, or None."""
    return (self.exemplar_files or {}).get(task)

  def header_of(self, task: str) -> str:
    """Returns the header of a task, or ""."""
    return (self.prompt_headers or {}).get(task, "")

  def changes(self, task: str) -> bool:
    """Returns whether these settings change a task's prompts in SeqIO."""
    return self.num_shots is not None or bool(
      self.file_of(task) or self.header_of(task)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEvalConfig(Checked):
  """How `palm_mtf evaluate`, and evaluations during training, measure tasks.

  Attributes:
    eval_tasks: names of SeqIO tasks or mixtures with metric functions; [] for
      the validation loss.
    eval_split: split whose examples are evaluated.
    eval_examples: number of examples per task, the first ones; None for all.
    few_shot: exemplars and header before each example.
    answer_patterns: {task: regular expression}, whose only group matches the
      answer in an output (evaluation/few_shot.py).
    category_groups: {task: {group: categories}}; metrics are also averaged over
      each group, such as MMLU's four (evaluation/seqio_tasks.py).
    eval_checkpoints: "newest", a list of steps, or "every": all checkpoints,
      oldest first, and new checkpoints while another process trains, until
      TRAIN_STEPS.
    eval_wait_secs: seconds that "every" waits for the next checkpoint.
    task_eval_steps: training steps between evaluations on the tasks, each with
      a checkpoint; None for no evaluations during training.
    clean_subset: whether metrics are also computed over the examples that the
      run's training documents do not contain (evaluation/evaluator.py).
    stride: tokens between the starts of the overlapping rows into which `score`
      splits a long document; None means half of sequence_length.
    assertions: names of assertions (assertions/assertions.py), and
      "module.function" of the user's own, which check texts that a model writes
      in training (samples), evaluations on tasks, and answers of the server.
    output_length: fewest and most characters that "length" accepts.
    refuse_severity: {name in assertions: severity from which on the server
      refuses an answer}; None refuses none.
  """

  eval_tasks: Annotated[
    list[str] | tuple[str, ...],
    texts("names of SeqIO tasks, such as '[\"my_task\"]'"),
  ] = ()
  eval_split: Annotated[
    str, text('the name of a split, such as "validation"')
  ] = "validation"
  eval_examples: Count | None = None
  few_shot: FewShotConfig = dataclasses.field(default_factory=FewShotConfig)
  answer_patterns: Annotated[
    Mapping[str, str] | None, texts_by_task('{"gsm8k": "The answer is (.*)"}')
  ] = None
  category_groups: Mapping[str, Mapping[str, Sequence[str]]] | None = None
  eval_checkpoints: str | list[int] | tuple[int, ...] = NEWEST
  eval_wait_secs: Annotated[float, real(0.0, 1e9)] = 3600.0
  task_eval_steps: Count | None = None
  clean_subset: bool = False
  stride: Count | None = None
  assertions: Annotated[
    list[str] | tuple[str, ...], texts("names of assertions")
  ] = ()
  output_length: Sequence[int] = (1, 10**9)
  refuse_severity: Mapping[str, float] | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.task_eval_steps is not None and not self.eval_tasks:
      raise UserError(
        f"TASK_EVAL_STEPS = {self.task_eval_steps}: no task is given; name "
        "tasks in EVAL_TASKS, or set TASK_EVAL_STEPS to None."
      )
    lengths, refused = [self.output_length], self.refuse_severity or {}
    if not are_pairs(lengths) or not 0 <= lengths[0][0] <= lengths[0][1]:
      raise UserError(
        f"OUTPUT_LENGTH = {self.output_length!r}: give the fewest and the most "
        "characters, such as [1, 2000]."
      )
    if not isinstance(refused, Mapping) or {*refused} - {*self.assertions}:
      raise UserError(
        f"REFUSE_SEVERITY = {refused!r}: give severities by name, of names in "
        'ASSERTIONS, such as {"json": 1.0}.'
      )
    for name, severity in refused.items():
      check_real(f"REFUSE_SEVERITY of {name}", severity, 1e-9, 1e300)
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
    wanted = self.category_groups
    if wanted is not None and not (
      isinstance(wanted, Mapping)
      and all(
        isinstance(each, Mapping)
        and all(names and are_texts(names) for names in each.values())
        for each in wanted.values()
      )
    ):
      raise UserError(
        f"CATEGORY_GROUPS = {wanted!r}: give lists of categories by group, and "
        'groups by task, such as {"mmlu": {"law": ["jurisprudence"]}}.'
      )
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
