# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables, devices and collectives of meshes of CPUs and GPUs."""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import MeshLayout
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.variables import Fill, SlicedVariable
from tests.mtf_testing import lower, mesh_layout, placement
from tests.refusals import message_of
from tools.traffic import traffic

MESH = mesh_layout("all over data and model")


class Assign(mtf.Operation):
  """Assigns a number to variables, in a finite step."""

  def __init__(self, variables, number, is_finite):
    super().__init__([number, is_finite], name="assign")
    self._variables = variables

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    number, is_finite = (lowering.tensors[x] for x in self.inputs)
    lowering.operations[self] = tf.group(
      [
        op
        for x in self._variables
        for op in impl.assign_if_finite(
          lowering.variables[x].laid_out_tensor, number, is_finite
        )
      ]
    )


def test_a_step_that_is_not_finite_raises_and_assigns_nothing():
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  with tf.Graph().as_default(), tf.Session(config=session_config(4)) as session:
    number = tf.placeholder(tf.float32, [])
    is_finite = tf.placeholder(tf.bool, [])
    variables = [
      SlicedVariable(mesh, x, mtf.Shape([]), initializer=Fill(1.0))
      for x in ("a", "b")
    ]
    imported = (mtf.import_tf_tensor(mesh, x) for x in (number, is_finite))
    assign = Assign(variables, *imported)
    lowered = lower({mesh: placement(MESH)}, {}, [assign])
    # One check per device, however many variables wait for it.
    types = [op.type for op in session.graph.get_operations()]
    assert types.count("Assert") == 4
    session.run(lowered.initialize)

    def values():
      (slices,) = lowered.slices
      return session.run([x.read() for parts in slices.values() for x in parts])

    with pytest.raises(tf.errors.InvalidArgumentError):
      session.run(lowered.operations, {number: 2.0, is_finite: False})
    np.testing.assert_equal(values(), [1.0] * 8)
    session.run(lowered.operations, {number: 2.0, is_finite: True})
    np.testing.assert_equal(values(), [2.0] * 8)


def with_gpus(monkeypatch, number):
  """Pretends that TensorFlow sees GPUs."""
  monkeypatch.setattr(
    tf.config, "list_physical_devices", lambda kind: [kind] * number
  )


@pytest.mark.parametrize(("gpus", "kind"), [(0, "cpu"), (8, "gpu")])
def test_gpus_are_used_in_order_and_without_any_devices_are_virtual(
  gpus, kind, monkeypatch
):
  with_gpus(monkeypatch, gpus)
  devices = local_devices(2, 2)
  assert devices.client == "/device:cpu:0"
  assert devices.pods == [
    [f"/device:{kind}:0", f"/device:{kind}:1"],
    [f"/device:{kind}:2", f"/device:{kind}:3"],
  ]


def test_fewer_gpus_than_devices_is_an_error_with_the_numbers(monkeypatch):
  with_gpus(monkeypatch, 3)
  assert message_of(local_devices, 2, 2) == (
    "MESH_SHAPE and NUM_PODS need 2 x 2 = 4 devices, and TensorFlow sees 3 "
    "GPUs here. Use at most 3, or set CUDA_VISIBLE_DEVICES=-1 for "
    "virtual devices on the CPU."
  )


DATA, MODEL = 0, 1
SHAPE = [6, 4, 2]


def scattered(mesh_shape, mesh_axis, split_axis):
  """Returns the devices' terms and results, [device, ...], and the traffic."""
  layout = ",".join(
    f"{'batch' if axis[0] == 'd' else 'heads'}:{axis.partition(':')[0]}"
    for axis in mesh_shape.split(",")
  )
  mesh = MeshLayout(mesh_shape=mesh_shape, layout=layout)
  rng = np.random.default_rng(0)
  terms = rng.standard_normal([mesh.num_devices, *SHAPE]).astype(np.float32)
  with tf.Graph().as_default():
    impl = placement(mesh)
    x = impl.slicewise(lambda i: tf.constant(terms)[i], impl.laid_out_pnum())
    parts = impl.reduce_scatter(x, mesh_axis, split_axis).tensor_list
    moved = traffic(parts)
    everywhere = impl.allreduce(x, [mesh_axis], "SUM").tensor_list
    moved_by_all_reduce = traffic(everywhere)
    with tf.Session(config=session_config(mesh.num_devices)) as session:
      return terms, session.run(parts), moved, moved_by_all_reduce


@pytest.mark.parametrize(
  ("mesh_shape", "mesh_axis", "split_axis"),
  [("data:2", DATA, 1), ("data:3", DATA, 0), ("data:2,model:4", MODEL, 1)],
)
def test_each_device_ends_with_its_part_of_the_sum(
  mesh_shape, mesh_axis, split_axis
):
  terms, parts, _, _ = scattered(mesh_shape, mesh_axis, split_axis)
  sizes = [int(axis.rpartition(":")[2]) for axis in mesh_shape.split(",")]
  places = np.arange(len(terms)).reshape(sizes)
  for group in np.moveaxis(places, mesh_axis, -1).reshape(-1, sizes[mesh_axis]):
    total = terms[group].astype(np.float64).sum(0)
    expected = np.split(total, len(group), split_axis)
    for device, value in zip(group, expected, strict=True):
      np.testing.assert_allclose(parts[device], value, rtol=1e-5, atol=1e-6)


def test_an_all_gather_joins_the_parts_of_a_group_in_order():
  mesh = MeshLayout(
    mesh_shape="data:2,model:3", layout="batch:data,heads:model"
  )
  parts = np.arange(6 * 4, dtype=np.float32).reshape([6, 2, 2])
  with tf.Graph().as_default():
    impl = placement(mesh)
    x = impl.LaidOutTensor([tf.constant(part) for part in parts])
    x = impl.slicewise(tf.identity, x)
    whole = impl.allconcat(x, MODEL, 1).tensor_list
    moved = traffic(whole)
    with tf.Session(config=session_config(6)) as session:
      found = session.run(whole)
  for first in (0, 3):
    joined = np.concatenate(parts[first : first + 3], 1)
    for device in range(first, first + 3):
      np.testing.assert_array_equal(found[device], joined)
  # 2 groups of 3 devices, each of which reads 2 parts of 16 bytes.
  assert moved == {("all_gather", ("model",)): 2 * 3 * 2 * 16}


def test_a_reduce_scatter_moves_half_of_what_an_all_reduce_does():
  _, _, moved, by_all_reduce = scattered("data:2,model:4", MODEL, 1)
  num_bytes = 2 * 3 * 4 * np.prod(SHAPE)  # 2 groups, 3 hops per part, float32
  assert moved == {("reduce_scatter", ("model",)): num_bytes}
  assert by_all_reduce == {("all_reduce", ("model",)): 2 * num_bytes}
