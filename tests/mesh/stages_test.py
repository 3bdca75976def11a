# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A graph that is cut into calls computes what it computes in one call."""

import concurrent.futures

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.stages import StagesLowering, find_parts, send
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program
from tests.mtf_testing import LAYOUTS, MeshLayout

ROWS, COLUMNS = mtf.Dimension("batch", 4), mtf.Dimension("d_ff", 6)


class Cut:
  """x on mesh a -> y = sum over columns of x^2 -> z = y^3 on mesh b.

  Attributes:
    forward: program that computes y.
    middle: program that computes z, and the gradient of the sum of z by y.
    backward: program that computes the gradient by x.
  """

  def __init__(self, layout):
    shape, rules = layout
    mesh = MeshLayout(mesh_shape=shape, layout=rules, stages=2)
    graph = mtf.Graph()
    a, b = mtf.Mesh(graph, "a"), mtf.Mesh(graph, "b")
    self.x = tf.placeholder(tf.float32, [4, 6])
    x = mtf.import_tf_tensor(a, self.x, mtf.Shape([ROWS, COLUMNS]))
    y = mtf.reduce_sum(mtf.square(x), output_shape=mtf.Shape([ROWS]))
    z = send(y, b) * 1.0
    z = z * mtf.square(z)
    (dx,) = mtf.gradients([mtf.reduce_sum(z)], [x])
    parts = find_parts(graph.operations, {x.operation: 0})
    assert {parts[each.operation] for each in (x, y)} == {0}
    assert (parts[z.operation], parts[dx.operation]) == (1, 2)
    devices = local_devices(mesh.pod_devices)
    lowering = StagesLowering(
      {a: devices.placement(mesh, 0, 0), b: devices.placement(mesh, 0, 1)},
      parts,
    )
    values, _ = lowering.call({"z": z, "dx": dx})
    runs = [lowering.run_part(i) for i in range(3)]
    self.forward = Program({"x": self.x}, operations=[runs[0]])
    self.middle = Program({}, values["z"], [runs[1]])
    self.backward = Program({}, values["dx"], [runs[2]])
    self.config = session_config(mesh.pod_devices)


@pytest.fixture(params=["one device", "d_ff over model", "batch over data"])
def cut(request):
  """Yields a client of a cut graph; with d_ff split, a pending sum is sent."""
  layout = LAYOUTS.get(request.param, ("", ""))
  with tf.Graph().as_default() as graph:
    cut = Cut(layout)
    cut.client = Client(tf.Session(graph=graph, config=cut.config))
    with cut.client:
      yield cut


def inputs(seed):
  return np.random.default_rng(seed).normal(size=[4, 6]).astype(np.float32)


def test_calls_pass_activations_on_and_gradients_back(cut):
  first, second = inputs(1), inputs(2)
  cut.client.call(cut.forward, {"x": first})
  cut.client.call(cut.forward, {"x": second})  # before the first is taken
  for x in (first, second):
    y = (x**2).sum(1)
    z = cut.client.call(cut.middle)
    np.testing.assert_allclose(z, y**3, rtol=1e-5)
    dx = cut.client.call(cut.backward)
    np.testing.assert_allclose(dx, 6 * y[:, None] ** 2 * x, rtol=1e-5)


def test_a_call_may_start_before_the_tensors_that_it_takes_exist(cut):
  dx = cut.client.run(cut.backward)
  z = cut.client.run(cut.middle)
  with pytest.raises(concurrent.futures.TimeoutError):
    z.result(0.1)
  x = inputs(3)
  cut.client.call(cut.forward, {"x": x})
  np.testing.assert_allclose(z.result(), (x**2).sum(1) ** 3, rtol=1e-5)
  assert dx.result().shape == (4, 6)


def test_the_end_of_a_session_ends_calls_that_wait(cut):
  """A staging area would leave them blocked, in the threads of a server."""
  waiting = cut.client.run(cut.middle)
  with pytest.raises(concurrent.futures.TimeoutError):
    waiting.result(0.1)
  cut.client.close()
  # On a busy machine the call may begin only now; a closed session refuses it.
  with pytest.raises((tf.errors.CancelledError, RuntimeError)):
    waiting.result(60)
