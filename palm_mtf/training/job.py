# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a training run's input, and makes the TrainJob that its loop needs.

A loop ends with an event: Finished, Stopped, Moved or Spike. The user's
mistakes are found before a file in MODEL_DIR changes, and most of them before
TensorFlow is imported, which takes seconds.
"""

import dataclasses
import importlib.metadata
import json
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from palm_mtf import __version__
from palm_mtf.accounting.hardware import check_run
from palm_mtf.accounting.optimizer_state import check_same_slots, num_own
from palm_mtf.accounting.plan import memory_parts
from palm_mtf.accounting.step_time import bubble
from palm_mtf.architecture.parameters import saved_shapes
from palm_mtf.assertions.assertions import Assertions, Example
from palm_mtf.checkpoints.adapter_base import describe_base, find_base
from palm_mtf.checkpoints.lineage import INITIALISED, describe_origin
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  Manifest,
  newest_whole,
  read_checkpoint,
  read_whole,
)
from palm_mtf.checkpoints.teacher import find_teacher
from palm_mtf.checkpoints.weights_to_load import (
  BEFORE,
  NEIGHBOURS,
  NamedWeights,
  check_same_exchange,
  check_same_function,
  check_same_model,
  check_same_neighbours,
  check_same_roles,
  check_same_vocabulary,
  check_vocabulary_given,
  dense_model,
  find_initial_state,
  find_initial_weights,
  warn_of_other_split,
)
from palm_mtf.checkpoints.writer import check_space
from palm_mtf.compression.pruning import check_pruning
from palm_mtf.config import (
  AdafactorConfig,
  Config,
  DecodeConfig,
  ModelConfig,
  OptimizerConfig,
  RunConfig,
)
from palm_mtf.config.learners import check_learners
from palm_mtf.config.macros import values_of
from palm_mtf.config.tpu_slice import check_pods, tpu_slice
from palm_mtf.data.batches.corpus import Corpus, corpus_of_run, unigram_entropy
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.executors.choose import check_devices
from palm_mtf.generation.inference.prompts import (
  check_prompts,
  check_room,
  continue_prompts,
  warn_of_spaces,
)
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import log_dtype, resolve_dtype
from palm_mtf.machine.processors import difference, is_rehearsal
from palm_mtf.model_dir.json_lines import read_json_lines, write_json_lines
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.runtime.addresses import check_client
from palm_mtf.runtime.client.places import check_slices, cluster_places
from palm_mtf.training.loss_spikes import Rewind
from palm_mtf.user_code import user_code

if TYPE_CHECKING:  # imports TensorFlow, which the checks do not need
  from palm_mtf.evaluation.evaluator import TaskEvaluation

_logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name

# {macro: the only value with which a MODEL_FUNCTION trains}, because other
# values are read by PaLM's block, its optimizer and its decoder.
_OF_FUNCTIONS: Mapping[str, object] = {
  "ADAPTER": "none",
  "DROPOUT": 0.0,
  "KEEP_ZEROS": False,
  "PREFERENCE_BETA": None,
  "PROMPTS": [],
  "PRUNE": "none",
  "REMAT": "none",
  "STAGES": 1,
  "TASK_EVAL_STEPS": None,
  "TEACHER": None,
}


def write_samples(
  model_dir: str, step: int, prompts: Sequence[str], texts: Sequence[str]
) -> None:
  """Adds step `step`'s `texts`, which continue `prompts`, to samples.jsonl."""
  if not prompts:
    return
  path = ModelDir(model_dir).samples
  # Drop samples of this and later steps: a resumed run makes them again.
  lines = read_json_lines(path, number="step")
  kept = [x for x in lines if x["step"] < step]
  new = [
    {"step": step, "prompt": prompt, "continuation": text}
    for prompt, text in zip(prompts, texts, strict=True)
  ]
  write_json_lines(path, [*kept, *new])


def has_samples(model_dir: str, step: int) -> bool:
  """Returns whether samples.jsonl has continuations from step `step`.

  If it has none, a resumed run makes the samples that a killed run lost.
  """
  lines = read_json_lines(ModelDir(model_dir).samples, number="step")
  return any(line["step"] == step for line in lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
  """All that a training loop needs besides devices; `prepare` makes it."""

  model_dir: str
  config: Config  # its ACTIVATION_DTYPE is not "auto" but a dtype
  vocabulary: Vocabulary
  corpus: Corpus
  assertions: Assertions
  manifest: Manifest  # fields with equal values in all checkpoints of the run
  checkpoint: Checkpoint | None  # checkpoint of this run to resume from
  # Least validation loss, in nats per token, of a model that ignores context;
  # for pairs, the loss of the reference. Reports show how far the run's
  # validation loss is below it.
  unigram_entropy: float
  # Evaluates checkpoints on EVAL_TASKS; None if TASK_EVAL_STEPS is unset.
  task_evaluation: "TaskEvaluation | None" = None
  # Weights of INIT_CHECKPOINT; used only while the run has no checkpoint.
  initial_weights: NamedWeights | None = None
  # The adapter of INIT_CHECKPOINT, if it has one; `initial_weights` is its base
  initial_adapter: NamedWeights | None = None
  # Checkpoint of another run, whose step, weights and optimizer state this run
  # starts from; None to start at step 0.
  initial_state: Checkpoint | None = None
  teacher: Checkpoint | None = None  # its files and its base are held open
  # All rewinds of the run, whose batches training skips; () if the manifest of
  # `checkpoint` lists all of them.
  rewinds: Sequence[Rewind] = ()

  @property
  def start(self) -> Checkpoint | None:
    """The checkpoint that the loop continues from; None to begin at step 0."""
    return self.checkpoint or self.initial_state

  @property
  def step(self) -> int:
    """Number of training steps done."""
    return self.start.manifest.step if self.start else 0

  def _with_base(self, checkpoint: Checkpoint) -> Checkpoint:
    """Returns the run's checkpoint; that of an adapter has the open base."""
    # The base's files may be gone by now, and their hash was compared.
    weights = self.initial_weights if self.manifest.base else None
    return dataclasses.replace(checkpoint, base=weights and weights.files)

  def record_kernels(self, kernels: Mapping[str, str]) -> "TrainJob":
    """Returns the job with `kernels` in the manifest of later checkpoints.

    `kernels` has what decides how results are rounded: versions, CPUs and
    settings, by name. Logs a warning if the checkpoint to resume from has other
    kernels, because the run's losses then differ in the last bits.
    """
    before = self.start.manifest.kernels if self.start else {}
    if changes := difference(kernels, before):
      _logger.warning(
        f"from step {self.step:,} on, other kernels compute the numbers: "
        f"{changes}"
      )
    manifest = dataclasses.replace(self.manifest, kernels=kernels)
    return dataclasses.replace(self, manifest=manifest)

  def write_samples(
    self, checkpoint: Checkpoint, metrics: dict[str, float]
  ) -> list[str]:
    """Adds continuations of PROMPTS to samples.jsonl, and returns them.

    Adds to `metrics` how many of them each assertion flagged.
    """
    prompts, step = self.config.run.prompts, checkpoint.manifest.step
    texts = continue_prompts(
      self._with_base(checkpoint), self.config, self.vocabulary
    )
    write_samples(self.model_dir, step, prompts, texts)
    metrics |= self.assertions.count([*map(Example, prompts, texts)], step)
    return texts

  def evaluate_tasks(
    self, checkpoint: Checkpoint, answered: Callable[[], None]
  ) -> dict[str, float]:
    """Evaluates a checkpoint on EVAL_TASKS; returns and logs metrics by name.

    Calls `answered` after each answer, so that the watchdog sees progress.
    """
    found = {}
    if self.task_evaluation:
      checkpoint = self._with_base(checkpoint)
      for outcome in self.task_evaluation.evaluate(checkpoint, answered):
        found |= outcome.numbers
      texts = (f"{name} {value:.4f}" for name, value in found.items())
      _logger.info(f"step {checkpoint.manifest.step}  " + "  ".join(texts))
    return found


class Finished(NamedTuple):
  """The run has done all TRAIN_STEPS steps."""

  checkpoint: Checkpoint
  validation_loss: float  # nats per token


class Stopped(NamedTuple):
  """The run received a stop signal, and has saved its last step."""

  checkpoint: Checkpoint | None  # None before the first step
  signal_name: str


class Moved(NamedTuple):
  """The manager of the pods gives the run other servers to continue on."""

  checkpoint: Checkpoint | None  # of the step that has just ended
  rewinds: Sequence[Rewind] = ()  # the checkpoint's manifest lists all


class Spike(NamedTuple):
  """The loss has spiked, and training rewinds."""

  checkpoint: Checkpoint | None  # to rewind to; None for the initial weights
  rewinds: Sequence[Rewind]  # all rewinds of the run


# Manifests record these packages' versions, which affect losses and weights.
_COMPUTING_PACKAGES = ("tensorflow", "mesh-tensorflow", "numpy")


def prepare(
  model_dir: str, config: Config, *, resumes: bool = True
) -> TrainJob:
  """Checks all input, and makes vocabulary and tokens if they are missing.

  The caller holds MODEL_DIR's training lock. `resumes`: False for a new run.

  Raises UserError if the input is wrong; no file has been overwritten.
  """
  # Short checks come first, because tokenizing a large corpus may take hours.
  _check_devices(config)
  shapes = _find_shapes(config)
  newest = _find_newest(model_dir, config, shapes) if resumes else None
  config = _reserve_memory(_resolve_dtype(config, newest))
  _warn_of_short_ramp(config.run)
  assertions = Assertions(model_dir, config, "train")
  warn_of_slow_adapter(config.model, config.optimizer)
  teacher = find_teacher(config, newest)
  _check_preference(config)
  model, data, run = config.model, config.data, config.run
  copying = model if run.init_experts == "copy" else None
  pruning = model if run.prune != "none" else None
  adapter = None
  if model.adapter == "none":
    given = run.init_checkpoint, newest, shapes, copying, pruning
    initial = find_initial_weights(*given)
  else:
    initial, adapter = find_base(run, newest, model)
  if pruning and initial:
    check_pruning(config, dense_model(initial, model))
  check_vocabulary_given(initial or teacher, model_dir, data)
  own = num_own(values_of(config))
  check_space(model_dir, shapes, run, config.optimizer, num_own=own)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  if newest:
    check_same_model(newest, shapes, vocabulary.sha256)
  check_same_vocabulary(initial, vocabulary)
  check_same_vocabulary(teacher, vocabulary)
  state = None
  if initial and run.init_state == "all":
    state = find_initial_state(initial, run, config.optimizer)
  check_prompts(run.prompts, vocabulary, model, run)
  warn_of_spaces(run.prompts, vocabulary)
  corpus = corpus_of_run(model_dir, config, vocabulary)
  corpus.batches(run.batch_sizes)  # UserError if the text is too short
  task_evaluation = _open_tasks(model_dir, config, vocabulary, assertions)
  # Entropy and validation loss are compared, so measure both on the same text.
  validation = corpus.validation_batches(
    batch_size=run.batch_sizes.size(run.train_steps - 1),
    num_rows=run.num_validation_rows,
  )
  # Without training, the loss of pairs is log(2).
  entropy = math.log(2)
  if config.loss.preference_beta is None:
    entropy = unigram_entropy(validation)
  manifest = _make_manifest(config, vocabulary, corpus, shapes)
  check_same_neighbours(manifest, newest)
  if teacher:
    described = describe_base(teacher) | {"kind": "distilled"}
    manifest = dataclasses.replace(manifest, teacher=described)
  if newest:
    _log_resumption(newest, manifest)
    warn_of_other_split(newest, corpus, data)
  return TrainJob(
    model_dir=model_dir,
    config=config,
    vocabulary=vocabulary,
    corpus=corpus,
    assertions=assertions,
    manifest=_add_parent(initial, adapter, state, manifest, newest),
    checkpoint=newest,
    unigram_entropy=entropy,
    task_evaluation=task_evaluation,
    initial_weights=initial,
    initial_adapter=adapter,
    initial_state=state,
    teacher=teacher and teacher.checkpoint,
  )


def _check_preference(config: Config) -> None:
  """Raises UserError if a setting does not fit PREFERENCE_BETA."""
  beta, run = config.loss.preference_beta, config.run
  if beta is None:
    return
  for macro, value, only in (
    ("OBJECTIVE", config.model.objective, "causal"),
    ("INIT_EXPERTS", run.init_experts, "none"),
    # The answers of a row would take each other's places of experts.
    ("CAPACITY_FACTOR", config.model.capacity_factor, None),
  ):
    if value != only:
      raise UserError(
        f"PREFERENCE_BETA = {beta} and {macro} = {value!r}: pairs are learned "
        f"only with {macro} = {only!r}; set it."
      )
  if run.init_checkpoint is None:
    raise UserError(
      f"PREFERENCE_BETA = {beta}: pairs are compared with the log p of a "
      "trained model; name its checkpoint in INIT_CHECKPOINT."
    )


def _open_tasks(
  model_dir: str,
  config: Config,
  vocabulary: Vocabulary,
  assertions: Assertions,
) -> "TaskEvaluation | None":
  """Returns the evaluation on EVAL_TASKS; None if TASK_EVAL_STEPS is unset."""
  if not config.evaluation.task_eval_steps:
    return None
  check_room(config.model, config.run)
  # Import SeqIO late, because it imports TensorFlow, which takes seconds.
  from palm_mtf.evaluation.evaluator import TaskEvaluation
  from palm_mtf.evaluation.seqio_tasks import open_eval_tasks

  tasks = open_eval_tasks(
    config.evaluation, vocabulary, config.model.sequence_length
  )
  # Tasks decode greedily. The run's decoding settings are only for samples.
  greedy = dataclasses.replace(config, decode=DecodeConfig(temperature=0.0))
  return TaskEvaluation(model_dir, greedy, vocabulary, tasks, assertions)


def _check_devices(config: Config) -> None:
  check_run(config)
  check_learners(config.learners, config.run, values_of(config))
  mesh, pods = config.mesh_layout, config.pods
  if config.learners.learners:  # which check their own devices
    return
  if mesh.num_microbatches < mesh.stages:
    _logger.warning(
      f"NUM_MICROBATCHES = {mesh.num_microbatches} and STAGES = {mesh.stages}: "
      "not all stages compute at the same time; use more microbatches (a stage "
      f"idles for {bubble(mesh):.0%} of a step)"
    )
  if mesh.tpu:
    check_pods(tpu_slice(mesh.tpu), pods, is_rehearsal=is_rehearsal())
  if pods.pods == "cluster" and not pods.is_managed:
    cluster_places(pods, mesh)
  if pods.pods == "cluster":
    check_client(pods.client_address)
  check_devices(mesh, pods)


def _warn_of_short_ramp(run: RunConfig) -> None:
  """Warns if TRAIN_STEPS ends before the run reaches its last batch size."""
  unreached = [x for x in run.batch_sizes.pairs if x[0] >= run.train_steps]
  if unreached:
    start, size = unreached[0]
    _logger.warning(
      f"TRAIN_STEPS = {run.train_steps:,}: ends before step {start:,}, from "
      f"where GLOBAL_BATCH_SIZE is {size:,}"
    )


def warn_of_slow_adapter(
  model: ModelConfig, optimizer: OptimizerConfig
) -> None:
  """Warns if PARAMETER_SCALE holds back the factors B, which begin as 0."""
  if not model.adapter_rank or not isinstance(optimizer, AdafactorConfig):
    return
  floor = optimizer.parameter_scale_floor
  of_first = (3 * model.d_model) ** -0.5  # the root mean square of factors A
  if optimizer.parameter_scale != "off" and floor < of_first:
    _logger.warning(
      f"PARAMETER_SCALE = {optimizer.parameter_scale!r}: the factors B of an "
      f"adapter begin as 0, so LEARNING_RATE is multiplied by "
      f"PARAMETER_SCALE_FLOOR = {floor:g} for them, and by {of_first:.2g} for "
      "the factors A; use optim/adamw.gin, or a larger floor"
    )


def _find_shapes(config: Config) -> Shapes:
  """Returns the shapes of parameters; calls MODEL_FUNCTION, if there is one.

  Raises UserError if a setting does not fit the function.
  """
  model, pods, mesh = config.model, config.pods, config.mesh_layout
  if not model.model_function:
    return saved_shapes(model)
  fixed = dict(_OF_FUNCTIONS)
  if mesh.tpu:  # servers do not have the function
    fixed["PODS"] = "in_process"
  values = values_of(config)
  for macro, value in fixed.items():
    if (values[macro] or None) != (value or None):  # PROMPTS may be ()
      raise UserError(
        f"{macro} = {values[macro]!r} and MODEL_FUNCTION = "
        f"{model.model_function!r}: such a model trains only with "
        f"{macro} = {value!r}; set it."
      )
  from palm_mtf.programs.model_loss import find_shapes  # imports TensorFlow

  parts = pods.num_pods * mesh.num_microbatches
  with user_code(f"MODEL_FUNCTION = {model.model_function!r}"):
    return find_shapes(config, config.run.batch_sizes.size(0) // parts)


def _find_newest(
  model_dir: str, config: Config, shapes: Shapes
) -> Checkpoint | None:
  """Returns the checkpoint to resume from; None if MODEL_DIR has none."""
  # If the pods run on servers, compare only file sizes now; the servers compare
  # hashes when the session restores the checkpoint.
  read = read_whole if config.pods.pods == "in_process" else read_checkpoint
  newest = newest_whole(model_dir, read=read)
  if newest:
    check_same_model(newest, shapes)
    check_same_function(newest, config.model)
    held = newest.manifest.settings
    if not config.learners.learners:  # learners keep the slots
      check_same_slots(newest.path, held, config.optimizer)
    check_same_roles(newest, config.run.frozen, config.optimizer)
    check_same_exchange(newest, config.exchange)
  return newest


def _resolve_dtype(config: Config, newest: Checkpoint | None) -> Config:
  """Replaces ACTIVATION_DTYPE = "auto" by a dtype, and logs the dtype."""
  # A resumed run keeps its dtype, because another would change its results.
  begun_in = newest and newest.manifest.settings.get("ACTIVATION_DTYPE")
  model = resolve_dtype(config.model, config.mesh_layout, begun_in)
  log_dtype(model, config.mesh_layout, begun_in)
  return dataclasses.replace(config, model=model)


def _reserve_memory(config: Config) -> Config:
  """Sets DEVICE_BYTES, the memory that a pod manager reserves on each device.

  Raises UserError if the manager has no devices for a pod, or does not answer.
  """
  pods = config.pods
  if not pods.is_managed:
    return config
  if pods.device_bytes is None and config.model.model_function:
    raise UserError(
      "DEVICE_BYTES = None: a plan does not know the memory of a "
      "MODEL_FUNCTION; give the bytes that the run needs on a device."
    )
  if pods.device_bytes is None:
    parts = memory_parts(config, config.run.batch_sizes.largest)
    parts.pop("process", 0)  # reserve memory only for tensors
    pods = dataclasses.replace(pods, device_bytes=sum(parts.values()))
  check_slices(pods, config.mesh_layout)
  return dataclasses.replace(config, pods=pods)


def _make_manifest(
  config: Config, vocabulary: Vocabulary, corpus: Corpus, shapes: Shapes
) -> Manifest:
  """Returns a manifest with only what is equal in all checkpoints of a run."""
  model, run = config.model, config.run
  parts = (
    model,
    config.mesh_layout,
    config.pods,
    config.exchange,
    config.learners,
    config.optimizer,
    config.loss,
    config.data,
    config.fault_tolerance,
    run,
  )
  settings = {}
  for part in parts:
    settings |= values_of(part)
  return Manifest(
    shapes=shapes,
    vocabulary_sha256=vocabulary.sha256,
    data={
      "SEED": run.seed_of_data,
      "GLOBAL_BATCH_SIZE": run.batch_sizes.pairs,
      "SEQUENCE_LENGTH": model.sequence_length,
      "PACKING": corpus.packing,
      "the tokens": corpus.fingerprint,
      **({NEIGHBOURS: corpus.neighbours.digest} if corpus.neighbours else {}),
    },
    # JSON turns tuples into lists, as in a manifest that is read from a file.
    settings=json.loads(json_text(settings)),
    versions={
      "palm_mtf": __version__,
      "python": platform.python_version(),
      **{x: importlib.metadata.version(x) for x in _COMPUTING_PACKAGES},
    },
  )


def _add_parent(
  initial: NamedWeights | None,
  adapter: NamedWeights | None,
  state: Checkpoint | None,
  manifest: Manifest,
  newest: Checkpoint | None,
) -> Manifest:
  """Records in the manifest from which other run the weights are, if any."""
  origin: Mapping[str, object] | None = INITIALISED
  if newest:
    origin = newest.manifest.origin
  elif initial:
    origin = describe_origin(adapter or initial, manifest.settings)
  if initial and manifest.settings.get("ADAPTER") not in (None, "none"):
    manifest = dataclasses.replace(manifest, base=describe_base(initial))
    origin = origin if newest or adapter else None
  manifest = dataclasses.replace(manifest, origin=origin)
  initial = adapter or initial
  if newest or not initial:
    return manifest
  what, step = "the weights", 0
  if state:
    what, step = "weights and optimizer", state.manifest.step
  _logger.info(f"starting from {what} of {initial.place}, with step {step}")
  if not initial.checkpoint:
    return manifest
  before = initial.checkpoint.manifest.settings.get("KEEP_ZEROS")
  if before and not manifest.base and not manifest.settings["KEEP_ZEROS"]:
    _logger.warning(
      f"KEEP_ZEROS = False: {initial.place} is pruned, and training will "
      "change its zeros"
    )
  return dataclasses.replace(manifest, parent=initial.checkpoint.as_parent)


def _log_resumption(newest: Checkpoint, manifest: Manifest) -> None:
  _logger.info(f"resuming from {newest.path}")
  for name, before in BEFORE.items():
    now = manifest.settings[name]
    if name not in newest.manifest.settings and now != before:
      _logger.warning(
        f"{name} = {now!r}: the run began in a version that knew only "
        f"{before!r}; set it to that to continue as it began"
      )
  for name, value in manifest.data.items():
    if newest.manifest.data.get(name) != value:
      _logger.warning(
        f"{name} differs from that checkpoint's: from here on each step reads "
        "other batches than a run from the start would"
      )
