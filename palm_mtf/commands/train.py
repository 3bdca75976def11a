# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf train`: prepares a run, trains, and prints the final loss."""

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping

from palm_mtf.accounting.plan import plan_if_known
from palm_mtf.checkpoints.writer import quarantine_damaged
from palm_mtf.config import Config, RunConfig
from palm_mtf.errors import StoppedError, UserError
from palm_mtf.executors.choose import uses_accelerators
from palm_mtf.json_text import json_text
from palm_mtf.learners.members import Members
from palm_mtf.learners.service import check_key
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.lock import training_lock
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.native.build import compile_soon
from palm_mtf.report.plans import format_prediction
from palm_mtf.runtime.addresses import split_address
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.host_functions import HOST_MODULES
from palm_mtf.training.job import Finished, Stopped, TrainJob, prepare

_logger = logging.getLogger(__name__)


def train(
  *,
  model_dir: str,
  config: Config,
  config_files: Callable[..., Mapping[str, str]] = lambda **resolved: {},
  is_replay: bool = False,
) -> None:
  """Trains up to TRAIN_STEPS, from the newest checkpoint if there is one.

  `config_files` returns {name: text} of the files to write into `model_dir`.
  Its keywords are macros, with values that replace "auto". `is_replay`: only
  compute the merges of a run of learners again, and compare their bits.

  Raises UserError if settings are invalid; nothing has been overwritten. Raises
  StoppedError if a signal arrived; the last complete step is saved.
  """
  # Lock MODEL_DIR, because two trainers would remove each other's checkpoints.
  with training_lock(model_dir):
    if address := config.learners.learners:
      split_address("LEARNERS", address)
      check_key(config.learners.learners_tls)
      Members(config.learners.learner_tokens)
    if is_replay:
      _replay(prepare(model_dir, config, resumes=False))
      return
    if not uses_accelerators(config.mesh_layout):
      compile_soon()  # some 15 seconds, in which texts are read
    job = prepare(model_dir, config)
    quarantine_damaged(model_dir, job.checkpoint)
    # config.gin keeps ACTIVATION_DTYPE = "auto", so that other commands choose
    # a dtype for their machine, but a resumed run takes the checkpoint's dtype.
    dtype = job.config.model.activation_dtype
    for name, text in config_files(ACTIVATION_DTYPE=dtype).items():
      write_atomically(os.path.join(model_dir, name), text.encode())
    if plan := plan_if_known(job.config):
      _logger.info(format_prediction(plan))
      # `palm_mtf report` reads this file.
      write_atomically(ModelDir(model_dir).plan, json_text(plan).encode())
    outcome = _run(job)
    if isinstance(outcome, Stopped):
      where = outcome.checkpoint.path if outcome.checkpoint else model_dir
      _logger.info(
        f"stopped by {outcome.signal_name}; {where} holds all that was learned"
      )
      _logger.info("run the same command to resume")
      raise StoppedError(outcome.signal_name)
    # Write the samples before printing, which fails if stdout is closed.
    texts = job.write_samples(outcome.checkpoint, {})
    if config.loss.preference_beta is None:
      _report(outcome.validation_loss, job.unigram_entropy)
    else:
      print(f"validation loss  {outcome.validation_loss:.4f}")
      print(f"reference        {job.unigram_entropy:.4f}, log(2)")
    for prompt, text in zip(config.run.prompts, texts, strict=True):
      print(f"\n--- {prompt!r} continues:\n{prompt}{text}")
    if not config.model.model_function:  # these commands decode
      _suggest_commands(model_dir, config.run)


def _replay(job: TrainJob) -> None:
  config, count = job.config, 0
  if not config.learners.learners or config.learners.audit_share is not None:
    raise UserError(
      "--replay: only a run with LEARNERS and without AUDIT_SHARE has a record "
      "to replay; rounds of volunteers do not depend on who trains."
    )
  with PodServers(config.pods, config.mesh_layout) as servers:
    from palm_mtf.learners.run import replay_run

    for count in replay_run(job, servers):
      _logger.info(f"merge {count:,} has the recorded bits")
  print(f"merges           {count:,}, all with the recorded bits")


def _run(job: TrainJob) -> Finished | Stopped:
  config = job.config
  # Start the pods' servers before the imports below, so that the servers and
  # this process import TensorFlow, which takes seconds, at the same time.
  with PodServers(config.pods, config.mesh_layout, HOST_MODULES) as servers:
    from palm_mtf.mesh.session import session_config
    from palm_mtf.rates.measure import warn_if_slow
    from palm_mtf.training.reference import set_reference
    from palm_mtf.training.supervisor import run_training

    session = session_config(1, config.pods.num_pods)
    warn_if_slow(config.model, config.mesh_layout, session)
    set_reference(job)
    if config.learners.learners:
      from palm_mtf.learners.run import run_learners

      return run_learners(job, servers)
    return run_training(job, servers)


def _report(loss: float, entropy: float) -> None:
  # The entropy is the lowest loss of a model that knows only token frequencies.
  print(f"validation loss  {loss:.4f} nats/token")
  print(f"unigram entropy  {entropy:.4f} nats/token, the same tokens")
  if loss < entropy:
    print(f"learned          {entropy - loss:.4f} nats/token from context")
  else:
    print("learned          nothing from context yet; train longer")


def _suggest_commands(model_dir: str, run: RunConfig) -> None:
  # The commands are for pasting into a shell, so write a path such as
  # ".venv/bin/palm_mtf" if "palm_mtf" is not on PATH.
  program = os.path.relpath(sys.argv[0])
  if shutil.which("palm_mtf") or os.path.basename(program) != "palm_mtf":
    program = "palm_mtf"
  config = shlex.quote(ModelDir(model_dir).config)
  model_dir = shlex.quote(model_dir)
  what = "--interactive"
  if run.prompts:
    what = f"--prompt {shlex.quote(run.prompts[0])} --gin.NUM_SAMPLES=3"
  _logger.info(
    f"everything is in {model_dir}: checkpoints/, metrics.jsonl, config.gin, "
    "vocabulary.model, TensorBoard events"
  )
  commands = (
    f"generate --model_dir {model_dir} {what}",
    f"evaluate --gin_file={config}",
    f"report {model_dir}",
    f"train --gin_file={config} --gin.TRAIN_STEPS={5 * run.train_steps}",
    "train --gin_file=recipes/quickstart.gin --gin.MODEL_DIR='\"runs/mine\"' "
    "--gin.TEXT_FILES='\"/any/folder/**/*.txt\"'",
  )
  # Log all commands in one record, so that no timestamp precedes a command.
  lines = "".join(f"\n  {program} {command}" for command in commands)
  _logger.info(f"next, for example:{lines}")
