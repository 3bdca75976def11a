# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices of variables: the device of a slice, and its place in a checkpoint."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.variables import SlicedVariable


@dataclasses.dataclass(frozen=True)
class Region:
  """The region of a variable that one device holds."""

  begin: list[int]
  sizes: list[int]  # without the padding at the end
  # TensorFlow's shape-and-slice string, "8 4 0,4:0,4": sizes of the variable,
  # then begin,size of each dimension. "" if the region is the whole variable,
  # None if it is only padding, which no checkpoint holds.
  spec: str | None
  is_first: bool  # False if an earlier device of the mesh holds this region
  saved_dtype: tf.DType  # in checkpoints


@dataclasses.dataclass(frozen=True)
class Slice(Region):
  """A device's slice of a variable, or of a stack of one variable per layer."""

  names: Sequence[str]  # in a checkpoint; more than one only for a stack
  # The slice, in the stored dtype. Only accelerators have stacks; the first
  # dimension of a stack counts the variables in `names`.
  variable: tf.Variable
  # Device that checks and pads values from a checkpoint: the variable's device
  # or, for an accelerator, the CPU of its host.
  near: str
  # Whether the checkpoint holds `spec` once, without the slice's first
  # dimension, along which the slice has copies.
  is_copied: bool = False

  def renamed(self, names: Mapping[str, str]) -> "Slice":
    """Returns the slice by its names in another checkpoint.

    If the names differ, the checkpoint has what the first dimension copies.
    """
    held, spec = [names[x] for x in self.names], self.spec
    if held == [*self.names]:
      return self
    if spec:
      *sizes, region = spec.split(" ")
      spec = " ".join([*sizes[1:], region.partition(":")[2]])
    return dataclasses.replace(self, names=held, spec=spec, is_copied=True)

  def read(self) -> tf.Tensor:
    """Returns the value, padding included."""
    with tf.device(self.variable.device):
      return self.variable.value()

  def rows(self, value: tf.Tensor) -> list[tf.Tensor]:
    """Cuts a value of `variable` into one value for each of `names`."""
    return tf.unstack(value) if len(self.names) > 1 else [value]

  def stack_rows(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Stacks the values of `names` into a value of `variable`."""
    return tf.stack(values) if len(self.names) > 1 else values[0]


# For each pod, {name of a variable in checkpoints: the variable's slices, one
# per device}. All pods cut variables into the same slices.
Pods = Sequence[Mapping[str, Sequence[Slice]]]


def names_of(slices: Mapping[str, Sequence[Slice]]) -> list[str]:
  """Returns the names of all variables, in the order of `slices`."""
  return [name for parts in slices.values() for name in parts[0].names]


def variables_of(pods: Pods) -> list[tf.Variable]:
  """Returns the variables that hold the slices of all pods."""
  return [
    x.variable for slices in pods for parts in slices.values() for x in parts
  ]


def regions_of(
  variable: SlicedVariable, mesh_impl: mtf.MeshImpl
) -> Iterator[Region]:
  """Yields each device's region of `variable`, in the order of the mesh."""
  size = mesh_impl.slice_shape(variable.shape)
  seen = set()
  for pnum in range(mesh_impl.size):
    begin = mesh_impl.slice_begin(variable.shape, pnum)
    # A dimension is padded at its end, so the last slices may hold padding.
    held = [
      max(0, min(n, whole - first))
      for n, whole, first in zip(size, variable.sizes, begin, strict=True)
    ]
    spec = _slice_spec(variable.sizes, begin, held)
    yield Region(begin, held, spec, spec not in seen, variable.saved_dtype)
    seen.add(spec)


def _slice_spec(
  sizes: list[int], begin: list[int], held: list[int]
) -> str | None:
  if held == sizes:
    return ""
  if 0 in held:
    return None
  shape = " ".join(map(str, sizes))
  parts = ":".join(f"{b},{s}" for b, s in zip(begin, held, strict=True))
  return f"{shape} {parts}"


def pad_to(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
  """Pads x to shape `sizes`, with zeros at the end of each dimension."""
  more = [[0, n - had] for n, had in zip(sizes, x.shape, strict=True)]
  return tf.pad(x, more) if any(n for _, n in more) else x


def cpu_near(device: str) -> str:
  """Returns the CPU of a device's host; the device itself if it is a CPU."""
  task, _, name = device.rpartition("/device:")
  return device if name.startswith("cpu:") else f"{task}/device:cpu:0"


def cpu_of_process(device: str) -> str:
  """Returns the name of the first CPU of the process that has `device`."""
  task, _, _ = device.rpartition("/device:")
  return f"{task}/device:cpu:0"
