# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""All settings of a command in one object."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

from palm_mtf.config.checked import Checked, Count, real, texts, whole
from palm_mtf.config.data import DataConfig
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.exchange import ExchangeConfig
from palm_mtf.config.hardware import HardwareConfig
from palm_mtf.config.learners import LearnersConfig
from palm_mtf.config.loss import LossConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import ModelConfig
from palm_mtf.config.neighbours import check_neighbours, refuse_neighbours
from palm_mtf.config.optimizer import OPTIMIZERS, OptimizerConfig
from palm_mtf.config.pods import PodsConfig
from palm_mtf.config.run import BatchSizes, RunConfig
from palm_mtf.config.task_eval import TaskEvalConfig
from palm_mtf.config.watch import WatchConfig
from palm_mtf.errors import UserError, check_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectionConfig(Checked):
  """What `palm_mtf data inspect` shows.

  Attributes:
    inspect_steps: steps, counted from 0, whose batches are shown.
    inspect_rows: number of rows shown per batch.
  """

  inspect_steps: list[int] | tuple[int, ...] = (0,)
  inspect_rows: Annotated[int, whole(0)] = 2

  def __post_init__(self) -> None:
    super().__post_init__()
    steps = self.inspect_steps
    if not isinstance(steps, (list, tuple)) or not steps:
      raise UserError(
        f"INSPECT_STEPS = {steps!r}: give a list of steps, such as [0, 1000]."
      )
    for step in steps:
      check_count("INSPECT_STEPS", step, minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig(Checked):
  """The runs of a sweep.

  Attributes:
    sweep_runs: a list of axes, each {name: {macro: value}}; there is one run
      for each combination of names. [{"small": {"D_MODEL": 64}, "large": ...},
      {"short": {"TRAIN_STEPS": 100}, "long": ...}] has four runs, "small-short"
      and so on.
    sweep_at_once: number of runs that train at once, and share the cores.
    sweep_held_out: names in sweep_runs. The scaling law is fitted without runs
      that have one of these names, and checked on its predictions for them.
    sweep_budget_flops: training FLOPs for which the compute-optimal model size
      is printed; None prints none.
  """

  sweep_runs: Sequence[Mapping[str, Mapping[str, object]]] = ()
  sweep_at_once: Count = 1
  sweep_held_out: Annotated[
    list[str] | tuple[str, ...], texts("names in SWEEP_RUNS")
  ] = ()
  sweep_budget_flops: Annotated[float | None, real(1.0, 1e40)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig(Checked):
  """The settings of a command that reads documents without running a model."""

  model: ModelConfig
  data: DataConfig
  inspection: InspectionConfig = dataclasses.field(
    default_factory=InspectionConfig
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    check_neighbours(self.model, self.data)
    objective, packing = self.model.objective, self.data.packing
    if objective == "causal":
      return
    if packing.startswith("joined"):
      raise UserError(
        f"OBJECTIVE = {objective!r} and PACKING = {packing!r}: inputs and "
        'targets come from one document; set PACKING = "packed" or "single".'
      )
    if objective != "span_corruption":
      return
    length, noise = self.model.text_length, self.data.span_corruption
    text = noise.longest_text(length)
    if not text:
      raise UserError(
        f"SEQUENCE_LENGTH = {length}: no row has room for a token, two "
        "sentinels and [eod]; use 4 at least."
      )
    needed = noise.num_spans(text)
    if needed > self.data.extra_ids:
      raise UserError(
        f"EXTRA_IDS = {self.data.extra_ids}: span corruption takes {needed:,} "
        f"spans out of a row of SEQUENCE_LENGTH = {length:,} tokens, and each "
        f"needs a sentinel; set EXTRA_IDS = {max(100, needed)}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig(CorpusConfig):
  """The settings of `palm_mtf data cache`.

  Attributes:
    train_steps: steps of a training run, to count epochs; None counts none.
    global_batch_size: sequences in each step; None counts no epochs.
    seed: seed of the training run.
  """

  train_steps: Count | None = None
  global_batch_size: int | list[list[int]] | None = None
  seed: Annotated[int, whole(0)] = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.global_batch_size is not None:
      BatchSizes(self.global_batch_size)  # raises UserError for a wrong value

  @property
  def num_rows(self) -> int | None:
    """Number of rows in all training steps; None if no epochs are counted."""
    if self.train_steps is None or self.global_batch_size is None:
      return None
    return BatchSizes(self.global_batch_size).rows_before(self.train_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodStepConfig:
  """The settings of a training step of one pod.

  Attributes:
    mesh_layout: mesh of devices in a pod, and layout rules.
    optimizer: one of the optimizers, with its schedule and clipping.
  """

  model: ModelConfig
  mesh_layout: MeshLayout
  optimizer: OptimizerConfig = dataclasses.field(
    metadata={"choices": OPTIMIZERS}
  )
  loss: LossConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(PodStepConfig):
  """The settings of the program of a training step.

  Attributes:
    pods: number of pods, where they are, and how they exchange gradients.
    exchange: whether pods exchange gradients or, seldom, parameters.
  """

  pods: PodsConfig = dataclasses.field(default_factory=PodsConfig)
  exchange: ExchangeConfig = dataclasses.field(default_factory=ExchangeConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(StepConfig):
  """The settings of `palm_mtf plan`: those that set time and memory of a step.

  Attributes:
    run: steps, batch size, checkpoints, prompts and seed of the run.
    hardware: speed and memory of the chip that CHIP names.
  """

  run: RunConfig
  hardware: HardwareConfig = dataclasses.field(default_factory=HardwareConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PlanConfig, CorpusConfig):
  """The settings of a command that runs a model.

  Attributes:
    fault_tolerance: skipped batches, loss spikes, and the watchdog.
    decode: settings of sampling and beam search.
    evaluation: SeqIO tasks to evaluate, on which checkpoints, and how.
    learners: processes with their own clocks, if such train the model.
  """

  fault_tolerance: WatchConfig = dataclasses.field(default_factory=WatchConfig)
  decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
  evaluation: TaskEvalConfig = dataclasses.field(default_factory=TaskEvalConfig)
  learners: LearnersConfig = dataclasses.field(default_factory=LearnersConfig)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.run.prompts or self.evaluation.eval_tasks:
      refuse_neighbours(self.model, "text made for PROMPTS or EVAL_TASKS")
    if self.run.prune in ("wanda", "sparsegpt"):
      refuse_neighbours(self.model, f"PRUNE = {self.run.prune!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigOfSweep(Config):
  """The settings of `palm_mtf sweep`."""

  sweep: SweepConfig = dataclasses.field(default_factory=SweepConfig)
