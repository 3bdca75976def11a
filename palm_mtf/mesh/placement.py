# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A mesh of devices, each named, that holds its slices of every variable.

`Devices` names all of them, of the client and of each pod. `SlicePlacement` is
Mesh TensorFlow's `PlacementMeshImpl` for CPUs and GPUs, but its variables
(variables.py) have no master: a slice is made and initialized where it lives. A
slice that several devices repeat is saved once, from the first of them.
"""

import dataclasses
import os
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.layout import MeshLayout
from palm_mtf.variables import SlicedVariable


@dataclasses.dataclass(frozen=True)
class Devices:
  """TensorFlow's names of the devices of a program.

  Attributes:
    client: the CPU of the process that feeds, fetches, and reads files.
    pods: of each pod, in the order of its mesh.
  """

  client: str
  pods: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Slice:
  """One device's part of a variable.

  Attributes:
    variable: the tf.Variable, of the dtype that is stored.
    spec: TensorFlow's shape-and-slice text, "8 4 0,4:0,4": the whole shape,
      then begin,size of each dimension; "" when the slice is the whole.
    is_first: False when an earlier device holds the same part.
  """

  variable: tf.Variable
  spec: str
  is_first: bool


class SlicePlacement(mtf.placement_mesh_impl.PlacementMeshImpl):
  """Places one slice of everything on each device.

  Attributes:
    host: the CPU beside the first device: what it is fed from.
  """

  def __init__(self, mesh: MeshLayout, devices: Sequence[str]):
    """Lays tensors out by the rules of `mesh` over `devices`, in mesh order."""
    shape = mtf.Shape([mtf.Dimension(*axis) for axis in mesh.axes.items()])
    super().__init__(shape, list(mesh.rules.items()), list(devices))
    self.host = _host_of(devices[0])

  class LaidOutVariable:
    """The slices of one SlicedVariable; Mesh TensorFlow looks for this name."""

    def __init__(self, variable: SlicedVariable, mesh_impl: "SlicePlacement"):
      shape = variable.shape
      full_shape = shape.to_integer_list
      size = mesh_impl.slice_shape(shape)
      self.slices: list[Slice] = []
      seen = set()
      for pnum, device in enumerate(mesh_impl.devices):
        begin = mesh_impl.slice_begin(shape, pnum)
        is_whole = size == full_shape
        spec = "" if is_whole else _slice_spec(full_shape, begin, size)
        with tf.device(device):
          value = variable.initializer.full_value(variable.name, full_shape)
          value = tf.cast(value, variable.slice_dtype)
          # Outside variable scopes: tf.Variable's name is only for people.
          part = tf.Variable(
            value if is_whole else tf.slice(value, begin, size),
            trainable=False,
            use_resource=True,
            name=f"{variable.name}/slice_{pnum}",
          )
        self.slices.append(Slice(part, spec, spec not in seen))
        seen.add(spec)
      self.laid_out_tensor = mesh_impl.LaidOutTensor(
        [part.variable for part in self.slices]
      )


def _slice_spec(full_shape, begin, size) -> str:
  shape = " ".join(map(str, full_shape))
  parts = ":".join(f"{b},{s}" for b, s in zip(begin, size, strict=True))
  return f"{shape} {parts}"


def _host_of(device: str) -> str:
  """Returns the CPU beside a device: itself, if it is one."""
  task, _, name = device.rpartition("/device:")
  return device if name.startswith("cpu:") else f"{task}/device:cpu:0"


def local_devices(num_devices: int, num_pods: int = 1) -> Devices:
  """Returns devices of this process for pods of `num_devices` each.

  GPUs where there are enough of them, else virtual CPU devices, of which
  `session_config` makes as many.
  """
  gpus = len(tf.config.list_physical_devices("GPU"))
  kind = "gpu" if gpus >= num_devices * num_pods else "cpu"
  names = [f"/device:{kind}:{i}" for i in range(num_devices * num_pods)]
  return Devices(
    client="/device:cpu:0",
    pods=[
      names[i : i + num_devices] for i in range(0, len(names), num_devices)
    ],
  )


def session_config(num_devices: int, num_pods: int = 1) -> tf.ConfigProto:
  """Returns a configuration with virtual CPU devices.

  The threads that share an operation's work are as many as the cores that a pod
  would have for itself, for the same bits as from pods in processes.

  TensorFlow's graph rewriting is off. It adds numbers up in another order where
  one of the sums on the way is fetched, which is so on one device but not on
  its copies: they would drift apart in the last bit. XLA and oneDNN do what it
  is for; without it a session starts sooner and needs less memory.

  Args:
    num_devices: in the mesh of a pod.
    num_pods: in this process.
  """
  config = tf.ConfigProto(
    device_count={"CPU": num_devices * num_pods}, allow_soft_placement=True
  )
  if num_pods > 1:
    cores = len(os.sched_getaffinity(0))
    config.intra_op_parallelism_threads = max(1, cores // num_pods)
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config
