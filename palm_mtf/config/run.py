# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a run is and what it leaves behind."""

import dataclasses

from palm_mtf.config.batch_schedule import MAX_STEPS, BatchSizes
from palm_mtf.config.model import MAX_SIZES
from palm_mtf.errors import (
  UserError,
  are_texts,
  check_choice,
  check_count,
  check_text,
)

_MAX_EVAL_BATCHES = 1_000_000
# A trace is several megabytes, and a traced step takes longer.
_MAX_TRACED_STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """How long a run is and what it leaves behind.

  Attributes:
    train_steps: steps at which training is done.
    global_batch_size: sequences in one step, over all pods: a number, or pairs
      of a step and the size from there on (batch_schedule.py).
    seed: seed of the weights and of the order of the data.
    log_steps: steps between lines of metrics.jsonl.
    eval_steps: steps between validation losses.
    eval_batches: batches in one validation loss, of the first step's size.
    checkpoint_steps: steps between checkpoints.
    keep_checkpoints: how many of the newest are kept.
    init_checkpoint: a checkpoint, a MODEL_DIR or a TensorFlow prefix whose
      weights the first step starts from, or None to draw them.
    init_state: parts taken from init_checkpoint: "weights", and training begins
      at step 0 with a new optimizer, as in finetuning; or "all", the optimizer
      and the step too, as in continued pretraining on other data.
    keep_every_steps: those whose step is a multiple of it are kept for good;
      None for no others.
    chip: peak that MFU is a share of: a file in gin/hardware, or
      "measured" for the matrix-product rate of this machine.
    prompts: texts that are continued when training is done.
    sample_tokens: length of each continuation, in tokens.
    sample_steps: steps between continuations on the way, each by a checkpoint
      that is written then, and kept in samples.jsonl; None for none.
    trace_steps: steps, counted from 1 as in metrics.jsonl, of which a Chrome
      trace is written into MODEL_DIR/traces (trace/).
  """

  train_steps: int
  global_batch_size: int | list[list[int]]
  seed: int
  log_steps: int
  eval_steps: int
  eval_batches: int
  checkpoint_steps: int
  keep_checkpoints: int
  chip: str
  prompts: list[str] | tuple[str, ...]
  sample_tokens: int
  keep_every_steps: int | None = None
  init_checkpoint: str | None = None
  init_state: str = "weights"
  sample_steps: int | None = None
  trace_steps: list[int] | tuple[int, ...] = ()

  def __post_init__(self):
    for name in (
      "log_steps",
      "eval_steps",
      "checkpoint_steps",
      "keep_checkpoints",
    ):
      check_count(name.upper(), getattr(self, name))
    check_count("TRAIN_STEPS", self.train_steps, maximum=MAX_STEPS)
    check_count("EVAL_BATCHES", self.eval_batches, maximum=_MAX_EVAL_BATCHES)
    longest = MAX_SIZES["sequence_length"]
    check_count("SAMPLE_TOKENS", self.sample_tokens, maximum=longest)
    check_count("SEED", self.seed, minimum=0)
    self._check_keep_every_steps()
    self._check_trace_steps()
    if self.sample_steps is not None:
      check_count("SAMPLE_STEPS", self.sample_steps)
    check_text(
      "INIT_CHECKPOINT",
      self.init_checkpoint,
      "the path of a checkpoint, a MODEL_DIR or a TensorFlow prefix, or None",
    )
    check_choice("INIT_STATE", self.init_state, ["weights", "all"])
    if self.init_state == "all" and self.init_checkpoint is None:
      raise UserError(
        'INIT_STATE = "all": of nothing; name the checkpoint to go on from in '
        "INIT_CHECKPOINT."
      )
    BatchSizes(self.global_batch_size)  # raises UserError for a wrong schedule
    if not are_texts(self.prompts):
      raise UserError(
        f"PROMPTS = {self.prompts!r}: give a list of texts, or [] for none."
      )

  def _check_keep_every_steps(self):
    # Only steps that have a checkpoint can keep it.
    every, steps = self.keep_every_steps, self.checkpoint_steps
    if every is None:
      return
    check_count("KEEP_EVERY_STEPS", every)
    if every % steps:
      raise UserError(
        f"KEEP_EVERY_STEPS = {every}: there is a checkpoint every "
        f"CHECKPOINT_STEPS = {steps} steps; give a multiple of that, such as "
        f"{-(-every // steps) * steps}, or None."
      )

  def _check_trace_steps(self):
    steps, last = self.trace_steps, self.train_steps
    if (
      not isinstance(steps, (list, tuple))
      or len(steps) > _MAX_TRACED_STEPS
      or not all(type(x) is int and 1 <= x <= last for x in steps)
    ):
      raise UserError(
        f"TRACE_STEPS = {steps!r}: give a list of at most {_MAX_TRACED_STEPS} "
        f"steps from 1 to TRAIN_STEPS = {last}, such as {[max(1, last // 2)]}, "
        "or [] for none."
      )

  @property
  def batch_sizes(self) -> BatchSizes:
    """The batch size of every step."""
    return BatchSizes(self.global_batch_size)

  @property
  def num_validation_rows(self) -> int:
    """Rows in one validation loss, whatever the batch size of the step."""
    return self.eval_batches * self.batch_sizes.sizes[0]
