# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding functions, and programs that run them on TensorFlow's devices.

A function has no variables. It takes a model, the state that an earlier
function returned, and inputs. It returns the next state, and outputs.
TensorFlow's devices keep the state in variables; accelerators
(accelerators/decoder.py) keep it in arrays.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import ClassVar

from palm_mtf._tf import tf
from palm_mtf.generation.decode.rows import (
  State,
  assign_all,
  make_variables,
  read_all,
)
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.runtime.program import Program


class Effect(enum.Enum):
  """What a function does with the state."""

  MAKES = "makes"
  CHANGES = "changes"
  READS = "reads"


@dataclasses.dataclass(frozen=True)
class DecodeFunction(abc.ABC):
  """A function that the devices of a mesh run together.

  Subclasses are frozen dataclasses. Each field is a JSON value, or a dataclass
  of JSON values, so that `read_dataclass` can restore the function in a server.
  """

  effect: ClassVar[Effect]

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input; every device gets all inputs."""
    return {}

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    return {}

  @abc.abstractmethod
  def __call__(
    self, model: DecodeModel, state: State, inputs: Mapping[str, tf.Tensor]
  ) -> tuple[State, dict[str, tf.Tensor]]:
    """Builds the operations of a call.

    Args:
      model: weights.
      state: [] if the function makes a state, or needs none.
      inputs: values of `input_specs`.

    Returns:
      The next state; and outputs, which are the same on all devices.
    """


# Builds the program of a function, given the name of the function's state.
BuildProgram = Callable[[DecodeFunction, str], Program]


class LocalPrograms:
  """Builds programs of functions for the devices of TensorFlow."""

  def __init__(self, model: DecodeModel):
    """Takes the weights; all programs are built in the graph of the weights."""
    self._model = model
    self._states: dict[str, State] = {}  # variables, by the state's name

  def build(self, function: DecodeFunction, state: str) -> Program:
    """Builds the program of a function in the current tf.Graph.

    Args:
      function: the function.
      state: name of the state that the function makes, changes or reads. If the
        function changes or reads a state, it takes the state of the last built
        function that makes a state with this name.
    """
    inputs = {
      name: tf.placeholder(x.dtype, x.shape, name)
      for name, x in function.input_specs().items()
    }
    placement = self._model.placement
    variables = self._states.get(state, [])
    makes = function.effect is Effect.MAKES
    before = [] if makes else read_all(placement, variables)
    after, outputs = function(self._model, before, inputs)
    if makes:
      variables = self._states[state] = make_variables(placement, after)
      before = [None] * len(after)
    changed = [i for i, x in enumerate(after) if x is not before[i]]
    assign = assign_all(
      [variables[i] for i in changed], [after[i] for i in changed]
    )
    return Program(inputs, outputs, operations=[assign])
