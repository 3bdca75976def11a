# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of a decoding pod that one host holds: weights, states, functions.

The client's session calls the functions of this module in the processes of all
hosts of a pod (host_calls.py). `pod` is a `PodName` and `settings` is a
`DecodeSettings`, both as JSON. An array has a part for each device, [devices,
...], even if the parts of several devices are equal.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from palm_mtf._tf import tf
from palm_mtf.architecture.block import model_of
from palm_mtf.architecture.parameters import layer_name, parse_name
from palm_mtf.executors.xla.device_model import compile_function
from palm_mtf.executors.xla.device_store import (
  DeviceStore,
  PodDevices,
  open_store,
)
from palm_mtf.executors.xla.devices import find_devices, lowering_platform
from palm_mtf.executors.xla.host_calls import pod_function
from palm_mtf.executors.xla.layer_loops import find_place
from palm_mtf.executors.xla.parts import export_function
from palm_mtf.executors.xla.scanned_model import Arrays
from palm_mtf.executors.xla.stacked_weights import StackedWeights
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.generation.decode.functions import DecodeFunction, Effect
from palm_mtf.generation.decode.generate_program import (
  AdvanceTexts,
  ReadTexts,
  StartTexts,
)
from palm_mtf.generation.decode.score_program import ScoreRows
from palm_mtf.generation.decode.slot_program import (
  InsertPrompts,
  MakeSlots,
  StepSlots,
)
from palm_mtf.generation.decode.teacher_program import TeachRows
from palm_mtf.generation.decode.weights import DecodeSettings
from palm_mtf.json_text import read_dataclass, read_named
from palm_mtf.ops.xla import xla_computation

_FUNCTIONS = (
  *(StartTexts, AdvanceTexts, ReadTexts),
  *(MakeSlots, InsertPrompts, StepSlots),
  *(ScoreRows, TeachRows),
)
_WEIGHTS = "weights"  # name of all weights in a `DeviceStore`
OUTSIDE = -1  # layer number of weights outside of all layers (embedding, ...)


class PodPrograms(PodDevices):
  """The programs of a decoding pod; JAX compiles each program once.

  Attributes:
    placement: builds the operations of one device.
    weights: makes decoding weights from parameters.
    get_function: takes a decoding function as text (`named_text`); returns
      the function of (weights, state, inputs) that JAX runs.
  """

  def __init__(
    self, settings: DecodeSettings, devices: Sequence[Any], platform: str
  ):
    """`platform` is JAX's name of the devices' kind: "cpu", "tpu" or "cuda"."""
    self.placement = XlaPlacement(settings.mesh_layout, platform)
    self.weights = StackedWeights(settings, self.placement)
    self._config = settings.model
    super().__init__(self.placement.make_mesh(devices))
    self.get_function = functools.cache(self._make_function)
    self._get_maker = functools.cache(self._make_maker)
    self._put_period = jax.jit(
      lambda stack, period, x: stack.at[:, period].set(x), donate_argnums=0
    )

  def add_layer(self, weights: Arrays, parameters: Arrays, layer: int) -> None:
    """Makes the weights of one layer, and puts them into `weights`.

    Args:
      weights: arrays to change, by name. An array stacks a weight of all
        periods, and has the weight's name in the first period.
      parameters: arrays of the layer's parameters, by their names.
      layer: number of the layer; OUTSIDE for weights outside of all layers.
    """
    if layer == OUTSIDE:
      weights |= self._get_maker(None)(parameters, [], {})[0]
      return
    loop, first, period = find_place(self.weights.loops, layer)
    layers = model_of(self._config).layers
    like = layers.index(layers[layer])  # like layers share the program
    made, _ = self._get_maker(like)(_rename(parameters, like), [], {})
    for name, x in _rename(made, first).items():
      if name not in weights:
        shape = (x.shape[0], loop.count, *x.shape[1:])
        zeros = functools.partial(jnp.zeros, shape, x.dtype)
        weights[name] = jax.jit(zeros, out_shardings=self.each_device)()
      weights[name] = self._put_period(weights[name], period, x)

  def _make_maker(self, layer: int | None) -> Callable:
    return self._compile(lambda x, *_: (self.weights.make(x, layer), {}))

  def abstract_weights(self) -> Arrays:
    """Returns shape, dtype and sharding per weight, to compile without data."""

    def make(layer: int | None, stack: Sequence[int]) -> Arrays:
      parameters = {
        name: self.of_parts(self.placement.slice_shape(x.shape), jnp.float32)
        for name, x in self.weights.variables.items()
        if parse_name(name).layer == layer
      }
      made, _ = jax.eval_shape(self._get_maker(layer), parameters, [], {})
      return {
        name: self.of_parts([*stack, *x.shape[1:]], x.dtype)
        for name, x in made.items()
      }

    weights = make(None, [])
    for loop in self.weights.loops:
      for layer in loop.layers:
        weights |= make(layer, [loop.count])
    return weights

  def abstract_state(self, function: str, weights: Arrays) -> list[jax.Array]:
    """Returns shape, dtype and sharding of a state, to compile without data.

    `function`, a result of `named_text`, makes the state: arrays that hosts
    keep between calls, such as the cache.
    """
    inputs = abstract_inputs(function)
    state, _ = jax.eval_shape(self.get_function(function), weights, [], inputs)
    return [self.of_parts(x.shape[1:], x.dtype) for x in state]

  def of_parts(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Describes an array with a part of this shape for each device."""
    whole = [len(self.devices), *shape]
    return jax.ShapeDtypeStruct(whole, dtype, sharding=self.each_device)

  def _make_function(self, text: str) -> Callable:
    function = read_function(text)

    def build(
      weights: dict[str, tf.Tensor], state: list[tf.Tensor], inputs: dict
    ):
      model = self.weights.make_model(weights)
      before = [self.placement.LaidOutTensor([x]) for x in state]
      after, outputs = function(model, before, inputs)
      if function.effect is Effect.READS:
        after = []
      return [x.one_slice for x in after], outputs

    return self._compile(build, function.effect is Effect.CHANGES)

  def _compile(self, build: Callable, donates: bool = False) -> Callable:
    """Returns JAX's function of (weights, state, inputs) that runs `build`.

    Args:
      build: takes a device's parts of `weights` and of `state`, and `inputs`.
        Returns the device's parts of new arrays (weights or the next state),
        and outputs. All devices have the same inputs and outputs.
      donates: whether the function may overwrite the memory of `state`.
    """
    placement = self.placement

    def build_on_device(index: tf.Tensor, *arrays):
      placement.begin(index)
      with xla_computation():
        return build(*arrays)

    def run(weights: Arrays, state: list, inputs: Arrays):
      own = jax.tree.map(lambda x: x[0], (weights, state))
      arrays = (placement.find_index(), *own, inputs)
      with placement.lock:
        exported = export_function(build_on_device, arrays, placement.platform)
      parts, outputs = exported.call(*arrays)
      return jax.tree.map(lambda x: x[jnp.newaxis], parts), outputs

    parts, everywhere = self.each_device.spec, PartitionSpec()
    takes, gives = (parts, parts, everywhere), (parts, everywhere)
    return compile_function(self.mesh, run, takes, gives, [1] * donates)


def _rename(arrays: Arrays, layer: int) -> Arrays:
  """Returns a layer's arrays under the names that they have in `layer`."""
  return {
    f"{layer_name(layer)}/{parse_name(name).part}": x
    for name, x in arrays.items()
  }


@functools.lru_cache(maxsize=64)
def read_function(text: str) -> DecodeFunction:
  """Parses a decoding function that the client sent (`named_text`)."""
  return read_named(_FUNCTIONS, text)


def abstract_inputs(function: str) -> Arrays:
  """Returns shape and dtype of each input of a decoding function, by name."""
  return {
    name: jax.ShapeDtypeStruct(x.shape.as_list(), x.dtype.as_numpy_dtype)
    for name, x in read_function(function).input_specs().items()
  }


@functools.lru_cache(maxsize=2)
def make_programs(settings: bytes, number: int, num_hosts: int) -> PodPrograms:
  """Returns a pod's programs; a cache saves later clients the compilation.

  `number` is the pod's number among the pods of this process.
  """
  read = read_dataclass(DecodeSettings, settings)
  devices = find_devices(read.mesh_layout, num_hosts, number)
  return PodPrograms(read, devices, lowering_platform(devices))


def _open(pod: bytes, settings: bytes) -> tuple[DeviceStore, PodPrograms]:
  return open_store(
    pod, lambda name: make_programs(settings, name.number, name.num_hosts)
  )


@pod_function
def assign_slice(
  pod: bytes, settings: bytes, name: bytes, device: np.int32, value: np.ndarray
) -> np.int32:
  """Keeps the slice of a parameter until `make_layer` reads it; returns 0.

  `name` is the parameter's name in checkpoints, `device` the number in the mesh
  of a device of this host, and `value` the device's slice, float32.
  """
  held, programs = _open(pod, settings)
  whole = programs.of_parts(value.shape, value.dtype)
  held.assign(programs, name.decode(), whole, int(device), value)
  return np.int32(0)


@pod_function
def make_layer(pod: bytes, settings: bytes, layer: np.int32) -> np.int32:
  """Makes a layer's weights from its parameters, then frees the parameters.

  `layer` is the number of the layer, or OUTSIDE.
  """
  held, programs = _open(pod, settings)
  parameters, held.arrays = held.arrays, {}
  weights = held.values.setdefault(_WEIGHTS, {})
  programs.add_layer(weights, parameters, int(layer))
  return np.int32(0)


@pod_function
def run_function(
  pod: bytes,
  settings: bytes,
  function: bytes,
  state: bytes,
  *inputs: np.ndarray,
) -> tuple[np.ndarray, ...]:
  """Runs a decoding function.

  Args:
    function: result of `named_text`.
    state: name of the arrays, such as the cache, that the host keeps between
      calls, and that the function makes, changes or reads.
    *inputs: the function's inputs, in the order of `input_specs`.

  Returns:
    0, which the client fetches to wait for this host; then the outputs, in the
    order of `output_dtypes`.
  """
  (held, programs), text = _open(pod, settings), function.decode()
  made, run = read_function(text), programs.get_function(text)
  if made.effect is Effect.MAKES:
    held.values.pop(state, None)  # free the old state before making the new
  before = held.values.get(state, [])
  by_name = dict(zip(made.input_specs(), inputs, strict=True))
  after, outputs = run(held.values[_WEIGHTS], before, by_name)
  if made.effect is not Effect.READS:
    held.values[state] = after
  names = made.output_dtypes()
  found = [np.asarray(outputs[x].addressable_data(0)) for x in names]
  return np.int32(0), *found
