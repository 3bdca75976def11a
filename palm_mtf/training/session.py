# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The session of a run: the run's variables, and the programs of its steps."""

import dataclasses
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.adapters.merge import initial_parameters
from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.checkpoints.manifest import Checkpoint, OpenWeights
from palm_mtf.checkpoints.variables import (
  CheckpointProcesses,
  CheckpointReader,
  WeightsCopier,
  find_checkpoint_processes,
  write_arrays,
)
from palm_mtf.checkpoints.weights_to_load import NamedWeights, dense_model
from palm_mtf.checkpoints.writer import remove_later
from palm_mtf.compression.calibration import calibration_batches
from palm_mtf.compression.pruning import prune
from palm_mtf.compression.statistics import collect_statistics
from palm_mtf.config import PodsConfig
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.server_batches import (
  batches_spec,
  find_batches,
  read_batch,
)
from palm_mtf.executors.choose import executor_of
from palm_mtf.machine.host_memory import free_garbage
from palm_mtf.mesh.slices import Pods, variables_of
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.programs.features import (
  FEATURE_DTYPES,
  ServerFeatures,
  features_of_pod,
)
from palm_mtf.programs.outer import OuterPrograms, build_outer
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.connect import Cluster, memory_reader
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.program import Program, state_of
from palm_mtf.training.diloco import DilocoStep, Syncs
from palm_mtf.training.job import TrainJob
from palm_mtf.training.step import TrainStep
from palm_mtf.training.variable_checks import VariableChecks

_logger = logging.getLogger(__name__)


class TrainSession:
  """A run's variables on its devices, and the programs that change them.

  The variables outlive the programs: a rewind restores the variables, and steps
  with another batch size use another program.

  Attributes:
    during: context manager that wraps every call into the session. It takes the
      name of a phase, which the error names if a pod is lost.
    checks: checks that variables are finite, and equal on all pods.
    copier: copies the weights for a checkpoint.
    read_whole: reads a checkpoint; raises an error if a file is damaged.
    read_memory: returns {name of a pod's metric: host memory, in bytes, of the
      pod's server that uses most}.
  """

  def __init__(
    self,
    job: TrainJob,
    client: Client,
    cluster: Cluster,
    heartbeat: Heartbeat,
    newest: Callable[[], Checkpoint | None],
  ):
    """Builds the program of the step after `job.step`; sets no variable.

    `newest` returns the newest checkpoint or None, for error messages.

    Raises PodLostError if a server is lost.
    """
    self._config, self._client, self._cluster = job.config, client, cluster
    self.during = heartbeat.during
    # From here on `during` wraps every call into the session, so that a lost
    # pod raises a PodLostError whose message names the given phase.
    with self.during("while its servers were asked for batches"):
      heartbeat.connect(client)
      self._features = self._find_features(job)
    self.read_memory = memory_reader(client, cluster.servers)
    # By batch size: of all pods or, if pods exchange parameters, of each pod.
    self._programs: dict[int, list[StepPrograms]] = {}
    self._outer: OuterPrograms | None = None
    self._syncs: Syncs | None = None
    self._train_step: TrainStep | DilocoStep | None = None
    size = job.config.run.batch_sizes.size(job.step)
    program, built = self.make_step(size).programs, self._programs[size]
    self.checks = VariableChecks(client, program, newest, self._outer)
    self._pods = [slices for x in built for slices in x.pod_slices]
    self._initialize = Program(
      operations=[x.initialize for x in built],
      writes=state_of(variables_of(self._pods)),
    )
    with self.during("while its variables were set"):
      processes = find_checkpoint_processes(
        client,
        Process(cluster.devices.client),
        cluster.servers,
        ModelDir(job.model_dir).checkpoints,
      )
    # Checkpoints of an adapter do not hold its base.
    model = job.config.model
    base = () if model.base == model else parameter_shapes(model.base)
    self._base = {*base}
    self._saved = self._find_saved(job.config.pods.num_pods)
    self.copier = WeightsCopier(client, self._saved, processes)
    self._reader = CheckpointReader(client, processes)
    only_client = CheckpointProcesses(processes.client)
    self._client_reader = CheckpointReader(client, only_client)
    self.read_whole = self._reader.read_whole

  def make_step(self, batch_size: int) -> TrainStep | DilocoStep:
    """Returns the program of a step; builds it if the batch size is new.

    `batch_size` is the number of sequences in one step, over all pods.
    """
    if self._train_step and self._train_step.programs.batch_size == batch_size:
      return self._train_step
    self._train_step = None
    free_garbage()  # frees TensorFlow's memory for the previous batch size
    if batch_size not in self._programs:
      with self._client.graph.as_default():
        self._programs[batch_size] = self._build_programs(batch_size)
    steps = [TrainStep(self._client, x) for x in self._programs[batch_size]]
    self._train_step = steps[0]
    if self._syncs:
      devices = self._cluster.devices
      self._train_step = DilocoStep(steps, devices, self._syncs)
    return self._train_step

  def _build_programs(self, batch_size: int) -> list[StepPrograms]:
    """Builds the programs of all pods, or of each if they have syncs."""
    config, devices = self._config, self._cluster.devices
    build = functools.partial(
      build_train_program,
      seed=config.run.seed,
      frozen=config.run.frozen,
      build=executor_of(config.mesh_layout).build_program,
    )
    given = {"features": self._features, "devices": devices}
    if not config.exchange.is_diloco:
      return [build(config, batch_size=batch_size, **given)]
    num_pods = config.pods.num_pods
    alone = dataclasses.replace(config, pods=PodsConfig())
    built = [
      build(
        alone,
        batch_size=batch_size // num_pods,
        features=features_of_pod(self._features, pod, num_pods),
        devices=devices.of_pod(pod),
      )
      for pod in range(num_pods)
    ]
    if not self._outer:
      slices = [x.slices for x in built]
      parameters = built[0].parameters
      self._outer = build_outer(slices, parameters, config.exchange)
      self._syncs = Syncs(self._client, config.exchange, self._outer)
    return built

  def set_variables(self, job: TrainJob) -> None:
    """Sets all variables to their values after `job.step` steps.

    Raises PodLostError if a server is lost. Raises DamagedCheckpointError if a
    file of the checkpoint is damaged.
    """
    with self.during("while its variables were set"):
      if self._syncs:
        self._syncs.drop()
      if job.checkpoint:
        if not job.checkpoint.is_verified:
          self.read_whole(job.checkpoint.path)
        before = job.checkpoint.manifest.settings.get("NUM_PODS", 1)
        saved = self._find_saved(before)
        self._reader.restore(saved, job.checkpoint.prefix)
      elif job.initial_state:
        # These files are held open; the other run may remove the checkpoint.
        files = job.initial_weights.prefix
        self._client_reader.restore(self._pods, files)
      else:
        self._client.call(self._initialize)
        self._set_from_base(job)
      is_base = job.manifest.base is not None
      if job.config.run.prune != "none" and not job.start:
        self._set_pruned(job)
      elif job.initial_weights and (is_base or not job.start):
        # Take only parameters: this run's optimizer starts from scratch.
        self._restore_weights(job.initial_weights)
      if job.initial_adapter and not job.start:
        self._restore_weights(job.initial_adapter)
      if self._syncs and not job.checkpoint:
        self._syncs.begin()
    if job.rewinds:  # training repeats the steps after `job.step`
      remove_later(job.model_dir, job.step)

  def _find_saved(self, num_pods: int) -> Pods:
    """Returns the slices in a checkpoint of `num_pods` pods, without a base."""
    pods = [self._outer.saved(num_pods)] if self._outer else self._pods
    return [{x: y for x, y in z.items() if x not in self._base} for z in pods]

  def _restore_weights(self, weights: NamedWeights) -> None:
    names = weights.names
    parameters = [
      {
        key: [x.renamed(names) for x in parts]
        for key, parts in pod.items()
        if names.keys() >= {*parts[0].names}
      }
      for pod in self._pods
    ]
    self._client_reader.restore_weights(parameters, weights)

  def _set_from_base(self, job: TrainJob) -> None:
    """Sets what an adapter begins with that depends on its base."""
    base, config = job.initial_weights, job.config
    if config.model.adapter not in ("dora", "prompt") or not base:
      return
    read = tf.train.load_checkpoint(base.prefix).get_tensor
    values = initial_parameters(config.model, read, config.run.seed)
    self._restore_arrays(base, values)

  def _set_pruned(self, job: TrainJob) -> None:
    """Sets the parameters to those of INIT_CHECKPOINT, pruned by PRUNE."""
    weights, config, run = job.initial_weights, job.config, job.config.run
    assert weights
    assert weights.checkpoint
    dense, statistics = dense_model(weights, config.model), {}
    if run.prune != "magnitude":
      statistics = collect_statistics(
        weights.checkpoint,
        dense,
        calibration_batches(job.model_dir, config, job.vocabulary),
        hessians=run.prune == "sparsegpt",
      )
    read = tf.train.load_checkpoint(weights.prefix).get_tensor
    values = prune(config, dense, read, statistics)
    rest = {x: y for x, y in weights.names.items() if x not in values}
    self._restore_weights(dataclasses.replace(weights, names=rest))
    self._restore_arrays(weights, values)

  def _restore_arrays(
    self, weights: NamedWeights, values: Mapping[str, np.ndarray]
  ) -> None:
    """Sets parameters to arrays by name; `weights` is named in messages."""
    with tempfile.TemporaryDirectory() as folder:
      prefix = os.path.join(folder, "initial")
      write_arrays(prefix, values)
      own = {name: name for name in values}
      files = OpenWeights(prefix)
      self._restore_weights(
        dataclasses.replace(weights, files=files, names=own)
      )
      files.close()

  def _find_features(self, job: TrainJob) -> Sequence[str] | ServerFeatures:
    """Returns a batch's features, and how servers read them (ServerFeatures).

    Servers cannot read the batches if there are no servers, a server lacks the
    client's tokens, a call runs several steps, or rows have a reference or a
    teacher, which only the client has. Then only the names of the features are
    returned, and the client reads and feeds the batches.
    """
    corpus, sizes = job.corpus, job.config.run.batch_sizes
    taught = job.config.loss.teacher_features
    names = *corpus.batches(sizes).features, *taught
    servers, loops = (
      self._cluster.servers,
      job.config.mesh_layout.steps_per_loop,
    )
    is_fed = "reference" in names or taught or loops > 1
    if not servers or is_fed:
      return names
    spec = batches_spec(corpus, sizes, Skips([]))
    with self._client.graph.as_default():
      found = [x.call(find_batches, [spec], [tf.string])[0] for x in servers]
    reasons = self._client.call(Program(outputs=found))
    for server, reason in zip(servers, reasons, strict=True):
      if reason:
        _logger.info(
          "the client reads the batches for all servers: "
          f"{server.device} does not ({reason.decode()})"
        )
        return names
    by_device = {server.device: server for server in servers}
    dtypes = [FEATURE_DTYPES[x] for x in names]

    def read(device: str, *inputs: tf.Tensor | int) -> list[tf.Tensor]:
      return by_device[device].call(read_batch, inputs, dtypes)

    return ServerFeatures(names, read)
