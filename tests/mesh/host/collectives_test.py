# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter and all-gather, and what is moved, counted in the graph."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.traffic import traffic
from tests.mtf_testing import placement

DATA, MODEL = 0, 1
SHAPE = [6, 4, 2]


def scattered(mesh_shape, mesh_axis, split_axis):
  """Returns what devices add, and hold then, [device, ...], and the traffic."""
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
  num_bytes = 2 * 3 * 4 * np.prod(SHAPE)  # 2 groups, 3 hops a part, float32
  assert moved == {("reduce_scatter", ("model",)): num_bytes}
  assert by_all_reduce == {("all_reduce", ("model",)): 2 * num_bytes}
