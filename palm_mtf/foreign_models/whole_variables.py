# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole variables as arrays, from the slices of a pod's devices and back."""

from collections.abc import Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.mesh.slices import Slice

# A model function's variables have no padding: a dimension that an axis does
# not divide is refused.


def as_numbers(name: str, value: object, dtype: tf.DType) -> np.ndarray:
  """Returns numbers, or nested lists of them, as an array of another dtype.

  Args:
    name: what the numbers are, for messages.
    value: numbers, in an array of any library or in lists.
    dtype: dtype of the array that is returned. Floats are rounded to it.

  Raises:
    UserError: the value has no such form, or an int would change.
  """
  try:
    given = np.asarray(value)
  except ValueError:  # lists of unequal lengths
    given = np.array("")
  if given.dtype == dtype.as_numpy_dtype:
    return given
  if given.dtype.kind in "biuf":
    with np.errstate(invalid="ignore"):  # NaN as an int, which is refused
      found = given.astype(dtype.as_numpy_dtype)
    if dtype.is_floating or (found == given).all():
      return found
  raise UserError(
    f"{name}: give numbers that {dtype.name} holds, in an array or in lists of "
    "equal lengths."
  )


def read_whole(
  session: tf.Session, slices: Mapping[str, Sequence[Slice]]
) -> dict[str, np.ndarray]:
  """Returns the variables of a pod by name."""
  # Devices that hold the same region are read once.
  firsts = {
    name: [x for x in parts if x.is_first] for name, parts in slices.items()
  }
  read = session.run(
    {name: [x.read() for x in parts] for name, parts in firsts.items()}
  )
  whole = {}
  for name, parts in firsts.items():
    value = np.empty(_shape(parts), read[name][0].dtype)
    for part, region in zip(parts, read[name], strict=True):
      value[_indices(part)] = region
    whole[name] = value
  return whole


def write_whole(
  session: tf.Session,
  slices: Mapping[str, Sequence[Slice]],
  values: Mapping[str, np.ndarray],
) -> None:
  """Sets variables of a pod.

  Args:
    session: session of the pod.
    slices: slices of the pod's variables, by name.
    values: whole variables, by name.

  Raises:
    UserError: there is no such variable, it has another shape, or a value is
      no number.
  """
  feeds = {}
  for name, value in values.items():
    if name not in slices:
      raise UserError(
        f'there is no variable "{name}"{did_you_mean(name, slices)}.'
      )
    shape = _shape(slices[name])
    dtype = slices[name][0].variable.dtype.base_dtype
    value = as_numbers(f"variable {name}", value, dtype)
    if value.shape != shape:
      raise UserError(
        f"variable {name} is {list(shape)}, and {list(value.shape)} is given."
      )
    for part in slices[name]:
      # The operation that sets the first value, with another value.
      feeds[part.variable.initializer] = value[_indices(part)]
  session.run(list(feeds), {op.inputs[1]: x for op, x in feeds.items()})


def _shape(parts: Sequence[Slice]) -> tuple[int, ...]:
  """Returns the shape of a variable with these slices."""
  ends = [np.add(x.begin, x.sizes) for x in parts]
  return tuple(np.max(ends, axis=0).astype(int).tolist())


def _indices(part: Slice) -> tuple[slice, ...]:
  return tuple(
    slice(begin, begin + size)
    for begin, size in zip(part.begin, part.sizes, strict=True)
  )
