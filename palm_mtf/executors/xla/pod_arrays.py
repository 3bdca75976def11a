# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of a pod that one host holds: arrays on devices, and programs.

The client's session calls the functions of this module in the processes of all
hosts of a pod (host_calls.py). `pod` is a `PodName` as JSON, and `settings` is
the `named_text` of one of SETTINGS. All hosts of a pod run the same programs in
the same order, as JAX demands.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from palm_mtf._tf import tf
from palm_mtf.executors.xla.device_model import Arrays
from palm_mtf.executors.xla.device_store import (
  DeviceStore,
  PodDevices,
  open_store,
)
from palm_mtf.executors.xla.devices import find_devices, lowering_platform
from palm_mtf.executors.xla.host_calls import pod_function
from palm_mtf.executors.xla.stage_functions import StageStep
from palm_mtf.executors.xla.step_functions import SETTINGS, PodStep
from palm_mtf.json_text import read_named


@functools.lru_cache(maxsize=4)
def make_pod_step(settings: str, platform: str) -> PodStep:
  """Returns a PodStep, built once per `settings` (`named_text`)."""
  return PodStep(read_named(SETTINGS, settings), platform)


class PodPrograms(PodDevices):
  """The programs of a pod for batches of one size; JAX compiles each once.

  With stages, an object has the programs of one stage.

  Attributes:
    state: shape, dtype and sharding of each array that the devices hold.
    stage_step: None without stages.
  """

  def __init__(self, settings: str, number: int, num_hosts: int, stage: int):
    given = read_named(SETTINGS, settings)
    layout = given.mesh_layout
    devices = find_devices(layout, num_hosts, number)
    # Pods of one process share the graph, so that TensorFlow lowers it once.
    made = make_pod_step(settings, lowering_platform(devices))
    super().__init__(made.model.placement.make_mesh(devices))
    self.pod_step, self.stage_step = made, None
    whole = made.abstract_state(self.mesh)
    self.state = {x: whole[x] for x in made.arrays_in(stage)}
    if layout.stages > 1:
      self.stage_step = StageStep(given, made, self.mesh, stage)
      self.features = self.stage_step.rows
      return
    self.step, self.gradients = made.step(self.mesh), made.gradients(self.mesh)
    self.update = made.update_of_parts(self.mesh)
    self.loss = made.loss(self.mesh)
    self.features = made.abstract_batch(self.mesh)

  def put_batch(self, rows: Sequence[np.ndarray]) -> Arrays:
    """Copies features to the devices; the mesh splits the batch's sequences."""
    return {
      name: jax.make_array_from_callback(
        x.shape, x.sharding, values.reshape(x.shape).__getitem__
      )
      for (name, x), values in zip(self.features.items(), rows, strict=True)
    }

  def lower(self) -> None:
    """Lowers a step; raises LoweringError if XLA lacks an operation."""
    numbers = self.pod_step.abstract_numbers(self.mesh)
    state = self.pod_step.split(self.state)
    jax.eval_shape(self.step, *state, self.features, numbers)


@functools.lru_cache(maxsize=4)
def programs_of(settings: str) -> dict[tuple[int, int, int], PodPrograms]:
  """Returns {place in this process: programs of a pod or stage}, filled later.

  The cache keeps programs when their client leaves, so that the next client
  compiles none.
  """
  return {}


def make_programs(
  settings: str, number: int, num_hosts: int, stage: int = 0
) -> PodPrograms:
  """Returns the programs of a pod or a stage, made once."""
  made, place = programs_of(settings), (number, num_hosts, stage)
  if place not in made:
    made[place] = PodPrograms(settings, *place)
  return made[place]


def open_pod(pod: bytes, settings: bytes) -> tuple[DeviceStore, PodPrograms]:
  """Returns what a client keeps for a pod or a stage, and its programs."""
  text = settings.decode()
  return open_store(
    pod, lambda x: make_programs(text, x.number, x.num_hosts, x.stage)
  )


@pod_function
def initialize_arrays(pod: bytes, settings: bytes) -> np.int32:
  """Sets all arrays on this host's devices to their initial values."""
  held, programs = open_pod(pod, settings)
  made = programs.pod_step
  # Give this session its own threads. The client's session may have no thread
  # left, because each of its threads may wait for a call of this function.
  config = tf.ConfigProto(use_per_session_threads=True)
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    for array, whole in programs.state.items():
      begins = {i: made.slice_begin(array, i) for i in programs.local}
      # {where a slice begins, per dimension: the slice's value in each layer}.
      # Devices with equal slices have the same key.
      drawn = {begin: [] for begin in begins.values()}
      for name in made.names_of(array):
        slices = made.build_initial_slices(array, name, list(drawn))
        for values, x in zip(drawn.values(), session.run(slices), strict=True):
          values.append(x)
      shape = whole.sharding.shard_shape(whole.shape)
      joined = {x: np.stack(y).reshape(shape) for x, y in drawn.items()}
      slices = {i: joined[begin] for i, begin in begins.items()}
      held.arrays[array] = programs.join(slices, whole)
  return np.int32(0)


@pod_function
def run_steps(
  pod: bytes,
  settings: bytes,
  num_steps: np.int32,
  rates: np.ndarray,
  dropout_state: np.ndarray,
  *features: np.ndarray,
) -> tuple[np.ndarray, np.int32]:
  """Trains a pod, which is the only pod of its client, for some steps.

  Args:
    num_steps: number of steps to do, from 1 to `steps`.
    rates: rates of the optimizer in each step, [steps, rates] float32.
    dropout_state: state of dropout in each step, [steps, 4] int32.
    features: each feature of each step, [steps, batch, ...].

  Returns:
    The metrics of each step, [steps, metrics] float32 (`PodStep.step`), zeros
    after the first `num_steps`; and the number of steps up to and including the
    first step that is not finite, or `num_steps` if all are finite. Neither the
    step that is not finite nor a later step changes a variable.
  """
  held, programs = open_pod(pod, settings)
  found, goes_on = [], np.array(True)
  is_finite = programs.pod_step.find_number("is_finite")
  for i in range(int(num_steps)):
    # Dispatch the next step before the host reads the metrics of this step.
    # Otherwise the devices would wait. So the host never reads `goes_on`.
    numbers = _numbers(rates[i], dropout_state[i], goes_on)
    batch = programs.put_batch([x[i] for x in features])
    arrays, frozen = programs.pod_step.split(held.arrays)
    arrays, of_step = programs.step(arrays, frozen, batch, numbers)
    held.arrays |= arrays
    found.append(of_step)
    goes_on = of_step[is_finite] > 0
  values = np.stack([x.addressable_data(0) for x in found])
  bad = np.flatnonzero(values[:, is_finite] == 0)
  rest = np.zeros([len(rates) - len(values), values.shape[1]], np.float32)
  done = bad[0] + 1 if bad.size else len(values)
  return np.concatenate([values, rest]), np.int32(done)


@pod_function
def find_gradients(
  pod: bytes,
  settings: bytes,
  rates: np.ndarray,
  dropout_state: np.ndarray,
  *features: np.ndarray,
) -> tuple[np.ndarray, ...]:
  """Computes the gradients of a pod's share of a batch, summed over the pod.

  Args:
    rates: rates of the optimizer, [rates] float32. Gradients do not depend on
      them, but all programs of a step take them.
    dropout_state: state of dropout, [4] int32.
    features: each feature, [batch, ...].

  Returns:
    Sums of losses over the pod's share of the batch, as in `sum_losses`, but
    with dropout. Then, for each parameter, the parts of its gradient on this
    host's devices, joined into a vector in DCN_DTYPE and cut into messages
    (`PodStep.cut_parts`).
  """
  held, programs = open_pod(pod, settings)
  numbers = _numbers(rates, dropout_state)
  batch = programs.put_batch(features)
  parts, losses = programs.gradients(held.arrays, batch, numbers)
  messages = cut_messages(programs, programs.pod_step.parameters, parts)
  return np.array(losses.addressable_data(0)), *messages


def cut_messages(
  programs: PodPrograms, names: Sequence[str], parts: Arrays
) -> list[np.ndarray]:
  """Joins this host's parts of each gradient, and cuts them into messages."""
  cuts = programs.pod_step.cut_parts(names, len(programs.local))
  messages = []
  for name, of_name in zip(names, cuts, strict=True):
    joined = np.concatenate([*programs.slices(parts[name]).values()])
    messages += [joined[x] for x in of_name]
  return messages


def join_messages(
  programs: PodPrograms, names: Sequence[str], parts: Sequence[np.ndarray]
) -> Arrays:
  """Returns the parts of gradients on devices; undoes `cut_messages`."""
  cuts = programs.pod_step.cut_parts(names, len(programs.local))
  joined, messages = {}, iter(parts)
  for name, of_name in zip(names, cuts, strict=True):
    values = [next(messages) for _ in of_name]
    values = values[0] if len(values) == 1 else np.concatenate(values)
    slices = np.split(values, len(programs.local))
    size = slices[0].size * len(programs.devices)
    joined[name] = programs.join(
      dict(zip(programs.local, slices, strict=True)),
      jax.ShapeDtypeStruct([size], values.dtype, sharding=programs.each_device),
    )
  return joined


@pod_function
def update_arrays(
  pod: bytes,
  settings: bytes,
  rates: np.ndarray,
  dropout_state: np.ndarray,
  losses: np.ndarray,
  *parts: np.ndarray,
) -> np.ndarray:
  """Updates all arrays on this host's devices.

  `losses` and `parts` are what `find_gradients` returns, summed over all pods,
  in float32.

  Returns:
    The metrics of the step, [metrics] float32 (`PodStep.step`).
  """
  held, programs = open_pod(pod, settings)
  numbers = _numbers(rates, dropout_state)
  joined = join_messages(programs, programs.pod_step.parameters, parts)
  arrays, _ = programs.pod_step.split(held.arrays)
  arrays, found = programs.update(arrays, joined, losses, numbers)
  held.arrays |= arrays
  return np.array(found.addressable_data(0))


@pod_function
def sum_losses(
  pod: bytes, settings: bytes, *features: np.ndarray
) -> np.ndarray:
  """Returns the sums of losses over a pod's share of a batch, without dropout.

  [losses] float32; the last element is the sum of the tokens' weights.
  """
  held, programs = open_pod(pod, settings)
  variables = programs.pod_step.read(held.arrays)
  losses = programs.loss(variables, programs.put_batch(features))
  return np.array(losses.addressable_data(0))


@pod_function
def read_slice(
  pod: bytes,
  settings: bytes,
  name: bytes,
  device: np.int32,
  first_row: np.int32,
  end_row: np.int32,
) -> np.ndarray:
  """Returns layers [first_row, end_row) of a device's slice of an array."""
  held, programs = open_pod(pod, settings)
  value = held.find_slice(programs, name.decode(), int(device))
  if len(programs.pod_step.names_of(name.decode())) > 1:
    value = value[int(first_row) : int(end_row)]
  return np.array(value)  # a view would keep JAX from reusing the memory


@pod_function
def assign_slice(
  pod: bytes,
  settings: bytes,
  name: bytes,
  device: np.int32,
  first_row: np.int32,
  end_row: np.int32,
  value: np.ndarray,
) -> np.int32:
  """Sets layers [first_row, end_row) of a device's slice of an array."""
  held, programs = open_pod(pod, settings)
  key, rows = name.decode(), range(int(first_row), int(end_row))
  whole, num_rows = programs.state[key], len(programs.pod_step.names_of(key))
  held.assign(programs, key, whole, int(device), value, rows, num_rows)
  return np.int32(0)


def _numbers(
  rates: np.ndarray,
  dropout_state: np.ndarray,
  goes_on: np.ndarray | jax.Array = np.array(True),  # noqa: B008
) -> Arrays:
  """Returns the argument `numbers` of a step's programs (`PodStep.step`)."""
  return {"rates": rates, "dropout_state": dropout_state, "goes_on": goes_on}
