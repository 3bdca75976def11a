# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf train`: checks everything, readies the data, then trains.

What can go wrong because of what the user gave goes wrong here, before
TensorFlow is imported and before anything in MODEL_DIR is touched that was
there before. The loop is in train_loop.py.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from palm_mtf import __version__, layout
from palm_mtf.accounting.hardware import check_chip
from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.accounting.slots import check_same_slots, optimizer_state
from palm_mtf.addresses import check_client
from palm_mtf.checkpoint_writer import check_space, set_damaged_aside
from palm_mtf.checkpoints import (
  Checkpoint,
  Manifest,
  check_same_model,
  newest_whole,
)
from palm_mtf.config import (
  AdafactorConfig,
  DataConfig,
  PalmConfig,
  RunConfig,
  WatchConfig,
)
from palm_mtf.console import say
from palm_mtf.data.batches import Batch
from palm_mtf.data.corpus import Corpus, load_corpus
from palm_mtf.data.statistics import unigram_entropy
from palm_mtf.data.vocabulary import Vocabulary, load_vocabulary
from palm_mtf.decode_config import DecodeConfig
from palm_mtf.disk import check_model_dir, write_atomically
from palm_mtf.errors import StoppedError
from palm_mtf.infer import continue_prompts
from palm_mtf.initial_weights import (
  check_same_vocabulary,
  check_vocabulary_given,
  find_initial_weights,
)
from palm_mtf.layout import MeshLayout
from palm_mtf.machine.activation_dtype import described, resolved
from palm_mtf.named_weights import NamedWeights
from palm_mtf.pod_servers import PodServers, cluster_places
from palm_mtf.pods_config import PodsConfig
from palm_mtf.prompts import check_prompts, check_room
from palm_mtf.report.figures import check_can_draw
from palm_mtf.samples import keep_samples
from palm_mtf.task_eval_config import TaskEvalConfig
from palm_mtf.tpu_slices import check_pods, tpu_slice
from palm_mtf.training_lock import training_lock

if TYPE_CHECKING:  # imports TensorFlow, which the checks do not need
  from palm_mtf.train_loop import Outcome

# What a run's numbers depend on besides its settings.
_COMPUTING_PACKAGES = ("tensorflow", "mesh-tensorflow", "numpy")


def _alone(entry_point: Callable[..., None]) -> Callable[..., None]:
  """Lets `entry_point` be the only one that changes its `model_dir`."""

  @functools.wraps(entry_point)
  def locked(*, model_dir: str, **settings: object) -> None:
    check_model_dir(model_dir)
    with training_lock(model_dir):
      entry_point(model_dir=model_dir, **settings)

  return locked


@_alone
def train(
  *,
  model_dir: str,
  model: PalmConfig,
  mesh: MeshLayout,
  pods: PodsConfig,
  optimizer: AdafactorConfig,
  data: DataConfig,
  run: RunConfig,
  watch: WatchConfig,
  tasks: TaskEvalConfig,
  config_files: Callable[..., Mapping[str, str]] = lambda **resolved: {},
) -> None:
  """Trains to `run.train_steps`, from the newest checkpoint if there is one.

  Prints validation loss, unigram entropy and a continuation of each prompt.

  Args:
    model_dir: where everything the run makes is kept.
    model: the architecture.
    mesh: devices and layout rules of each pod.
    pods: how many there are, and where.
    optimizer: Adafactor, its schedule and the z-loss.
    data: text and vocabulary.
    run: lengths, batch size, seed and prompts.
    watch: what is done when something goes wrong.
    tasks: SeqIO tasks to evaluate on, and when; predictions are greedy.
    config_files: takes the macros that were resolved here, and returns the
      files {name: text} to write into `model_dir` (config.gin).

  Raises:
    UserError: what was given cannot work; nothing has been overwritten.
    StoppedError: a signal came; the last step that was done is saved.
  """
  _check_devices(model, mesh, pods, run)
  shapes = parameter_shapes(model)
  newest = _find_newest(model_dir, model, optimizer)
  model = _with_dtype(model, mesh, newest)
  initial = find_initial_weights(run.init_checkpoint, newest, shapes)
  check_vocabulary_given(initial, model_dir, data)
  check_space(model_dir, shapes, run, optimizer_state(optimizer))
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  if newest:
    check_same_model(newest, shapes, vocabulary.sha256)
  check_same_vocabulary(initial, vocabulary)
  check_prompts(run.prompts, vocabulary, model, run)
  corpus = load_corpus(
    model_dir, data, vocabulary, model.sequence_length, run.seed
  )
  corpus.batches(run.batch_sizes)  # are there enough?
  context = (model_dir, model, mesh, vocabulary, run)
  sample = functools.partial(_sample, *context)
  evaluate_tasks = _task_evaluation(*context, tasks)
  entropy = unigram_entropy(_validation_batches(corpus, run))
  configs = (model, mesh, pods, optimizer, data, watch, run)
  manifest = _manifest(configs, vocabulary, corpus)
  manifest = _starting_from(newest, initial, manifest)
  set_damaged_aside(model_dir)
  _write_config(model_dir, config_files, model)
  outcome = _run_training(
    model_dir=model_dir,
    model=model,
    mesh=mesh,
    pods=pods,
    optimizer=optimizer,
    run=run,
    watch=watch,
    corpus=corpus,
    manifest=manifest,
    checkpoint=newest,
    unigram_entropy=entropy,
    keep_samples=sample,
    task_eval_steps=tasks.task_eval_steps,
    evaluate_tasks=evaluate_tasks,
    initial_weights=initial,
  )
  _check_not_stopped(outcome, model_dir)
  _report(outcome.validation_loss, entropy)
  _print_texts(run.prompts, sample(outcome.checkpoint))
  _say_what_next(model_dir, run)


def _write_config(
  model_dir: str,
  config_files: Callable[..., Mapping[str, str]],
  model: PalmConfig,
) -> None:
  files = config_files(ACTIVATION_DTYPE=model.activation_dtype)
  for name, text in files.items():
    write_atomically(os.path.join(model_dir, name), text.encode())


def _sample(
  model_dir: str,
  model: PalmConfig,
  mesh: MeshLayout,
  vocabulary: Vocabulary,
  run: RunConfig,
  checkpoint: Checkpoint,
) -> list[str]:
  """Continues the prompts, and keeps that."""
  texts = continue_prompts(checkpoint, model, mesh, vocabulary, run)
  keep_samples(model_dir, checkpoint.manifest.step, run.prompts, texts)
  return texts


def _task_evaluation(
  model_dir: str,
  model: PalmConfig,
  mesh: MeshLayout,
  vocabulary: Vocabulary,
  run: RunConfig,
  tasks: TaskEvalConfig,
) -> Callable[[Checkpoint], dict[str, float]]:
  """Opens the tasks; returns what gives a checkpoint's metrics by name."""
  if not tasks.task_eval_steps:
    return lambda checkpoint: {}
  check_room(model, run)
  # SeqIO takes seconds, as TensorFlow does, which training needs anyway.
  from palm_mtf.task_evaluation import TaskEvaluation

  greedy = DecodeConfig(temperature=0.0)
  evaluation = TaskEvaluation(
    model_dir, model, mesh, vocabulary, greedy, run=run, tasks=tasks
  )

  def numbers(checkpoint: Checkpoint) -> dict[str, float]:
    found = {}
    for outcome in evaluation.evaluate(checkpoint):
      found |= outcome.numbers
    say(
      f"step {checkpoint.manifest.step}  "
      + "  ".join(f"{name} {value:.4f}" for name, value in found.items())
    )
    return found

  return numbers


def _run_training(
  *, pods: PodsConfig, mesh: MeshLayout, **job: object
) -> "Outcome":
  """Trains: all input is known to be good."""
  # TensorFlow takes seconds, here as in the pods' servers: they begin before.
  with PodServers(pods, mesh) as servers:
    from palm_mtf.dtype_speed import warn_if_slow
    from palm_mtf.mesh.placement import session_config
    from palm_mtf.train_loop import TrainJob
    from palm_mtf.training import run_training

    warn_if_slow(job["model"], mesh, session_config(1, pods.num_pods))
    return run_training(TrainJob(pods=pods, mesh=mesh, **job), servers)


def _check_devices(
  model: PalmConfig, mesh: MeshLayout, pods: PodsConfig, run: RunConfig
) -> None:
  """Raises UserError unless all divides, is known, and can be drawn."""
  layout.check(mesh, model, *run.batch_sizes.sizes, num_pods=pods.num_pods)
  check_chip(run.chip)
  if mesh.tpu:
    check_pods(tpu_slice(mesh.tpu), pods)
  if run.trace_steps:
    check_can_draw("TRACE_STEPS")
  if pods.pods == "cluster":
    cluster_places(pods, mesh)
    check_client(pods.client_address)
  if mesh.tpu and pods.pods == "in_process":
    # Last, for TensorFlow takes seconds; but what data take may be hours.
    from palm_mtf.cluster import tpus_here

    tpus_here(mesh)


def _find_newest(
  model_dir: str, model: PalmConfig, optimizer: AdafactorConfig
) -> Checkpoint | None:
  """Returns where to go on from; raises UserError if that is another model."""
  newest = newest_whole(model_dir)
  if newest:
    check_same_model(newest, parameter_shapes(model))
    check_same_slots(newest.path, newest.manifest.settings, optimizer)
  return newest


def _with_dtype(
  model: PalmConfig, mesh: MeshLayout, newest: Checkpoint | None
) -> PalmConfig:
  """Returns the architecture, its dtype resolved; says what that is."""
  begun_in = newest and newest.manifest.settings.get("ACTIVATION_DTYPE")
  model = resolved(model, mesh, begun_in)
  say(described(model, mesh, begun_in))
  return model


def _validation_batches(corpus: Corpus, run: RunConfig) -> Iterator[Batch]:
  """Returns what the validation loss is measured on."""
  return corpus.validation_batches(
    batch_size=run.batch_sizes.size(run.train_steps - 1),
    num_rows=run.num_validation_rows,
  )


def _manifest(
  configs: Sequence[object], vocabulary: Vocabulary, corpus: Corpus
) -> Manifest:
  """Returns what every checkpoint of the run says of itself, but its step."""
  model, *_, run = configs
  settings = {
    name.upper(): value
    for config in configs
    for name, value in dataclasses.asdict(config).items()
  }
  return Manifest(
    shapes=parameter_shapes(model),
    vocabulary_sha256=vocabulary.sha256,
    data={
      "SEED": run.seed,
      "GLOBAL_BATCH_SIZE": run.batch_sizes.pairs,
      "SEQUENCE_LENGTH": model.sequence_length,
      "PACKING": corpus.packing,
      "the tokens": corpus.fingerprint,
    },
    settings=json.loads(json.dumps(settings)),  # as they will be read
    versions={
      "palm_mtf": __version__,
      "python": platform.python_version(),
      **{x: importlib.metadata.version(x) for x in _COMPUTING_PACKAGES},
    },
  )


def _starting_from(
  newest: Checkpoint | None, initial: NamedWeights | None, manifest: Manifest
) -> Manifest:
  """Says whose weights a run starts from; returns the manifest with them."""
  if newest:
    _say_what_resumes(newest, manifest)
  if not initial:
    return manifest
  say(f"starting from the weights of {initial.place}, with step 0")
  if not initial.checkpoint:
    return manifest
  return dataclasses.replace(manifest, parent=initial.checkpoint.as_parent)


def _say_what_resumes(newest: Checkpoint, manifest: Manifest) -> None:
  say(f"resuming from {newest.path}")
  for name, value in manifest.data.items():
    if newest.manifest.data.get(name) != value:
      say(
        f"{name} differs from that checkpoint's: from here on each step reads "
        "other batches than a run from the start would"
      )


def _check_not_stopped(outcome: "Outcome", model_dir: str) -> None:
  if not outcome.stopped_by:
    return
  where = outcome.checkpoint.path if outcome.checkpoint else model_dir
  say(f"stopped by {outcome.stopped_by}; {where} holds all that was learnt")
  say("run the same command to go on")
  raise StoppedError(outcome.stopped_by)


def _report(loss: float, entropy: float) -> None:
  print(f"validation loss  {loss:.4f} nats/token")
  print(f"unigram entropy  {entropy:.4f} nats/token, the same tokens")
  if loss < entropy:
    print(f"learnt           {entropy - loss:.4f} nats/token from context")
  else:
    print("learnt           nothing from context yet; train longer")


def _print_texts(prompts: Sequence[str], texts: Sequence[str]) -> None:
  for prompt, text in zip(prompts, texts, strict=True):
    print(f"\n--- {prompt!r} goes on:\n{prompt}{text}")


def _say_what_next(model_dir: str, run: RunConfig) -> None:
  program = os.path.relpath(sys.argv[0])  # as in .venv/bin/palm_mtf
  if shutil.which("palm_mtf") or os.path.basename(program) != "palm_mtf":
    program = "palm_mtf"
  config = os.path.join(model_dir, "config.gin")
  what = "--interactive"
  if run.prompts:
    what = f"--prompt {shlex.quote(run.prompts[0])} --gin.NUM_SAMPLES=3"
  say(
    f"everything is in {model_dir}: checkpoints/, metrics.jsonl, config.gin, "
    "vocabulary.model, TensorBoard events"
  )
  say("next, for example:")
  for command in (
    f"generate --model_dir {model_dir} {what}",
    f"evaluate --gin_file={config}",
    f"report {model_dir}",
    f"train --gin_file={config} --gin.TRAIN_STEPS={5 * run.train_steps}",
    "train --gin_file=recipes/quickstart.gin --gin.MODEL_DIR='\"runs/mine\"' "
    "--gin.TEXT_FILES='\"/any/folder/**/*.txt\"'",
  ):
    say(f"  {program} {command}")
