# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables on CPUs change in finite steps alone."""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.variables import Fill, sliced_variable
from tests import processes
from tests.mtf_testing import mesh_layout, placement

MESH = mesh_layout("all over data and model")
# Prints the bytes of 32 variables of zeros, and those that setting them takes.
# Each has 8 MB: up to 10 TensorFlow would make constants of them.
_ZEROS = """
from palm_mtf._tf import mtf, tf
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.variables import Fill, sliced_variable
from tests.mtf_testing import SINGLE, placement
shape = mtf.Shape([mtf.Dimension("d_model", 2**21)])
mesh = mtf.Mesh(mtf.Graph(), "mesh")
graph, config = tf.Graph(), session_config(1)
with graph.as_default(), tf.Session(config=config) as session:
  for name in map(str, range(32)):
    sliced_variable(mesh, name, shape, initializer=Fill(0.0))
  lowered = lower({mesh: placement(SINGLE)}, {})
  before = resident_bytes()
  session.run(lowered.initialize)
  print(32 * 4 * shape.size, largest_resident_bytes() - before)
"""


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
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(4)) as session,
  ):
    number = tf.placeholder(tf.float32, [])
    is_finite = tf.placeholder(tf.bool, [])
    variables = [
      sliced_variable(mesh, x, mtf.Shape([]), initializer=Fill(1.0)).operation
      for x in ("a", "b")
    ]
    imported = (mtf.import_tf_tensor(mesh, x) for x in (number, is_finite))
    assign = Assign(variables, *imported)
    lowered = lower({mesh: placement(MESH)}, {}, [assign])
    # One check a device, however many variables wait for it.
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


def test_variables_of_zeros_are_set_without_constants_beside_them():
  shown = processes.python("-c", _ZEROS)
  size, used = map(int, shown.stdout.split())
  assert used < 1.4 * size
