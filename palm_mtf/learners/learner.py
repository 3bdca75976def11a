# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A pod that trains on given batches; its parameters are given as arrays."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import saved_shapes
from palm_mtf.config import PodsConfig, StepConfig
from palm_mtf.config.mesh_layout import check_layout
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.executors.choose import executor_of
from palm_mtf.mesh.slices import Slice, variables_of
from palm_mtf.programs.features import REQUIRED_FEATURES
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.connect import open_pod
from palm_mtf.runtime.program import Program, state_of
from palm_mtf.training.step import TrainStep

Arrays = Mapping[str, np.ndarray]  # {parameter: its value, float32}


class PodArrays:
  """Reads and sets the parameters on the devices of a pod as whole arrays."""

  def __init__(
    self,
    client: Client,
    slices: Mapping[str, Sequence[Slice]],
    names: Sequence[str],
  ):
    """Takes the slices in which `client` holds the variables `names`."""
    self._client, self.names, wanted = client, list(names), {*names}
    self._slices = {
      key: parts
      for key, parts in slices.items()
      if not wanted.isdisjoint(parts[0].names)
    }
    read, fed, assigned = [], {}, []
    with client.graph.as_default():
      for key, parts in self._slices.items():
        read.append([x.read() for x in _regions(parts)])
        for i, part in enumerate(parts):
          variable = part.variable
          with tf.device(part.near):
            value = tf.placeholder(tf.float32, variable.shape)
            fed[f"{key}/{i}"] = value
            value = tf.cast(value, variable.dtype.base_dtype)
          assigned.append(variable.assign(value).op)
    state = state_of(x.variable for y in self._slices.values() for x in y)
    self._read = Program(outputs=read, reads=state)
    self._set = Program(fed, operations=assigned, writes=state)

  def read(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Returns the values of parameters, float32; of all if `names` is None."""
    values = self._client.call(self._read)
    joined = {
      name: value
      for parts, of_key in zip(self._slices.values(), values, strict=True)
      for name, value in _join(parts, of_key)
    }
    return {x: joined[x] for x in (self.names if names is None else names)}

  def set(self, arrays: Arrays) -> None:
    """Sets parameters, float32, by name; the others keep their values."""
    if not arrays.keys() >= {*self.names}:
      # Set all, because JAX stacks the parameters of all layers in one array.
      arrays = {**self.read(), **arrays}
    fed = {
      f"{key}/{i}": _cut(part, arrays)
      for key, parts in self._slices.items()
      for i, part in enumerate(parts)
    }
    self._client.call(self._set, fed)


def _regions(parts: Sequence[Slice]) -> list[Slice]:
  """Returns one slice per region: copies of a region are left out."""
  return [x for x in parts if x.is_first and x.spec is not None]


def _held(part: Slice) -> tuple[slice, ...]:
  """Returns the index of a slice's region in the whole variable."""
  places = zip(part.begin, part.sizes, strict=True)
  return tuple(slice(begin, begin + size) for begin, size in places)


def _cut(part: Slice, arrays: Arrays) -> np.ndarray:
  """Returns the value of a slice, with zeros as padding."""
  shape = part.variable.shape.as_list()
  value = np.zeros(shape, np.float32)
  rows = value if len(part.names) > 1 else value[np.newaxis]
  if part.spec is not None:
    for row, name in zip(rows, part.names, strict=True):
      row[tuple(map(slice, part.sizes))] = arrays[name][_held(part)]
  return value


def _join(
  parts: Sequence[Slice], values: Sequence[np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the variables whose slices are `parts`.

  `values` has one value per region that `parts` hold, not per slice.
  """
  regions = _regions(parts)
  ends = [
    [b + n for b, n in zip(x.begin, x.sizes, strict=True)] for x in regions
  ]
  shape = np.max(ends, axis=0) if ends[0] else ()
  for row, name in enumerate(parts[0].names):
    whole = np.empty(shape, np.float32)
    for part, value in zip(regions, values, strict=True):
      held = value[row] if len(part.names) > 1 else value
      whole[_held(part)] = held[tuple(map(slice, part.sizes))]
    yield name, whole


class Learner:
  """A pod of this process: trains, and exchanges its parameters as arrays.

  Attributes:
    arrays: the parameters.
  """

  def __init__(
    self, client: Client, programs: StepPrograms, names: Sequence[str]
  ):
    """Takes the programs of one pod, in `client`; sets no variable.

    `names` are the parameters.
    """
    self._client = client
    self._step = TrainStep(client, programs)
    self.arrays = PodArrays(client, programs.slices, names)
    slices = variables_of(programs.pod_slices)
    self._initialize = Program(
      operations=[programs.initialize], writes=state_of(slices)
    )

  def begin(self, parameters: Arrays | None = None) -> None:
    """Sets all parameters; the optimizer starts from scratch.

    Without `parameters`, draws the initial values of the run.
    """
    self._client.call(self._initialize)
    self._slot_steps = 0  # number of steps that the optimizer's slots have seen
    if parameters is not None:
      self.arrays.set(parameters)

  def train(
    self, batches: Iterable[Batch], step: int, share: int = 0
  ) -> dict[str, float]:
    """Trains a step on each batch; returns the means of the steps' metrics.

    Args:
      batches: for each step, {feature: [rows, length]}.
      step: number of steps done before, which decides the learning rate; the
        slots' decay depends on the steps since `begin`.
      share: which share of each step's rows the batches are, from 0. Dropout
        masks depend on step and share, and are those of pod number `share`.

    Raises:
      NonFiniteStepError: the loss or the gradients are not finite; the steps
        before are done.
    """
    found: list[dict[str, float]] = []
    self._step.first_pod = share
    for i, batch in enumerate(batches):
      self._step.slot_start = step + i - self._slot_steps
      found.append(self._step.run(batch, step + i))
      self._slot_steps += 1
    return {k: float(np.mean([x[k] for x in found])) for k in found[0]}


@contextlib.contextmanager
def open_learner(
  config: StepConfig,
  *,
  num_rows: int,
  seed: int,
  frozen: Sequence[str] = (),
  features: Sequence[str] = REQUIRED_FEATURES,
) -> Iterator[Learner]:
  """Opens a learner on the devices of this process; MESH_LAYOUT chooses them.

  Args:
    config: settings of the step; `config.pods` is ignored.
    num_rows: rows of each batch.
    seed: SEED of the initial weights and of dropout.
    features: names of the features of every batch.

  Raises UserError if devices are missing, or the rows do not fit the mesh.
  """
  check_layout(config.mesh_layout, config.model, num_rows, num_pods=1)
  executor, pods = executor_of(config.mesh_layout), PodsConfig()
  config = dataclasses.replace(config, pods=pods)
  with open_pod(executor, config.mesh_layout, pods) as (client, devices):
    with client.graph.as_default():
      programs = build_train_program(
        config,
        batch_size=num_rows,
        seed=seed,
        frozen=frozen,
        features=features,
        devices=devices,
        build=executor.build_program,
      )
    yield Learner(client, programs, [*saved_shapes(config.model)])
