# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""First values of Mesh TensorFlow's variables depend only on seed and name."""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.foreign_models import DeviceMesh
from palm_mtf.foreign_models.training import read_whole
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.variables import adopt_variables
from palm_mtf.runtime.client.client import Client
from tests.mtf_testing import lower, placement

ROWS, COLUMNS = mtf.Dimension("rows", 40), mtf.Dimension("columns", 50)
INITIALIZERS = {
  "none": None,
  "a class": tf.ones_initializer,
  "normal": tf.random_normal_initializer(stddev=0.5),
  "another normal": tf.random_normal_initializer(stddev=0.5),
  "uniform": tf.random_uniform_initializer(-1.0, 3.0),
}


def first_values(seed=1, mesh_shape="", layout="", names=INITIALIZERS):
  """Returns the first values of a variable for each initializer, by name."""
  device_mesh = DeviceMesh(mesh_shape=mesh_shape, layout=layout)
  with tf.Graph().as_default():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with adopt_variables(mesh, seed), tf.variable_scope("outer"):
      for name in names:
        given = mesh, name.replace(" ", "_"), mtf.Shape([ROWS, COLUMNS])
        mtf.get_variable(*given, initializer=INITIALIZERS[name])
    lowered = lower({mesh: placement(device_mesh)}, {})
    config = session_config(device_mesh.num_devices)
    with tf.Session(config=config) as session:
      session.run(lowered.initialize)
      return read_whole(Client(session), lowered.slices[0])


@pytest.fixture(scope="module")
def values():
  return first_values()


def test_values_are_what_the_initializers_draw(values):
  assert list(values) == [f"outer/{x.replace(' ', '_')}" for x in INITIALIZERS]
  assert (values["outer/a_class"] == 1).all()
  # The mean of 2,000 numbers is within 4 standard errors.
  assert abs(values["outer/normal"].mean()) < 4 * 0.5 / 2000**0.5
  assert values["outer/normal"].std() == pytest.approx(0.5, rel=0.07)
  assert -1 <= values["outer/uniform"].min() < -0.98
  assert 2.98 < values["outer/uniform"].max() <= 3
  # Glorot: limit sqrt(6 / (rows + columns)).
  limit = (6 / 90) ** 0.5
  assert 0.98 * limit < np.abs(values["outer/none"]).max() <= limit


def test_other_names_and_seeds_draw_other_values(values):
  normal = values["outer/normal"]
  assert (normal != values["outer/another_normal"]).all()
  assert (normal != first_values(seed=2)["outer/normal"]).all()


@pytest.mark.parametrize(
  ("mesh_shape", "layout", "names"),
  [
    ("a:2,b:2", "rows:a,columns:b", INITIALIZERS),
    ("", "", ["uniform", "normal"]),
  ],
  ids=["split over four devices", "without the others, in another order"],
)
def test_layouts_and_other_variables_change_no_bit(
  mesh_shape, layout, names, values
):
  again = first_values(mesh_shape=mesh_shape, layout=layout, names=names)
  for name, value in again.items():
    np.testing.assert_array_equal(value, values[name], err_msg=name)
