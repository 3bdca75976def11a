# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a user's Mesh TensorFlow model; one process controls all pods."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.config import OptimizerConfig, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh, check_shares
from palm_mtf.config.tpu_slice import check_pods, tpu_slice
from palm_mtf.errors import (
  UserError,
  are_texts,
  check_count,
  did_you_mean,
  shorten,
)
from palm_mtf.executors.choose import executor_of
from palm_mtf.machine.processors import is_rehearsal
from palm_mtf.mesh.slices import Slice, variables_of
from palm_mtf.programs.model_loss import ModelFunction, ModelLoss
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.connect import connect
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.program import Program, state_of
from palm_mtf.training.step import NonFiniteStepError, TrainStep
from palm_mtf.training.variable_checks import VariableChecks


class PodTraining:
  """Training steps of a model function; a context manager.

  Each pod holds a copy of the model, and computes the gradients of its share of
  a batch. The gradients are summed over the data-center network, and every pod
  makes the same update, so that variables are bit-identical on all pods.
  `palm_mtf train` runs the same steps in a loop with data, checkpoints and
  recovery; here your code provides the loop, data, checkpoints and recovery.

  Attributes:
    program: the programs of a step.
    num_steps: number of steps done.
  """

  program: StepPrograms
  num_steps: int

  def __init__(
    self,
    function: ModelFunction,
    features: Mapping[str, tuple[str, str]],
    *,
    mesh: DeviceMesh,
    optimizer: OptimizerConfig,
    global_batch_size: int,
    pods: PodsConfig = PodsConfig(),  # noqa: B008
    seed: int = 0,
    frozen: Sequence[str] = (),
  ):
    """Checks the settings; `with` starts pods and draws initial weights.

    Args:
      function: makes the model and its loss; see `ModelFunction`.
      features: dtype and row dimensions of each feature, such as
        {"inputs": ("int32", "length:64")}.
      mesh: mesh and layout rules of each pod. With TPUs, all pods must be in
        this process, because servers do not have the function.
      optimizer: schedule, clipping, decay and moments. PARAMETER_SCALE must not
        be "stacked", which is for PaLM's matrices.
      global_batch_size: rows per step, over all pods.
      pods: number of pods, where they are, and the dtype of gradients between
        them. ON_POD_FAILURE must be "stop".
      seed: seed of the initial weights.
      frozen: patterns of names of variables that training does not change, with
        "*" for any characters.

    Raises:
      UserError: the settings do not fit each other.
    """
    by_name = 'the features by name, as in {"inputs": ("int32", "length:64")}'
    for name, value, kind in (
      ("mesh", mesh, DeviceMesh),
      ("optimizer", optimizer, OptimizerConfig),
      ("pods", pods, PodsConfig),
      ("features", features, Mapping),
    ):
      if not isinstance(value, kind):
        name_of_kind = kind.__name__.replace("Optimizer", "Adafactor")
        right = f"a {name_of_kind}; in a gin file, @{name_of_kind}()"
        right = by_name if kind is Mapping else right
        raise UserError(f"PodTraining.{name} = {shorten(value)}: give {right}.")
    if getattr(optimizer, "parameter_scale", None) == "stacked":
      raise UserError(
        'PARAMETER_SCALE = "stacked" joins matrices of PaLM\'s layers; set '
        '"variable" for another model.'
      )
    if mesh.stages > 1:
      raise UserError(
        f"STAGES = {mesh.stages}: a model function has one mesh per pod; set "
        "STAGES = 1."
      )
    if not are_texts(frozen):
      raise UserError(
        f"FROZEN = {shorten(frozen)}: give a list of patterns of names of "
        "variables, or [] for none."
      )
    check_count("GLOBAL_BATCH_SIZE", global_batch_size)
    check_shares(global_batch_size, pods.num_pods, mesh.num_microbatches)
    if pods.on_pod_failure != "stop":
      raise UserError(
        f'ON_POD_FAILURE = "{pods.on_pod_failure}": give "stop" for a model '
        "function; save its `variables` now and then, and `load` them."
      )
    if mesh.tpu:
      _check_tpu(mesh, pods)
    parts = pods.num_pods * mesh.num_microbatches
    self._loss_function = ModelLoss(
      function,
      features,
      mesh,
      num_rows=global_batch_size // parts,
      seed=seed,
      frozen=frozen,
    )
    self._mesh, self._optimizer, self._pods = mesh, optimizer, pods
    self._batch_size = global_batch_size

  def __enter__(self) -> "PodTraining":
    self.num_steps = 0
    with contextlib.ExitStack() as stack:
      pods, mesh = self._pods, self._mesh
      servers = stack.enter_context(PodServers(pods, mesh))
      executor = executor_of(mesh)
      places = executor.find_places(servers.places())
      self._heartbeat = stack.enter_context(
        Heartbeat(servers, places, pods.pod_timeout_secs, executor)
      )
      infos, stream = self._heartbeat.infos, servers.stream
      cluster = connect(executor, pods, mesh, places, infos, stream)
      client = stack.enter_context(cluster.client(pods.device_bytes or 0))
      with client.graph.as_default():
        self.program = executor.build_program(
          self._loss_function,
          mesh,
          self._optimizer,
          batch_size=self._batch_size,
          pods=pods,
          devices=cluster.devices,
        )
      with self._heartbeat.during("while its variables were set"):
        self._heartbeat.connect(client)
        self._train_step = TrainStep(client, self.program)
        self._checks = VariableChecks(client, self.program, lambda: None)
        client.call(
          Program(
            operations=[self.program.initialize],
            writes=state_of(variables_of(self.program.pod_slices)),
          )
        )
      self._client = client
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error: Any) -> None:
    self._stack.__exit__(*error)

  def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Trains on a batch, and returns metrics by name.

    The metrics are the mean loss, the gradient norm, the learning rate, and the
    root mean squares of parameters and of updates, for each group of parameters
    whose names have the same first part. Every FINGERPRINT_STEPS steps, the
    variables of the pods are compared.

    Args:
      batch: the features, [GLOBAL_BATCH_SIZE, ...]; pod 0 gets the first rows.

    Raises:
      UserError: the batch does not have this form, the loss or the gradients
        are not finite, a pod is lost, or pods differ.
    """
    batch = self._check_batch(batch)
    with self._heartbeat.during(f"during step {self.num_steps + 1}"):
      try:
        metrics = self._train_step.run(batch, self.num_steps)
      except NonFiniteStepError as bad:
        raise self._checks.make_step_error(bad) from None
      self.num_steps += 1
      if self.num_steps % self._pods.fingerprint_steps == 0:
        self._checks.check_replicas(self.num_steps)
    return metrics

  def check_pods(self) -> None:
    """Raises UserError unless variables are bit-identical on all pods."""
    self._checks.check_replicas(self.num_steps)

  def variables(self) -> dict[str, np.ndarray]:
    """Returns parameters and moments by name, not split into slices."""
    return read_whole(self._client, self.program.slices)

  def load(self, values: Mapping[str, np.ndarray], num_steps: int) -> None:
    """Sets variables on all pods.

    Args:
      values: {name: whole variable}, some or all of those in `variables`.
      num_steps: number of steps already done, for the learning rate schedule.

    Raises:
      UserError: there is no such variable, or its shape differs.
    """
    for slices in self.program.pod_slices:
      write_whole(self._client, slices, values)
    self.num_steps = num_steps

  def _check_batch(
    self, batch: Mapping[str, np.ndarray]
  ) -> dict[str, np.ndarray]:
    """Checks names and shapes; returns the batch in the features' dtypes."""
    checked, features = {}, self._loss_function.features
    for name in [x for x in batch if x not in features]:
      raise UserError(
        f'the batch has "{name}"{did_you_mean(name, features)}: the features '
        f"are {', '.join(features)}."
      )
    for name, feature in features.items():
      if name not in batch:
        raise UserError(f'the batch has no "{name}": give every feature.')
      rows = convert_numbers(f"{name} in the batch", batch[name], feature.dtype)
      shape = (self._batch_size, *feature.shape.to_integer_list[1:])
      if rows.shape != shape:
        raise UserError(
          f"{name} is {list(rows.shape)} in the batch: give "
          f"{list(shape)}, GLOBAL_BATCH_SIZE = {self._batch_size} rows."
        )
      checked[name] = rows
    return checked


def _check_tpu(mesh: DeviceMesh, pods: PodsConfig) -> None:
  given = f'TPU = "{mesh.tpu}"'
  if pods.pods != "in_process":
    raise UserError(
      f'{given} and PODS = "{pods.pods}": servers do not have the model '
      'function; set PODS = "in_process".'
    )
  if mesh.steps_per_loop > 1:
    raise UserError(
      f"STEPS_PER_LOOP = {mesh.steps_per_loop}: a model function trains step "
      "by step; set STEPS_PER_LOOP = 1."
    )
  check_pods(tpu_slice(mesh.tpu), pods, is_rehearsal=is_rehearsal())


def convert_numbers(name: str, value: object, dtype: tf.DType) -> np.ndarray:
  """Converts an array, or nested lists of numbers, to an array of `dtype`.

  Floats are rounded to `dtype`. `name` is the name of the array in messages.

  Raises:
    UserError: `value` has another form, or an integer dtype changes a number.
  """
  try:
    given = np.asarray(value)
  except ValueError:  # lists of unequal lengths
    given = np.array("")
  if given.dtype == dtype.as_numpy_dtype:
    return given
  if given.dtype.kind in "biuf":
    with np.errstate(invalid="ignore"):  # a NaN as an int is refused below
      found = given.astype(dtype.as_numpy_dtype)
    if dtype.is_floating or (found == given).all():
      return found
  raise UserError(
    f"{name}: give numbers that {dtype.name} holds, in an array or in lists of "
    "equal lengths."
  )


def read_whole(
  client: Client, slices: Mapping[str, Sequence[Slice]]
) -> dict[str, np.ndarray]:
  """Returns the whole variables of a pod by name."""
  # If several devices hold the same slice, read only the first of these slices.
  firsts = {
    name: [x for x in parts if x.is_first] for name, parts in slices.items()
  }
  with client.graph.as_default():
    values = {name: [x.read() for x in parts] for name, parts in firsts.items()}
  read = client.call(
    Program(outputs=values, reads=state_of(variables_of([slices])))
  )
  whole = {}
  for name, parts in firsts.items():
    value = np.empty(_find_shape(parts), read[name][0].dtype)
    for part, region in zip(parts, read[name], strict=True):
      value[_make_indices(part)] = region
    whole[name] = value
  return whole


def write_whole(
  client: Client,
  slices: Mapping[str, Sequence[Slice]],
  values: Mapping[str, np.ndarray],
) -> None:
  """Sets variables of a pod; `values` has the whole variables by name.

  Raises:
    UserError: there is no such variable, its shape differs, or a value is not a
      number.
  """
  inputs: dict[str, tf.Tensor] = {}
  values_of_slices, operations = {}, []
  for name, value in values.items():
    if name not in slices:
      raise UserError(
        f'there is no variable "{name}"{did_you_mean(name, slices)}.'
      )
    shape = _find_shape(slices[name])
    dtype = slices[name][0].variable.dtype.base_dtype
    value = convert_numbers(f"variable {name}", value, dtype)
    if value.shape != shape:
      raise UserError(
        f"variable {name} is {list(shape)}, and {list(value.shape)} is given."
      )
    for part in slices[name]:
      with client.graph.as_default(), tf.device(part.near):
        key, size = f"slice_{len(inputs)}", part.variable.shape
        inputs[key] = tf.placeholder(dtype, size, key)
        operations.append(part.variable.assign(inputs[key]).op)
      values_of_slices[key] = value[_make_indices(part)]
  written = state_of(variables_of([slices]))
  assign = Program(inputs, operations=operations, writes=written)
  client.call(assign, values_of_slices)


def _find_shape(parts: Sequence[Slice]) -> tuple[int, ...]:
  # `sizes` exclude padding, so the last slices end where the variable does.
  ends = [np.add(x.begin, x.sizes) for x in parts]
  return tuple(np.max(ends, axis=0).astype(int).tolist())


def _make_indices(part: Slice) -> tuple[slice, ...]:
  return tuple(map(slice, part.begin, np.add(part.begin, part.sizes)))
