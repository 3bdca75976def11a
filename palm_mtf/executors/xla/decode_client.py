# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client's programs for decoding, which call decode_arrays.py in hosts."""

from collections.abc import Callable

from palm_mtf._tf import tf
from palm_mtf.executors.xla import decode_arrays
from palm_mtf.executors.xla.client_calls import (
  DeviceArray,
  after_all,
  make_slice,
)
from palm_mtf.executors.xla.devices import AcceleratorDevices
from palm_mtf.executors.xla.host_calls import call_pod, name_of
from palm_mtf.executors.xla.stacked_weights import StackedWeights
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.generation.decode.functions import DecodeFunction
from palm_mtf.generation.decode.weights import DecodeSettings, LayerWeights
from palm_mtf.json_text import dataclass_text, named_text
from palm_mtf.mesh.slices import Slice, regions_of
from palm_mtf.runtime.program import Program


class PodDecoder:
  """Weights and programs for decoding, which uses only the first pod."""

  def __init__(self, settings: DecodeSettings, devices: AcceleratorDevices):
    """Finds names and shapes of the weights that `settings` describe."""
    self._devices, self._text = devices, dataclass_text(settings)
    self._hosts, self._pod = devices.hosts[0], devices.name_pod(0)
    self._num_layers = settings.model.num_layers
    # Any platform will do, because only names and shapes of weights are read.
    placement = XlaPlacement(settings.mesh_layout, "cpu")
    self._weights = StackedWeights(settings, placement)

  def make_layers(self) -> list[LayerWeights]:
    """Returns the weights to load for each layer.

    Load one layer after another: a host makes a layer's decoding weights, then
    frees its float32 parameters. Adds operations to the current tf.Graph.
    """
    make = decode_arrays.make_layer
    return [
      LayerWeights(
        {name: self._make_slices(name) for name in self._weights.names_of(x)},
        tf.group(self._call(make, decode_arrays.OUTSIDE if x is None else x)),
      )
      for x in (None, *range(self._num_layers))
    ]

  def build(self, function: DecodeFunction, state: str) -> Program:
    """Builds the program that runs `function` in all hosts.

    `state` names the arrays, such as the cache, that hosts keep between calls.
    """
    with tf.device(self._devices.client):
      inputs = {
        name: tf.placeholder(x.dtype, x.shape, name)
        for name, x in function.input_specs().items()
      }
    dtypes = function.output_dtypes()
    found = self._call(
      decode_arrays.run_function,
      *(named_text(function), state, *inputs.values()),
      dtypes=dtypes.values(),
    )
    with tf.device(self._devices.client):
      _, *outputs = after_all(found)
    return Program(
      inputs,
      dict(zip(dtypes, outputs, strict=True)),
      operations=[x.op for x, *_ in found],
    )

  def _call(self, function: Callable, *inputs: object, dtypes=()):
    """Calls a function in each host; returns their results."""
    inputs = [name_of(function), self._pod, self._text, *inputs]
    return [x.call(call_pod, inputs, [tf.int32, *dtypes]) for x in self._hosts]

  def _make_slices(self, name: str) -> list[Slice]:
    """Returns a parameter's slices, one per device, for loading its value."""
    variable = self._weights.find_variable(name)
    placement = self._weights.placement
    shape = tf.TensorShape(placement.slice_shape(variable.shape))
    slices = []
    for number, region in enumerate(regions_of(variable, placement)):
      process = self._hosts[self._devices.places[number]]
      key = [self._pod, self._text, name, number]
      held = DeviceArray(
        process, key, shape, tf.float32, decode_arrays.assign_slice
      )
      slices.append(make_slice(region, [name], held))
    return slices
