# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Copies for a device equal the operations that a call would have made."""

import collections
import hashlib

import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import MeshLayout
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement, local_devices
from palm_mtf.programs.train_program import build_train_program
from tests.mtf_testing import mesh_layout, small_config
from tests.settings import step_config

# Attributes of names, and of how TensorFlow made an operation.
NO_PART_OF_WHAT_IS_DONE = {"shared_name", "_has_manual_control_dependencies"}


def text_of(node: object, name: str) -> str:
  """Returns an attribute as text, without names of a condition's branches."""
  value = node.attr[name]
  is_branch = value.HasField("func") and node.op != "PartitionedCall"
  return "" if is_branch else str(value)


def operations_of(remat: str) -> collections.Counter:
  """Returns how often each operation is in a program.

  Operations differ in their work, device, inputs, dependencies and shapes.
  """
  # Weights sharded over data, products over model; padding and microbatches.
  mesh = mesh_layout("PaLM's 2D", num_microbatches=2)
  config = step_config(small_config(remat=remat), mesh)
  with tf.Graph().as_default() as graph:
    build_train_program(config, batch_size=8, seed=0)
  digests: dict[str, str] = {}
  for op in graph.get_operations():
    node = op.node_def
    names = sorted(set(node.attr) - NO_PART_OF_WHAT_IS_DONE)
    attributes = [(name, text_of(node, name)) for name in names]
    inputs = [(digests[x.op.name], x.value_index) for x in op.inputs]
    waits = sorted(digests[each.name] for each in op.control_inputs)
    shapes = [str(x.shape) for x in op.outputs]
    what = (node.op, node.device, attributes, inputs, waits, shapes)
    digests[op.name] = hashlib.sha256(repr(what).encode()).hexdigest()
  return collections.Counter(digests.values())


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_what_is_copied_for_a_device_is_what_a_call_would_have_made(
  monkeypatch, remat
):
  copied = operations_of(remat)
  theirs = mtf.placement_mesh_impl.PlacementMeshImpl.slicewise
  monkeypatch.setattr(CpuGpuPlacement, "slicewise", theirs)
  assert copied == operations_of(remat)
  assert sum(copied.values()) > 5_000


def four_devices() -> CpuGpuPlacement:
  mesh = MeshLayout(mesh_shape="data:4", layout="batch:data")
  return local_devices(4).placement(mesh, 0)


def test_numbers_that_differ_between_devices_are_not_copied():
  placement = four_devices()
  with (
    tf.Graph().as_default(),
    tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session,
  ):
    numbers = placement.LaidOutTensor([1, 2, 3, 4])
    made = placement.slicewise(lambda x: tf.constant(x), numbers)
    assert session.run(made.tensor_list) == [1, 2, 3, 4]


def test_an_argument_that_is_given_back_is_each_device_s_own():
  placement = four_devices()
  with tf.Graph().as_default():
    parts = [tf.constant(i) for i in range(4)]
    x = placement.LaidOutTensor(parts)
    same, none = placement.slicewise(lambda x: (x, None), x)
  assert same.tensor_list == parts
  assert none.tensor_list == [None] * 4


def test_what_waits_for_a_slice_waits_for_each_device_s_own():
  placement = four_devices()

  def after(x, signal):
    with tf.control_dependencies([signal]):
      return tf.identity(x)

  with tf.Graph().as_default():
    parts = ([tf.constant(i) for i in range(4)] for _ in range(2))
    x, signal = map(placement.LaidOutTensor, parts)
    made = placement.slicewise(after, x, signal)
  for each, then in zip(made.tensor_list, signal.tensor_list, strict=True):
    assert each.op.control_inputs == [then.op]
