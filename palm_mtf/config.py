# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every number of a run as frozen dataclasses: what the gin macros bind to.

Each field is the lower-case name of its macro (`NUM_LAYERS` is `num_layers`)
and is checked when it is made, so that a wrong value is found before TensorFlow
is imported. The mesh and its layout rules are in layout.py.
"""

import dataclasses
import os

from palm_mtf.batch_sizes import BatchSizes
from palm_mtf.errors import UserError, check_choice, check_count, check_real
from palm_mtf.skips import Skips

# A trace is several megabytes, and a traced step takes longer.
_MAX_TRACED_STEPS = 10
_keyword_only = dataclasses.dataclass(frozen=True, kw_only=True)


def _check_real_or_none(
  name: str, value: object, low: float, high: float, none: str
) -> None:
  if value is not None:
    try:
      check_real(name, value, low, high)
    except UserError as error:
      raise UserError(f"{str(error)[:-1]}, or None {none}.") from None


def _check_text(name: str, value: object, what: str) -> None:
  if value is not None and (not isinstance(value, str) or not value):
    raise UserError(f"{name} = {value!r}: give {what}.")


@_keyword_only
class PalmConfig:
  """The architecture (PaLM 2; sizes in Table 1).

  Attributes:
    num_layers: blocks.
    d_model: width of the residual stream.
    num_heads: query heads; PaLM 540B has num_heads * d_kv != d_model.
    d_kv: width of one head, 256 in PaLM; even, because rotary turns pairs.
    d_ff: hidden width of the MLP, 4 * d_model in PaLM.
    vocab_size: rows of the tied embedding.
    sequence_length: tokens in one sequence.
    norm: "layer_norm" (no bias) or "rms_norm".
    block: "parallel", x + MLP(norm(x)) + Attention(norm(x)), or "serial",
      h + MLP(norm(h)) with h = x + Attention(norm(x)).
    attention: "multi_query" (one key and value head) or "multi_head".
    activation_dtype: "bfloat16", "float32", or "auto", which a command resolves
      by what the machine multiplies natively (machine/activation_dtype.py);
      masters, norms, softmax, rotary tables and the loss are float32 always.
    remat: what a step computes again instead of keeping it, at the price of
      time: "none", "attention" or the whole "layer"; no bit of the result
      depends on it.
  """

  num_layers: int
  d_model: int
  num_heads: int
  d_kv: int
  d_ff: int
  vocab_size: int
  sequence_length: int
  norm: str = "layer_norm"
  block: str = "parallel"
  attention: str = "multi_query"
  activation_dtype: str = "bfloat16"
  remat: str = "none"

  def __post_init__(self):
    for name in (
      "num_layers",
      "d_model",
      "num_heads",
      "d_kv",
      "d_ff",
      "vocab_size",
      "sequence_length",
    ):
      check_count(name.upper(), getattr(self, name))
    if self.d_kv % 2:
      raise UserError(
        f"D_KV = {self.d_kv}: rotary embedding turns pairs of numbers, so "
        f"D_KV is even; use {self.d_kv + 1}."
      )
    check_choice("NORM", self.norm, ["layer_norm", "rms_norm"])
    check_choice("BLOCK", self.block, ["parallel", "serial"])
    check_choice("ATTENTION", self.attention, ["multi_query", "multi_head"])
    check_choice(
      "ACTIVATION_DTYPE",
      self.activation_dtype,
      ["auto", "bfloat16", "float32"],
    )
    check_choice("REMAT", self.remat, ["none", "attention", "layer"])


@_keyword_only
class AdafactorConfig:
  """The optimizer and the loss it minimizes (PaLM 5).

  Where the paper leaves a choice open the default is how we read it.

  Attributes:
    learning_rate: lr = min(learning_rate, 1 / sqrt(k)) at step k = 1, 2, ...
    beta1: decay of the momentum; 0 keeps none, and no memory for it.
    beta2_exponent: beta2 = 1 - k ** -beta2_exponent.
    update_clip: largest root mean square of one variable's update, in units
      of its parameter scale; None is off. PaLM does not say: on, as in the
      Adafactor paper.
    gradient_clip: largest global norm of all gradients.
    weight_decay_exponent: parameters shrink by lr ** weight_decay_exponent a
      step; None is off.
    z_loss: weight of log(Z) ** 2 in the loss, Z the softmax normalizer.
    dropout: share of the activations that a training step drops, in finetuning;
      evaluation and generation drop nothing.
    learning_rate_schedule: "palm", as above, or "constant", learning_rate at
      every step.
    second_moment: "full", PaLM's, or "factored", row and column means only.
    momentum_dtype: of the momentum in memory and in checkpoints, "float32" or
      "bfloat16". The second moment is always float32: near beta2 = 1 it
      changes by less than bfloat16 can tell, and would stand still.
    parameter_scale: lr is relative to the root mean square of each "variable",
      or of the matrices that PaLM's own code "stacked" (optim/groups.py); or
      "off", lr is absolute.
    parameter_scale_floor: the smallest such root mean square.
    weight_decay_on: what shrinks: "all", "all_but_scales" of norms, or
      "kernels", neither scales nor the embedding. PaLM names no exception.
  """

  learning_rate: float
  beta1: float
  beta2_exponent: float
  update_clip: float | None
  gradient_clip: float
  weight_decay_exponent: float | None
  z_loss: float
  dropout: float = 0.0
  learning_rate_schedule: str = "palm"
  second_moment: str = "full"
  momentum_dtype: str = "float32"
  parameter_scale: str = "variable"
  parameter_scale_floor: float = 1e-3
  weight_decay_on: str = "all"

  def __post_init__(self):
    check_real("LEARNING_RATE", self.learning_rate, 1e-9, 10.0)
    check_real("BETA1", self.beta1, 0.0, 0.9999)
    check_real("BETA2_EXPONENT", self.beta2_exponent, 0.01, 2.0)
    _check_real_or_none(
      "UPDATE_CLIP", self.update_clip, 1e-3, 1e9, "for no clipping"
    )
    check_real("GRADIENT_CLIP", self.gradient_clip, 1e-6, 1e9)
    _check_real_or_none(
      "WEIGHT_DECAY_EXPONENT",
      self.weight_decay_exponent,
      0.1,
      99.0,
      "for no decay",
    )
    check_real("Z_LOSS", self.z_loss, 0.0, 1.0)
    check_real("DROPOUT", self.dropout, 0.0, 0.99)
    check_real("PARAMETER_SCALE_FLOOR", self.parameter_scale_floor, 1e-12, 1e3)
    for name, choices in (
      ("learning_rate_schedule", ["palm", "constant"]),
      ("second_moment", ["full", "factored"]),
      ("momentum_dtype", ["float32", "bfloat16"]),
      ("parameter_scale", ["variable", "stacked", "off"]),
      ("weight_decay_on", ["all", "all_but_scales", "kernels"]),
    ):
      check_choice(name.upper(), getattr(self, name), choices)


@_keyword_only
class DataConfig:
  """Where documents come from and how they become rows of tokens.

  A document is a text that is learnt as a whole, or an example: inputs, which
  are given, and targets, which are learnt.

  Attributes:
    task: name of a registered SeqIO task or mixture, or None for text_files.
    text_files: a glob, or several in a list, or None for a task; `{stdlib}`
      stands for the folder of the running Python's standard library. A file is
      one document, a line of a .jsonl file too; both may be compressed (.gz,
      .bz2, .xz).
    text_field: the field of a JSON line that is the document.
    weight_field: the field of a JSON line that says how often the document
      comes in an epoch, or None for once each.
    vocabulary: path of a SentencePiece model, or None to train one of
      vocab_size pieces on the training documents and keep it in MODEL_DIR.
    validation_share: share of the documents, chosen by a hash of their text,
      that is held out; a task with a validation split of its own has no use
      for it.
    cache_dir: folder of `palm_mtf data cache`, or None for MODEL_DIR/tokens.
    packing: how documents fill rows of sequence_length tokens: "joined" (with
      [eod] between, cut anywhere, as PaLM 5), "joined_masked" (the same tokens,
      but positions and attention begin anew after each [eod]), "packed" (whole
      documents, as many as fit, padded, masked too) or "single" (one document
      in a row, padded).
  """

  text_files: str | list[str] | tuple[str, ...] | None
  vocabulary: str | None
  validation_share: float
  task: str | None = None
  text_field: str = "text"
  weight_field: str | None = None
  cache_dir: str | None = None
  packing: str = "joined"

  def __post_init__(self):
    if (self.task is None) == (self.text_files is None):
      raise UserError(
        f"TASK = {self.task!r} and TEXT_FILES = {self.text_files!r}: set one "
        "of them, and the other to None."
      )
    files = self.text_files
    files = [files] if isinstance(files, str) else files
    if files is not None and (
      not isinstance(files, (list, tuple))
      or not files
      or not all(isinstance(f, str) and f for f in files)
    ):
      raise UserError(
        f"TEXT_FILES = {self.text_files!r}: give a glob or a list of globs, "
        "such as '\"/any/folder/**/*.txt\"'."
      )
    _check_text("TASK", self.task, "the name of a SeqIO task, or None")
    _check_text("WEIGHT_FIELD", self.weight_field, "a field's name, or None")
    _check_text(
      "VOCABULARY",
      self.vocabulary,
      "the path of a SentencePiece model, or None to train one",
    )
    _check_text("CACHE_DIR", self.cache_dir, "the path of a folder, or None")
    if not isinstance(self.text_field, str) or not self.text_field:
      raise UserError(
        f"TEXT_FIELD = {self.text_field!r}: give the name of a field."
      )
    check_real("VALIDATION_SHARE", self.validation_share, 1e-4, 0.5)
    check_choice(
      "PACKING", self.packing, ["joined", "joined_masked", "packed", "single"]
    )

  @property
  def cache_folder(self) -> str | None:
    """The path of cache_dir, its `~` expanded."""
    return self.cache_dir and os.path.expanduser(self.cache_dir)


@_keyword_only
class WatchConfig:
  """What a training run does when something goes wrong.

  Attributes:
    skip_steps: batches to leave out, pairs of first and last (skips.py).
    spike_policy: "off", or "rewind": at a loss spike, back to a checkpoint and
      on without the batches around it (spikes.py).
    spike_skip_steps: how many batches that is, 200 to 500 in PaLM.
    spike_rewinds: how often at most; PaLM 540B had about 20 spikes.
    watchdog_secs: ends the run, with stacks, when no step is done for so long;
      a first step and a checkpoint may take ten times as long. None: never.
  """

  skip_steps: list[list[int]] | tuple[tuple[int, int], ...] = ()
  spike_policy: str = "off"
  spike_skip_steps: int = 300
  spike_rewinds: int = 20
  watchdog_secs: float | None = 1800.0

  def __post_init__(self):
    Skips(self.skip_steps)  # is checked when it is made
    check_choice("SPIKE_POLICY", self.spike_policy, ["off", "rewind"])
    check_count("SPIKE_SKIP_STEPS", self.spike_skip_steps)
    check_count("SPIKE_REWINDS", self.spike_rewinds)
    if self.watchdog_secs is not None:
      check_real("WATCHDOG_SECS", self.watchdog_secs, 1.0, 1e9)

  @property
  def skips(self) -> Skips:
    """The batches of skip_steps."""
    return Skips(self.skip_steps)


@_keyword_only
class RunConfig:
  """How long a run is and what it leaves behind.

  Attributes:
    train_steps: steps at which training is done.
    global_batch_size: sequences in one step, over all pods: a number, or pairs
      of a step and the size from there on (batch_sizes.py).
    seed: of the weights and of the order of the data.
    log_steps: steps between lines of metrics.jsonl.
    eval_steps: steps between validation losses.
    eval_batches: batches in one validation loss, of the first step's size.
    checkpoint_steps: steps between checkpoints.
    keep_checkpoints: how many of the newest are kept.
    init_checkpoint: a checkpoint, a MODEL_DIR or a TensorFlow prefix whose
      weights the first step starts from, or None to draw them.
    keep_every_steps: those whose step is a multiple of it are kept for good;
      None for no others.
    chip: what MFU is measured against: a name in accounting/hardware.py, or
      "measured" for the matrix-product rate of this machine.
    prompts: texts that are continued when training is done.
    sample_tokens: length of each continuation, in tokens.
    sample_steps: steps between continuations on the way, each by a checkpoint
      that is written then, and kept in samples.jsonl; None for none.
    trace_steps: steps, counted from 1 as in metrics.jsonl, of which a Chrome
      trace and a picture are written into MODEL_DIR/traces (trace/).
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
  sample_steps: int | None = None
  trace_steps: list[int] | tuple[int, ...] = ()

  def __post_init__(self):
    for name in (
      "train_steps",
      "log_steps",
      "eval_steps",
      "eval_batches",
      "checkpoint_steps",
      "keep_checkpoints",
      "sample_tokens",
    ):
      check_count(name.upper(), getattr(self, name))
    check_count("SEED", self.seed, minimum=0)
    self._check_keep_every_steps()
    self._check_trace_steps()
    if self.sample_steps is not None:
      check_count("SAMPLE_STEPS", self.sample_steps)
    _check_text(
      "INIT_CHECKPOINT",
      self.init_checkpoint,
      "the path of a checkpoint, a MODEL_DIR or a TensorFlow prefix, or None",
    )
    BatchSizes(self.global_batch_size)  # is checked when it is made
    if not isinstance(self.prompts, (list, tuple)) or not all(
      isinstance(p, str) and p for p in self.prompts
    ):
      raise UserError(
        f"PROMPTS = {self.prompts!r}: give a list of texts, or [] for none."
      )

  def _check_keep_every_steps(self):
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
