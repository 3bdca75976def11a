# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists the programs of a pipeline stage, to compile and to measure memory.

While a program runs, a stage also holds arrays that are no arguments of the
program. Each program is listed with the bytes of these arrays, because XLA's
memory analysis does not count them.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.stage_functions import StageStep
from palm_mtf.model.dropout import DROPOUT_STATE
from palm_mtf.steps.plan import num_kept


class StageProgram(NamedTuple):
  """A program of a stage, to compile without data."""

  name: str  # the name of the program in `StageStep`
  function: Any  # the jitted function
  given: Sequence[Any]  # shapes, dtypes and shardings of the arguments
  # Bytes per device of arrays that are no arguments or results of the program,
  # but are in memory while the program runs.
  kept: int
  times: int = 1  # how many times a step runs the program


def list_programs(
  step: StageStep, settings: StepSettings, *, exchanges: bool
) -> list[StageProgram]:
  """Returns a stage's programs.

  `exchanges` is whether there are several pods, which exchange gradients.
  """
  return _Stage(step, settings).list(exchanges=exchanges)


class _Stage:
  def __init__(self, step: StageStep, settings: StepSettings):
    self._step, self._layout = step, settings.mesh_layout
    self._programs: list[StageProgram] = []

  def list(self, *, exchanges: bool) -> list[StageProgram]:
    step = self._step
    state = step.abstract_state()
    variables = step.read(state)
    rows, times = step.rows, self._layout.num_microbatches
    dropout = self._everywhere([DROPOUT_STATE.size], jnp.int32)
    slots = device_bytes(state) - device_bytes(variables)
    given = variables, rows, dropout
    before = self._of_devices(step.abstract_stream()) if step.stage else None
    stream, kept = self._run(step.forward, *given, before)
    sums = self._run(functools.partial(step.zeros, False))
    of_head, head_sums = [], {}
    if not step.stage:
      head_sums = self._run(functools.partial(step.zeros, True))
    # The forward or backward pass returns or takes the activations of one of
    # the microbatches that the stage keeps, so do not count these twice.
    num_waiting = num_kept(step.stage, self._layout) - step.has_backward
    waiting = num_waiting * device_bytes(kept)
    own, others = device_bytes(sums), device_bytes(head_sums)
    self._add(
      "forward", (*given, before), slots + waiting + own + others, times
    )
    if not step.stage:
      rest = slots + waiting + device_bytes(kept) + own
      self._add("head", (*given, stream, head_sums), rest, times)
      _, of_head, _ = self._run(step.head, *given, stream, head_sums)
    if step.has_backward:
      arguments = *given, kept, of_head, stream, sums
      self._add("backward", arguments, slots + waiting + others, times)
    self._add_update(state, sums | head_sums, exchanges=exchanges)
    return self._programs

  def _add_update(self, state: Any, sums: Any, *, exchanges: bool) -> None:
    step, held = self._step, device_bytes(state)
    if exchanges:
      self._add("parts", (sums,), held)
      parts, _ = self._run(step.parts, sums)
      parts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
          x.shape, jnp.float32, sharding=x.sharding
        ),
        parts,
      )
      self._add("join", (parts,), held)
    else:
      self._add("total", (sums,), held)
    gradients = {x: state[x] for x in step.gradients}
    changed = step.select_changed(state)
    numbers = [self._everywhere([x], jnp.float32) for x in step.count_numbers()]
    rest = held - device_bytes(changed)
    self._add("measure", (changed, gradients, *numbers[:-1]), rest)
    self._add("update", (changed, gradients, *numbers), rest)

  def _add(
    self, name: str, given: Sequence[Any], kept: int, times: int = 1
  ) -> None:
    function = getattr(self._step, name)
    self._programs.append(StageProgram(name, function, given, kept, times))

  def _run(self, function: Any, *given: Any) -> Any:
    """Returns the shapes of a program's results, [devices, ...] each."""
    return self._of_devices(jax.eval_shape(function, *given))

  def _of_devices(self, x: Any) -> Any:
    mesh = self._step.mesh
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), x
    )

  def _everywhere(self, shape: Sequence[int], dtype: Any) -> Any:
    everywhere = NamedSharding(self._step.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)


def device_bytes(arrays: Any) -> int:
  """Returns the bytes per device of all arrays in a nested structure."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(arrays)
  )
