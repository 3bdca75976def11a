# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Invalid model functions are refused in one line."""

import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError
from palm_mtf.foreign_models import DeviceMesh, PodsConfig, PodTraining
from tests.foreign_models.training_test import OPTIMIZER
from tests.mtf_testing import relative_error

D = mtf.Dimension("d", 4)


def kernel(mesh, dtype=tf.float32, **settings):
  return mtf.get_variable(mesh, "kernel", mtf.Shape([D]), dtype, **settings)


def training(function, num_pods=1, features=(("x", ("float32", "d:4")),)):
  return PodTraining(
    function,
    dict(features),
    mesh=DeviceMesh(mesh_shape="", layout=""),
    optimizer=OPTIMIZER,
    global_batch_size=4,
    pods=PodsConfig(num_pods=num_pods),
  )


def no_loss(mesh, features):
  kernel(mesh)


def a_loss_for_each_row(mesh, features):
  return mtf.einsum([features["x"], kernel(mesh)], reduced_dims=[D])


def no_variable(mesh, features):
  return mtf.reduce_mean(features["x"])


def bfloat16_slices(mesh, features):
  x = mtf.cast(features["x"], tf.bfloat16)
  return mtf.reduce_mean(x * kernel(mesh, tf.bfloat16))


def an_unused_variable(mesh, features):
  mtf.get_variable(mesh, "unused", mtf.Shape([D]))
  return mtf.reduce_mean(features["x"] * kernel(mesh))


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (no_loss, "no_loss returns None: return the mean loss"),
    (
      a_loss_for_each_row,
      "a_loss_for_each_row returns a tensor [batch] of float32: return the",
    ),
    (no_variable, "makes no variable that is trained"),
    (bfloat16_slices, "variable kernel is kept in bfloat16"),
    (an_unused_variable, "does not depend on the variable unused"),
  ],
)
def test_a_function_without_a_loss_to_train_is_refused(function, message):
  with pytest.raises(UserError) as error, training(function):
    pass
  assert message in str(error.value)
  assert "\n" not in str(error.value)


def test_a_feature_of_another_form_is_refused():
  with pytest.raises(UserError, match="feature x = 'int32': give the dtype"):
    training(no_variable, features={"x": "int32"})


def weighted(mesh, features):
  """Returns a sum over rows, and the sum of their weights."""
  x, weights = features["x"], features["weights"]
  losses = mtf.square(mtf.einsum([x, kernel(mesh)], reduced_dims=[D]) - 1.0)
  return mtf.reduce_sum(losses * weights), mtf.reduce_sum(weights)


def test_rows_of_two_pods_count_by_their_weight():
  """The first pod's rows have weight 0; a mean of means would be half."""
  features = {"x": ("float32", "d:4"), "weights": ("float32", "")}
  x = [[i, 1, 2, 3] for i in range(4)]
  batch = {"x": x, "weights": [0, 0, 1, 3]}
  after = []
  for num_pods in (1, 2):
    with training(weighted, num_pods, features) as each:
      first = each.variables()["kernel"]
      losses = (x @ first - 1.0) ** 2
      assert each.step(batch)["loss"] == pytest.approx(
        (losses[2] + 3 * losses[3]) / 4, rel=1e-5
      )
      after.append(each.variables()["kernel"])
  assert relative_error(after[1], after[0]) < 1e-5
