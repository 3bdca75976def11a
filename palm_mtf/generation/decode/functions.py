# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding functions, and programs that run them on TensorFlow's devices.

A function has no variables. It takes a model, the state (such as the cache)
that an earlier function returned, and inputs. It returns the next state, and
outputs. TensorFlow's devices keep the state in variables; accelerators
(executors/xla/decode_arrays.py) keep the state in JAX arrays.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import ClassVar

from palm_mtf._tf import tf
from palm_mtf.generation.decode.rows import State
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.ops.variables import make_variable
from palm_mtf.runtime.program import Program


class Effect(enum.Enum):
  """What a function does with the state, which is kept between calls."""

  MAKES = "makes"
  CHANGES = "changes"
  READS = "reads"


Inputs = Mapping[str, tf.Tensor]
Built = tuple[State, dict[str, tf.Tensor]]  # the next state, and outputs


@dataclasses.dataclass(frozen=True)
class DecodeFunction(abc.ABC):
  """A function that the devices of a mesh run together.

  Subclasses are frozen dataclasses. Each field is a JSON value, or a dataclass
  of JSON values, because the hosts of accelerators get the function as JSON.
  """

  effect: ClassVar[Effect]

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input; every device gets all inputs."""
    return {}

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    return {}

  @abc.abstractmethod
  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds the operations of a call; returns the next state, and outputs.

    `state` is [] if the function makes a state, or needs none. Outputs are the
    same on all devices.
    """


# Takes a function, and the name of the state that the function makes, changes
# or reads; returns the program that runs the function.
BuildProgram = Callable[[DecodeFunction, str], Program]


class LocalPrograms:
  """Builds a function's TensorFlow operations, with variables for the state."""

  def __init__(self, model: DecodeModel):
    self._model = model
    self._states: dict[str, State] = {}  # {state's name: its variables}

  def build(self, function: DecodeFunction, state: str) -> Program:
    """Builds the program of a function in the current tf.Graph.

    The graph must have the weights. A function that changes or reads a state
    shares the variables of the last built function that makes this state.
    """
    inputs = {
      name: tf.placeholder(x.dtype, x.shape, name)
      for name, x in function.input_specs().items()
    }
    on_each_device = self._model.placement.slicewise
    makes = function.effect is Effect.MAKES
    variables = [] if makes else self._states.get(state, [])
    before = [on_each_device(lambda v: v.read_value(), x) for x in variables]
    after, outputs = function(self._model, before, inputs)
    if makes:
      variables = self._states[state] = [
        on_each_device(
          lambda x: make_variable(tf.zeros(x.shape, x.dtype), "state"), each
        )
        for each in after
      ]
    assign = [
      variable.assign(value, read_value=False)
      for i, x in enumerate(after)
      if makes or x is not before[i]
      for variable, value in zip(
        variables[i].tensor_list, x.tensor_list, strict=True
      )
    ]
    return Program(inputs, outputs, operations=[tf.group(assign)])
