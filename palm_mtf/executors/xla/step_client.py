# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client's graph of a training step on pods of accelerators.

The graph calls the functions of pod_arrays.py in the pods' hosts. TensorFlow's
runtime carries rows, gradients and metrics; JAX's runtime computes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import parameters_of
from palm_mtf.config import AdafactorConfig, MeshLayout, ModelConfig, PodsConfig
from palm_mtf.executors.xla import pod_arrays
from palm_mtf.executors.xla.client_calls import (
  DeviceArray,
  after_all,
  make_slice,
)
from palm_mtf.executors.xla.devices import AcceleratorDevices
from palm_mtf.executors.xla.host_calls import call_pod, name_of
from palm_mtf.executors.xla.scanned_model import StepSettings, is_stacked
from palm_mtf.executors.xla.scanned_update import RATES
from palm_mtf.executors.xla.step_functions import PodStep, cut_rows
from palm_mtf.json_text import dataclass_text
from palm_mtf.mesh.exchange import sum_in_order
from palm_mtf.mesh.slices import Slice, regions_of
from palm_mtf.model.dims import model_dims
from palm_mtf.model.loss import SMALLEST_WEIGHT
from palm_mtf.programs.features import (
  ReadFeatures,
  ServerFeatures,
  find_palm_features,
  make_placeholders,
)
from palm_mtf.programs.pod import build_dropout_state, build_rates
from palm_mtf.programs.train_program import (
  LoopProgram,
  PodProgram,
  StageProgram,
  TrainProgram,
  make_metrics,
)


def build_train_program(
  config: ModelConfig,
  mesh_layout: MeshLayout,
  optimizer: AdafactorConfig,
  *,
  batch_size: int,
  seed: int,
  frozen: Sequence[str] = (),
  features: Sequence[str] | ServerFeatures,
  pods: PodsConfig,
  devices: AcceleratorDevices,
) -> TrainProgram:
  """Builds a training step of PaLM in the current tf.Graph.

  Takes the arguments of `build_train_program` in programs/train_program.py.
  """
  is_read = isinstance(features, ServerFeatures)
  names, read = features if is_read else (features, None)
  settings = StepSettings(
    model=config,
    mesh_layout=mesh_layout,
    optimizer=optimizer,
    features=list(names),
    num_rows=batch_size // pods.num_pods,
    dcn_dtype=pods.dcn_dtype,
    seed=seed,
    frozen=list(frozen),
  )
  return _Builder(settings, devices, read).build()


# `StepSettings` has an optimizer, but a loss depends on none of its settings.
_UNUSED = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.0,
  beta2_exponent=0.8,
  update_clip=None,
  gradient_clip=1.0,
  weight_decay_exponent=None,
  z_loss=0.0,
)


def build_loss_program(
  config: ModelConfig,
  mesh_layout: MeshLayout,
  *,
  batch_size: int,
  features: Sequence[str],
  devices: AcceleratorDevices,
) -> PodProgram:
  """Builds the loss of a batch on one pod, which needs no optimizer slots.

  Takes the arguments of `build_forward_program` in programs/forward_program.py.
  """
  settings = StepSettings(
    model=config,
    mesh_layout=dataclasses.replace(mesh_layout, num_microbatches=1),
    optimizer=_UNUSED,
    features=list(features),
    num_rows=batch_size,
    dcn_dtype="float32",
    seed=0,
  )
  return _Builder(settings, devices, None).build_loss()


class _Builder:
  """Builds the graphs of `build_train_program` and `build_loss_program`."""

  def __init__(
    self,
    settings: StepSettings,
    devices: AcceleratorDevices,
    read: ReadFeatures | None,
  ):
    self._settings, self._devices, self._read = settings, devices, read
    self._text = dataclass_text(settings)
    # Any platform will do, because only names and shapes of arrays are read.
    self._pod_step = PodStep(settings, "cpu")
    dims = model_dims(settings.model, settings.num_rows, settings.mesh_layout)
    self._features = find_palm_features(settings.features, dims)
    self._losses = [*self._pod_step.update.losses]
    self._parameters = parameters_of(settings.model, tuple(settings.frozen))
    self._trained = [x.name for x in self._parameters if x.is_trained]
    with tf.device(devices.client):
      no_step = tf.constant(-1, tf.int64)  # for a loss, which needs no step
      self._step = tf.placeholder_with_default(no_step, [], "step")
      self._microbatch = tf.placeholder_with_default(0, [], "microbatch")
      self._batches = tf.placeholder(tf.string, [], "batches")

  def build_loss(self) -> PodProgram:
    """Returns the first pod's program, without slices of optimizer slots."""
    first, *copies = self._make_rows(0)
    names = {x.name for x in self._parameters}
    program = self._build_pod(0, [first, *[first] * len(copies)])
    slices = program.slices.items()
    return dataclasses.replace(
      program,
      slices={x: y for x, y in slices if y[0].names[0] in names},
    )

  def build(self) -> TrainProgram:
    """Returns the program that trains all pods for a step."""
    settings, hosts = self._settings, self._devices.hosts
    rows = [self._make_rows(pod) for pod in range(len(hosts))]
    with tf.device(self._devices.client):
      rates = build_rates(settings.optimizer, self._step)
    found = self._build_step(rows, rates)
    with tf.device(self._devices.client):
      values = self._split(found)
      is_finite = values["is_finite"] > 0
      squares = self._order_squares(values)
      return TrainProgram(
        pods=[self._build_pod(i, x) for i, x in enumerate(rows)],
        batch_size=settings.num_rows * len(hosts),
        step=self._step,
        microbatch=self._microbatch,
        num_microbatches=1,  # a pod computes all its microbatches in one call
        update=tf.raw_ops.Assert(condition=is_finite, data=[is_finite]),
        is_finite=is_finite,
        losses={name: values[name] for name in self._losses},
        metrics=self._make_metrics(values, rates["learning_rate"]),
        gradient_squares=squares / tf.square(values["weight"]),
        parameters=self._trained,
        initialize=tf.group(
          [
            self._call(i, pod_arrays.initialize_arrays, [tf.int32])
            for i in range(len(hosts))
          ]
        ),
        devices=self._devices,
        batches=self._batches if self._read else None,
        loop=self._build_loop(),
        passes=[[]],
      )

  def _call(
    self,
    pod: int,
    function: Callable,
    dtypes: Sequence[tf.DType],
    *inputs: object,
    of_host: Sequence[Sequence[object]] | None = None,
  ) -> list[list[tf.Tensor]]:
    """Calls a function in each host of a pod; returns what each host returns.

    The function takes `pod`, `settings`, `inputs`, and then the host's item of
    `of_host`. Its results have the types `dtypes`.
    """
    hosts, name = self._devices.hosts[pod], self._devices.name_pod(pod)
    given = [name_of(function), name, self._text, *inputs]
    return [
      x.call(call_pod, [*given, *more], dtypes)
      for x, more in zip(hosts, of_host or [[]] * len(hosts), strict=True)
    ]

  def _make_rows(self, pod: int) -> list[dict[str, tf.Tensor]]:
    """Returns, per host, {feature: placeholder of all of the pod's rows}."""
    made = []
    for process in self._devices.hosts[pod]:
      with tf.device(process.device):
        values = None
        if self._read:
          part, num_parts = tf.constant(pod), len(self._devices.hosts)
          values = self._read(
            process.device, self._batches, self._step, part, num_parts
          )
        made.append(make_placeholders(self._features, values))
    return made

  def _build_step(
    self,
    rows: Sequence[Sequence[Mapping[str, tf.Tensor]]],
    rates: Mapping[str, tf.Tensor],
  ) -> tf.Tensor:
    """Trains all pods for a step; returns its metrics, [metrics] float32."""
    with tf.device(self._devices.client):
      of_step = tf.stack([rates[x] for x in RATES])
      num_rows = self._settings.num_rows
      states = [
        build_dropout_state(self._step, i * num_rows) for i in range(len(rows))
      ]
    if len(rows) > 1:
      return self._build_exchange(rows, of_step, states)
    found = self._call(
      0,
      pod_arrays.run_steps,
      [tf.float32, tf.int32],
      *(1, of_step[tf.newaxis], states[0][tf.newaxis]),
      of_host=[[y[tf.newaxis] for y in x.values()] for x in rows[0]],
    )
    numbers, _ = after_all(found)
    return numbers[0]

  def _build_exchange(
    self,
    rows: Sequence[Sequence[Mapping[str, tf.Tensor]]],
    rates: tf.Tensor,
    states: Sequence[tf.Tensor],
  ) -> tf.Tensor:
    """Trains several pods, which exchange gradients; see `_build_step`."""
    cuts = self._pod_step.cut_parts(self._devices.num_local)
    dtype = tf.as_dtype(self._settings.dcn_dtype)
    gradients = [
      self._call(
        pod,
        pod_arrays.find_gradients,
        [tf.float32, *[dtype] * sum(map(len, cuts))],
        *(rates, states[pod]),
        of_host=[[*x.values()] for x in of_pod],
      )
      for pod, of_pod in enumerate(rows)
    ]
    # All hosts of a pod return the same losses; send those of the first host.
    losses = [of_pod[0][0] for of_pod in gradients]
    updated = []
    for pod, processes in enumerate(self._devices.hosts):
      sums = []
      for host, process in enumerate(processes):
        # In each pod, the host with this number sends its parts to `process`.
        parts = zip(*(of_pod[host][1:] for of_pod in gradients), strict=True)
        with tf.device(process.device):
          sums.append([sum_in_order(*x) for x in (losses, *parts)])
      numbers = [rates, states[pod]]
      updated += self._call(
        pod, pod_arrays.update_arrays, [tf.float32], *numbers, of_host=sums
      )
    (numbers,) = after_all(updated)
    return numbers

  def _build_loop(self) -> LoopProgram | None:
    """Builds a call of STEPS_PER_LOOP steps, one round trip to the hosts."""
    layout = self._settings.mesh_layout
    if layout.steps_per_loop == 1:
      return None
    max_steps = layout.steps_per_loop
    with tf.device(self._devices.client):
      num_steps = tf.placeholder(tf.int32, [], "num_steps")
      features = {
        name: tf.placeholder(x.dtype, [max_steps, *x.shape.to_integer_list])
        for name, x in self._features.items()
      }
      steps = [self._step + i for i in range(max_steps)]
      rates = [build_rates(self._settings.optimizer, x) for x in steps]
      rates = {x: tf.stack([y[x] for y in rates]) for x in RATES}
      states = tf.stack([build_dropout_state(x, 0) for x in steps])
      inputs = num_steps, tf.stack([*rates.values()], 1), states
    dtypes = [tf.float32, tf.int32]
    run = pod_arrays.run_steps
    found = self._call(0, run, dtypes, *inputs, *features.values())
    with tf.device(self._devices.client):
      numbers, num_done = after_all(found)
      values = self._split(tf.ensure_shape(numbers, [max_steps, None]))
      return LoopProgram(
        features=features,
        max_steps=max_steps,
        num_steps=num_steps,
        num_done=num_done,
        is_finite=values["is_finite"][num_done - 1] > 0,
        metrics=self._make_metrics(values, rates["learning_rate"]),
      )

  def _build_pod(
    self, pod: int, rows: Sequence[dict[str, tf.Tensor]]
  ) -> PodProgram:
    first, *copies = rows
    of_host = [[*x.values()] for x in rows]
    add_up = pod_arrays.sum_losses
    found = self._call(pod, add_up, [tf.float32], of_host=of_host)
    (losses,) = after_all(found)
    names = [*self._pod_step.model.losses]
    losses = tf.unstack(tf.ensure_shape(losses, [len(names)]))
    by_name = dict(zip(names, losses, strict=True))
    weight = by_name["weight"]
    return PodProgram(
      stages=[StageProgram(first, copies, tf.no_op(), None, tf.no_op())],
      loss=by_name["loss"] / tf.maximum(weight, SMALLEST_WEIGHT),
      weight_sum=weight,
      slices=self._find_slices(pod),
    )

  def _find_slices(self, pod: int) -> dict[str, list[Slice]]:
    made, hosts = self._pod_step, self._devices.hosts[pod]
    slices = {}
    for array, variable in made.variables.items():
      shape = made.model.placement.slice_shape(variable.shape)
      num_bytes = math.prod(shape) * variable.slice_dtype.size
      regions = [*regions_of(variable, made.model.placement)]
      names = made.names_of(array)
      for rows in cut_rows(len(names), num_bytes):
        of_rows = names[rows]
        layers = [len(of_rows)] if len(of_rows) > 1 else []
        slices[of_rows[0]] = []
        for number, region in enumerate(regions):
          process = hosts[self._devices.places[number]]
          of_device = array, number, rows.start, rows.stop
          key = [self._devices.name_pod(pod), self._text, *of_device]
          of_rows_shape = tf.TensorShape([*layers, *shape])
          held = DeviceArray(
            process,
            key,
            of_rows_shape,
            variable.slice_dtype,
            pod_arrays.assign_slice,
            pod_arrays.read_slice,
          )
          slices[of_rows[0]].append(make_slice(region, of_rows, held))
    return slices

  def _split(self, numbers: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns {metric: values}, cut from the last dimension of `numbers`."""
    sizes = self._pod_step.num_numbers
    found = tf.split(numbers, [*sizes.values()], -1)
    by_name = dict(zip(sizes, found, strict=True))
    of_layers = self._pod_step.update.is_of_layers
    return {
      name: x if of_layers(name) else tf.squeeze(x, -1)
      for name, x in by_name.items()
    }

  def _order_squares(self, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns gradients' sums of squares in the order of `_trained`."""
    by_name = {}
    for i, array in enumerate(self._pod_step.parameters):
      names = self._pod_step.names_of(array)
      of_array = tf.unstack(tf.reshape(values[f"squares/{i}"], [len(names)]))
      by_name |= zip(names, of_array, strict=True)
    return tf.stack([by_name[x] for x in self._trained])

  def _make_metrics(
    self, values: Mapping[str, tf.Tensor], learning_rate: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    made = self._pod_step
    sums = []
    for each in made.update.sums_of_squares:
      value = values[f"{each.of}_squares/{each.variable}"]
      num_layers = len(self._settings.trained[each.variable])
      if is_stacked(each.variable):
        value = tf.reduce_sum(value, -1)
      sums.append(each._replace(value=value, size=each.size * num_layers))
    return make_metrics(
      {name: values[name] for name in self._losses}, sums, learning_rate
    )
