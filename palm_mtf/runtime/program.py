# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs: parts of a TensorFlow graph; a client runs each in one call."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.errors import UserError, did_you_mean


def state_of(variables: Iterable[tf.Variable]) -> frozenset[str]:
  """Returns the names of variables' states, for `Program.reads` and `writes`.

  All variables of a device are one state, because programs that use the same
  device gain little from running at the same time.
  """
  return frozenset(f"variables on {x.device}" for x in variables)


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, as a key
class Program:
  """A part of a graph that a client runs in one call.

  Calls of programs that share state run in the order in which they were made,
  unless both only read the state. Other calls may run at the same time.
  """

  # Placeholders that every call feeds, by name.
  inputs: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)
  # What a call returns: a tensor, or nested lists and dicts of tensors.
  outputs: Any = ()
  operations: Sequence[tf.Operation] = ()  # further operations that a call runs
  # Names of the state that the program reads or changes (`state_of`). The names
  # decide which calls must wait for each other.
  reads: frozenset[str] = frozenset()
  writes: frozenset[str] = frozenset()
  # {TensorFlow's name of a device that a call uses: bytes of the buffers that
  # the call makes there}. The scheduler reserves them until `Client.free`. If
  # empty, a call uses all devices and makes no buffers.
  device_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def conflicts_with(self, other: "Program") -> bool:
    """Returns whether the order of two calls changes their results."""
    return bool(
      self.writes & (other.reads | other.writes) or self.reads & other.writes
    )

  def order_inputs(self, values: Mapping[str, object]) -> list[object]:
    """Returns values in the order of `inputs`; UserError if names differ."""
    for name in values:
      if name not in self.inputs:
        raise UserError(
          f'the program has no input "{name}"{did_you_mean(name, self.inputs)}.'
        )
    for name in self.inputs:
      if name not in values:
        raise UserError(f'the program needs its input "{name}": give it.')
    return [values[name] for name in self.inputs]
