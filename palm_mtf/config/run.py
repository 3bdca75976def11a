# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a run is, how large its batches are, and what it writes.

  GLOBAL_BATCH_SIZE = 16
  GLOBAL_BATCH_SIZE = [[0, 512], [50000, 1024], [115000, 2048]]

The second value is PaLM 540B's (PaLM, section 5): 512 sequences from step 0,
1,024 from step 50,000 and 2,048 from step 115,000. Steps are counted from 0.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

from palm_mtf.config.checked import (
  Checked,
  Count,
  are_pairs,
  real,
  text,
  texts,
  whole,
)
from palm_mtf.config.model import Size
from palm_mtf.errors import UserError, check_count

# With these limits, the number of rows in all steps fits into int64.
MAX_BATCH_SIZE, MAX_STEPS = 2**24, 10**9
_MAX_EVAL_BATCHES = 1_000_000
# A trace takes several megabytes, and slows down its step.
_MAX_TRACED_STEPS = 10


class BatchSizes:
  """The batch size of every step.

  Attributes:
    pairs: [step, batch size from this step on], in ascending order of steps.
    sizes: the batch sizes of `pairs`.
    largest: the largest batch size.
  """

  def __init__(self, global_batch_size: int | Sequence[Sequence[int]]):
    """Raises UserError unless the value is a size, or [step, size] pairs."""
    self.pairs = _parse_pairs(global_batch_size)
    self._starts = [start for start, _ in self.pairs]
    self.sizes = [size for _, size in self.pairs]
    self.largest = max(self.sizes)
    self._rows_before = [0]
    for (start, size), (then, _) in itertools.pairwise(self.pairs):
      self._rows_before.append(self._rows_before[-1] + (then - start) * size)

  def size(self, step: int) -> int:
    """Returns the batch size of a step."""
    return self.sizes[self._phase(step)]

  def rows_before(self, step: int) -> int:
    """Returns the number of sequences in all steps before `step`."""
    i = self._phase(step)
    return self._rows_before[i] + (step - self._starts[i]) * self.sizes[i]

  def step_of_row(self, row: int) -> int:
    """Returns the step that reads a row; rows are numbered over all steps."""
    i = bisect.bisect_right(self._rows_before, row) - 1
    return self._starts[i] + (row - self._rows_before[i]) // self.sizes[i]

  def next_change(self, step: int) -> int | None:
    """Returns the first later step with another batch size, or None."""
    later = self._phase(step) + 1
    return self._starts[later] if later < len(self._starts) else None

  def _phase(self, step: int) -> int:
    return bisect.bisect_right(self._starts, step) - 1


def _parse_pairs(value: object) -> list[list[int]]:
  if isinstance(value, int):
    check_count("GLOBAL_BATCH_SIZE", value, maximum=MAX_BATCH_SIZE)
    return [[0, value]]
  if are_pairs(value) and value:
    starts = [start for start, _ in value]
    rising = all(a < b for a, b in itertools.pairwise(starts))
    if starts[0] == 0 and rising and all(size > 0 for _, size in value):
      for start, size in value:
        check_count("GLOBAL_BATCH_SIZE", size, maximum=MAX_BATCH_SIZE)
        check_count("GLOBAL_BATCH_SIZE, a step of", start, 0, MAX_STEPS)
      return [list(pair) for pair in value]
  raise UserError(
    f"GLOBAL_BATCH_SIZE = {value!r}: give a whole number, or pairs of a step "
    "and the size from this step on, with rising steps from 0, such as "
    "[[0, 512], [50000, 1024]]."
  )


def _check_sparsity(name: str, value: object) -> None:
  if value != "2:4":
    real(0.01, 0.99, 'for whole heads and channels, or "2:4"')(name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
  """How long a run is and what it writes.

  Attributes:
    train_steps: the step at which training ends.
    global_batch_size: sequences per step, over all pods: a number, or pairs of
      a step and the size from this step on.
    seed: seed of the weights and, unless data_seed is set, of the order of the
      data.
    data_seed: seed of the order of the data; None for `seed`. Runs that differ
      only in `seed` then read the same batches.
    log_steps: steps between lines of metrics.jsonl.
    eval_steps: steps between validation losses.
    eval_batches: number of batches over which a validation loss is computed,
      each with the batch size of step 0.
    checkpoint_steps: steps between checkpoints.
    keep_checkpoints: how many of the newest checkpoints are kept.
    init_checkpoint: a checkpoint, a MODEL_DIR or a TensorFlow prefix from whose
      weights training starts; None draws random weights.
    init_state: what is taken from init_checkpoint. "weights": only weights, and
      training begins at step 0 with a new optimizer, as in finetuning. "all":
      the optimizer and the step too, as in continued pretraining on other data.
    init_experts: "copy": init_checkpoint is a dense model, and every expert
      begins as a copy of its layer's MLP; only routers are drawn (Komatsuzaki
      et al. 2022). "none": init_checkpoint has all parameters.
    prune: how weights of init_checkpoint are chosen that training begins
      without (compression/zeros.py); "none" keeps all.
    sparsity: share of the weights of each kernel that become 0; "2:4" for two
      of four adjacent inputs; None removes heads and channels, as many as the
      model has fewer than init_checkpoint (compression/pruning.py).
    frozen: patterns of names of parameters that training does not change, such
      as "embedding" or "layers/*/norm*" (architecture/parameters.py).
    keep_every_steps: checkpoints at multiples of this step are kept
      permanently; None keeps none permanently.
    chip: chip whose peak FLOP/s is an MFU of 100%: a file in gin/hardware, or
      "measured" for the matrix-product rate of this machine. If it is not set,
      it is the chip of TPU.
    prompts: prompts that are continued at the end of training.
    sample_tokens: length of each continuation, in tokens.
    sample_steps: training steps between continuations of the prompts, which are
      added to samples.jsonl; a checkpoint is written at each of these steps.
      None continues prompts only at the end of training.
    trace_steps: steps, counted from 1 as in metrics.jsonl, whose Chrome traces
      are written to MODEL_DIR/traces.
  """

  train_steps: Annotated[int, whole(maximum=MAX_STEPS)]
  global_batch_size: int | list[list[int]]
  seed: Annotated[int, whole(0)]
  log_steps: Count
  eval_steps: Count
  eval_batches: Annotated[int, whole(maximum=_MAX_EVAL_BATCHES)]
  checkpoint_steps: Count
  keep_checkpoints: Count
  chip: str
  prompts: Annotated[list[str] | tuple[str, ...], texts("texts")]
  sample_tokens: Size
  data_seed: Annotated[int | None, whole(0)] = None
  keep_every_steps: Count | None = None
  init_checkpoint: Annotated[
    str | None,
    text(
      "the path of a checkpoint, a MODEL_DIR or a TensorFlow prefix, or None"
    ),
  ] = None
  init_state: Literal["weights", "all"] = "weights"
  init_experts: Literal["none", "copy"] = "none"
  prune: Literal["none", "magnitude", "wanda", "sparsegpt"] = "none"
  sparsity: Annotated[float | str | None, _check_sparsity] = None
  frozen: Annotated[
    list[str] | tuple[str, ...], texts("patterns of names of parameters")
  ] = ()
  sample_steps: Count | None = None
  trace_steps: list[int] | tuple[int, ...] = ()

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, "frozen", tuple(self.frozen))  # it can be hashed
    BatchSizes(self.global_batch_size)  # raises UserError for a wrong schedule
    if self.init_state == "all" and self.init_checkpoint is None:
      raise UserError(
        'INIT_STATE = "all": needs a checkpoint to resume from; name it in '
        "INIT_CHECKPOINT."
      )
    weights_only = self.init_checkpoint is not None and self.init_state != "all"
    if self.init_experts == "copy" and not weights_only:
      raise UserError(
        'INIT_EXPERTS = "copy": copies weights of a dense model, without its '
        "optimizer; name its checkpoint in INIT_CHECKPOINT, with INIT_STATE = "
        '"weights".'
      )
    if self.prune != "none" and (
      not weights_only or self.init_experts != "none"
    ):
      raise UserError(
        f"PRUNE = {self.prune!r}: prunes the weights of a trained model; name "
        'its checkpoint in INIT_CHECKPOINT, with INIT_STATE = "weights" and '
        'INIT_EXPERTS = "none".'
      )
    if self.prune == "none" and self.sparsity is not None:
      raise UserError(
        f"SPARSITY = {self.sparsity!r}: needs a way to choose weights; set "
        'PRUNE = "wanda".'
      )
    every, steps = self.keep_every_steps, self.checkpoint_steps
    if every and every % steps:
      raise UserError(
        f"KEEP_EVERY_STEPS = {every}: there is a checkpoint every "
        f"CHECKPOINT_STEPS = {steps} steps; give a multiple of that, such as "
        f"{-(-every // steps) * steps}, or None."
      )
    traced, last = self.trace_steps, self.train_steps
    if (
      not isinstance(traced, (list, tuple))
      or len(traced) > _MAX_TRACED_STEPS
      or not all(type(x) is int and 1 <= x <= last for x in traced)
    ):
      raise UserError(
        f"TRACE_STEPS = {traced!r}: give a list of at most {_MAX_TRACED_STEPS} "
        f"steps from 1 to TRAIN_STEPS = {last}, such as {[max(1, last // 2)]}, "
        "or [] for none."
      )

  @property
  def seed_of_data(self) -> int:
    """The seed of the order of the data."""
    return self.seed if self.data_seed is None else self.data_seed

  @property
  def batch_sizes(self) -> BatchSizes:
    """The batch size of every step."""
    return BatchSizes(self.global_batch_size)

  @property
  def num_validation_rows(self) -> int:
    """Number of rows over which a validation loss is computed."""
    return self.eval_batches * self.batch_sizes.sizes[0]
