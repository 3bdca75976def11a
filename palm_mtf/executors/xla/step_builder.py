# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client's graph of a training step on pods of accelerators.

The graph calls the functions of pod_arrays.py in the pods' hosts. TensorFlow's
runtime carries rows, gradients and metrics; JAX's runtime computes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.config import PodsConfig
from palm_mtf.executors.xla import pod_arrays
from palm_mtf.executors.xla.client_calls import (
  DeviceArray,
  after_all,
  make_slice,
)
from palm_mtf.executors.xla.devices import AcceleratorDevices
from palm_mtf.executors.xla.host_calls import call_pod, name_of
from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.step_functions import cut_rows
from palm_mtf.executors.xla.whole_model import WholeSettings
from palm_mtf.json_text import named_text
from palm_mtf.mesh.exchange import sum_in_order
from palm_mtf.mesh.slices import Slice, regions_of
from palm_mtf.model.loss import SMALLEST_WEIGHT
from palm_mtf.optim.optimizer import find_rates
from palm_mtf.programs.features import ReadFeatures, make_placeholders
from palm_mtf.programs.pod import build_dropout_state
from palm_mtf.programs.step_programs import (
  VALIDATED,
  CallGraph,
  Inputs,
  LossProgram,
  StepPrograms,
  make_programs,
  make_scalars,
)
from palm_mtf.programs.train_program import make_metrics
from palm_mtf.runtime.program import Program
from palm_mtf.steps.plan import StepPlan, plan_losses, plan_step

# By (pod, stage), for each of its hosts {feature: placeholder}.
Rows = Mapping[tuple[int, int], Sequence[Mapping[str, tf.Tensor]]]


class StepBuilder:
  """Builds the graphs of training steps, and of the loss of a batch.

  `StagesBuilder` builds the graphs for pods with stages.
  """

  def __init__(
    self,
    settings: StepSettings | WholeSettings,
    devices: AcceleratorDevices,
    read: ReadFeatures | None,
  ):
    self._settings, self._devices, self._read = settings, devices, read
    self._text = named_text(settings)
    self._num_stages = settings.mesh_layout.stages
    self._every_pod = range(len(devices.hosts) // self._num_stages)
    # Any platform will do, because only names and shapes of arrays are read.
    self._pod_step = pod_arrays.make_pod_step(self._text, "cpu")
    self._features = self._pod_step.features(self._rows_per_call)
    self._parameters = self._pod_step.model.parameters
    # {name scope of the operations of a call: phase of a traced step}
    self._phases: dict[str, str] = {}
    self._scalars = make_scalars(devices, read is not None)

  @property
  def _rows_per_call(self) -> int:
    """Number of rows that one call of a pod reads."""
    return self._settings.num_rows

  @property
  def _num_calls(self) -> int:
    """Number of calls that together read a pod's rows of a step."""
    return self._settings.num_rows // self._rows_per_call

  def build_loss(self) -> LossProgram:
    """Returns the program that computes a batch's loss on the first pod.

    All hosts of the pod read the same placeholders, those of the first host.
    """
    first, *copies = self._make_rows(0)
    loss = self._find_loss(0, [first, *[first] * len(copies)])
    return LossProgram(first, *loss, self._find_slices(0))

  def build(self, pods: PodsConfig, first_backward: int) -> StepPrograms:
    """Returns the programs that train all pods; see `plan_step`."""
    settings = self._settings
    plan = plan_step(
      settings.mesh_layout,
      pods,
      on_accelerators=True,
      first_backward=first_backward,
    )
    num_pods, num_calls = len(self._every_pod), self._num_calls
    scalars = self._scalars
    losses = plan_losses(settings.mesh_layout, num_pods, num_calls)
    places = list(itertools.product(self._every_pod, range(self._num_stages)))
    rows = {x: self._make_rows(*x) for x in places}
    with tf.device(self._devices.client):
      rates = find_rates(settings.optimizer, scalars.step, scalars.slot_step)
    found = self._build_step(rows, rates)
    with tf.device(self._devices.client):
      values = self._split(found)
      is_finite = values["is_finite"] > 0
      check = tf.raw_ops.Assert(condition=is_finite, data=[is_finite])
      squares = self._order_squares(values) / tf.square(values["weight"])
      of_terms = {name: values[name] for name in self._pod_step.update.losses}
      metrics = self._make_metrics(values, rates["learning_rate"])
    graphs = {
      plan.last.nodes: CallGraph([check], metrics),
      (): CallGraph(outputs=[of_terms, squares, is_finite]),
    }
    for each in (plan, losses):
      graphs |= self._build_passes(each, rows)
    nodes = *plan.nodes, *losses.nodes
    named = {x.name: rows[x.pod, x.stage or 0] for x in nodes}
    inputs = Inputs(scalars, named, settings.num_rows)
    pod_slices = [self._find_slices(x) for x in self._every_pod]
    drawn = [
      self._call(x, pod_arrays.initialize_arrays, [tf.int32]) for x in places
    ]
    plans = plan, losses
    made = make_programs(plans, graphs, inputs, pod_slices, self._devices)
    return StepPrograms(
      *plans,
      **made,
      batch_size=settings.num_rows * num_pods,
      parameters=self._parameters,
      pod_slices=pod_slices,
      initialize=tf.group(drawn),
      devices=self._devices,
      phases=self._phases,
      loop=self._build_loop(made["programs"][plan.last.nodes]),
    )

  def _build_passes(
    self, plan: StepPlan, rows: Rows
  ) -> dict[tuple[str, ...], CallGraph]:
    """Returns the graphs of all calls of a plan except `plan.last`.

    The keys are the names of a call's nodes.
    """
    graphs = {}
    if not plan.last:
      for node in plan.nodes:
        found = self._find_loss(node.pod, rows[node.pod, 0])
        graphs[node.name,] = CallGraph(outputs=found)
    return graphs

  def _call(
    self,
    place: tuple[int, int],
    function: Callable,
    dtypes: Sequence[tf.DType],
    *inputs: object,
    of_host: Sequence[Sequence[object]] | None = None,
  ) -> list[list[tf.Tensor]]:
    """Calls a function in each host of `place`; returns what each returns.

    `place` is the numbers of a pod and of a stage in that pod. The function
    takes `pod`, `settings`, `inputs`, and then the host's item of `of_host`.
    The function's results have the dtypes `dtypes`.
    """
    hosts, name = self._devices.hosts_of(*place), self._devices.name_pod(*place)
    given = [name_of(function), name, self._text, *inputs]
    return [
      x.call(call_pod, [*given, *more], dtypes)
      for x, more in zip(hosts, of_host or [[]] * len(hosts), strict=True)
    ]

  def _make_rows(self, pod: int, stage: int = 0) -> list[dict[str, tf.Tensor]]:
    """Returns, per host, {feature: placeholder of the rows of a call}."""
    made, scalars = [], self._scalars
    for process in self._devices.hosts_of(pod, stage):
      with tf.device(process.device):
        values = None
        if self._read:
          part = tf.constant(pod)
          if self._num_calls > 1:
            part = pod * self._num_calls + scalars.microbatch
          num_parts = len(self._every_pod) * self._num_calls
          given = scalars.batches, scalars.step, part, num_parts
          values = self._read(process.device, *given)
        made.append(make_placeholders(self._features, values))
    return made

  def _build_step(
    self, rows: Rows, rates: Mapping[str, tf.Tensor]
  ) -> tf.Tensor:
    """Builds the step's last call; returns the metrics, [metrics] float32."""
    with tf.device(self._devices.client):
      of_step = tf.stack([*rates.values()])
      step, first_pod = self._scalars.step, self._scalars.first_pod
      num_rows = self._settings.num_rows
      states = [
        build_dropout_state(step, (first_pod + i) * num_rows)
        for i in self._every_pod
      ]
    if len(states) > 1:
      return self._build_exchange(rows, of_step, states)
    found = self._call(
      (0, 0),
      pod_arrays.run_steps,
      [tf.float32, tf.int32],
      *(1, of_step[tf.newaxis], states[0][tf.newaxis]),
      of_host=[[y[tf.newaxis] for y in x.values()] for x in rows[0, 0]],
    )
    numbers, _ = after_all(found)
    return numbers[0]

  def _build_exchange(
    self, rows: Rows, rates: tf.Tensor, states: Sequence[tf.Tensor]
  ) -> tf.Tensor:
    """Like `_build_step`, for several pods, which exchange gradients."""
    dtypes = self._message_dtypes(self._pod_step.parameters)
    gradients = [
      self._call(
        (pod, 0),
        pod_arrays.find_gradients,
        [tf.float32, *dtypes],
        *(rates, states[pod]),
        of_host=[[*x.values()] for x in rows[pod, 0]],
      )
      for pod in self._every_pod
    ]
    # All hosts of a pod return the same losses; send those of the first host.
    losses = [of_pod[0][0] for of_pod in gradients]
    updated = []
    for pod in self._every_pod:
      sums = self._sum_messages((pod, 0), losses, gradients)
      numbers = [rates, states[pod]]
      updated += self._call(
        (pod, 0), pod_arrays.update_arrays, [tf.float32], *numbers, of_host=sums
      )
    (numbers,) = after_all(updated)
    return numbers

  def _message_dtypes(self, parameters: Sequence[str]) -> list[tf.DType]:
    """Returns the dtypes of a host's messages with gradients."""
    cuts = self._pod_step.cut_parts(parameters, self._devices.num_local)
    return [
      tf.as_dtype(self._pod_step.sent_dtype(name))
      for name, messages in zip(parameters, cuts, strict=True)
      for _ in messages
    ]

  def _sum_messages(
    self,
    place: tuple[int, int],
    losses: Sequence[tf.Tensor],
    gradients: Sequence[Sequence[Sequence[tf.Tensor]]],
  ) -> list[list[tf.Tensor]]:
    """Returns, for each host of `place`, the sums over all pods.

    `losses` has the losses of each pod. `gradients` has what each host of each
    pod returns: its own losses, and then its messages.
    """
    sums = []
    for host, process in enumerate(self._devices.hosts_of(*place)):
      # In each pod, the host with this number sends its parts to `process`.
      parts = zip(*(of_pod[host][1:] for of_pod in gradients), strict=True)
      with tf.device(process.device):
        sums.append([sum_in_order(*x) for x in (losses, *parts)])
    return sums

  def _build_loop(self, update: Program) -> Program | None:
    """Builds a call of STEPS_PER_LOOP steps, one round trip to the hosts.

    A call for several steps saves time, because starting a call takes as long
    as a step of a small model. Only one pod has a loop, because several pods'
    hosts exchange gradients in each step. `update` is the program of one step.
    """
    max_steps = self._settings.mesh_layout.steps_per_loop
    if max_steps == 1:
      return None
    with tf.device(self._devices.client):
      num_steps = tf.placeholder(tf.int32, [], "num_steps")
      features = {
        name: tf.placeholder(x.dtype, [max_steps, *x.shape.to_integer_list])
        for name, x in self._features.items()
      }
      step = self._scalars.step
      steps = [step + i for i in range(max_steps)]
      of_steps = [find_rates(self._settings.optimizer, x, x) for x in steps]
      rates = {x: tf.stack([y[x] for y in of_steps]) for x in of_steps[0]}
      states = tf.stack([build_dropout_state(x, 0) for x in steps])
      inputs = num_steps, tf.stack([*rates.values()], 1), states
    dtypes = [tf.float32, tf.int32]
    run = pod_arrays.run_steps
    found = self._call((0, 0), run, dtypes, *inputs, *features.values())
    with tf.device(self._devices.client):
      numbers, num_done = after_all(found)
      values = self._split(tf.ensure_shape(numbers, [max_steps, None]))
      metrics = self._make_metrics(values, rates["learning_rate"])
      is_finite = values["is_finite"][num_done - 1] > 0
    return dataclasses.replace(
      update,
      inputs={**features, "step": step, "num_steps": num_steps},
      outputs=[metrics, num_done, is_finite],
      operations=(),
    )

  def _find_loss(
    self, pod: int, rows: Sequence[dict[str, tf.Tensor]]
  ) -> list[tf.Tensor]:
    """Returns a pod's means of VALIDATED and the sum of its rows' weights."""
    of_host = [[*x.values()] for x in rows]
    add_up = pod_arrays.sum_losses
    found = self._call((pod, 0), add_up, [tf.float32], of_host=of_host)
    return self._find_mean(*after_all(found))

  def _find_mean(self, losses: tf.Tensor) -> list[tf.Tensor]:
    """Returns means of VALIDATED and the sum of weights, from sums."""
    names = [*self._pod_step.model.losses]
    losses = tf.unstack(tf.ensure_shape(losses, [len(names)]))
    by_name = dict(zip(names, losses, strict=True))
    weight = by_name["weight"]
    means = [by_name[x] for x in VALIDATED if x in by_name]
    return [*(x / tf.maximum(weight, SMALLEST_WEIGHT) for x in means), weight]

  def _find_slices(self, pod: int) -> dict[str, list[Slice]]:
    slices = {}
    for stage in range(self._num_stages):
      slices |= self._find_slices_of(pod, stage)
    return slices

  def _find_slices_of(self, pod: int, stage: int) -> dict[str, list[Slice]]:
    made, hosts = self._pod_step, self._devices.hosts_of(pod, stage)
    slices = {}
    for array in made.arrays_in(stage):
      variable = made.variables[array]
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
          key = [self._devices.name_pod(pod, stage), self._text, *of_device]
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
    num_periods = self._pod_step.update.num_periods
    return {
      name: x if num_periods(name) else tf.squeeze(x, -1)
      for name, x in by_name.items()
    }

  def _order_squares(self, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns gradients' sums of squares in the order of `_parameters`."""
    by_name = {}
    for i, array in enumerate(self._pod_step.parameters):
      names = self._pod_step.names_of(array)
      of_array = tf.unstack(tf.reshape(values[f"squares/{i}"], [len(names)]))
      by_name |= zip(names, of_array, strict=True)
    return tf.stack([by_name[x] for x in self._parameters])

  def _make_metrics(
    self, values: Mapping[str, tf.Tensor], learning_rate: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    made = self._pod_step
    sums = []
    for each in made.update.sums_of_squares:
      value = values[f"{each.of}_squares/{each.variable}"]
      num_periods = len(made.names_of(each.variable))
      if made.model.is_stacked(each.variable):
        is_state = parse_name(each.variable).is_state
        value = (tf.reduce_max if is_state else tf.reduce_sum)(value, -1)
      sums.append(each._replace(value=value, size=each.size * num_periods))
    return make_metrics(
      {name: values[name] for name in made.update.losses}, sums, learning_rate
    )
