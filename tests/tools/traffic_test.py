# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""An operation's name says to which collective it belongs."""

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.placement import collective_scope
from tools.traffic import collective_of

SHAPE = mtf.Shape([mtf.Dimension("data", 2), mtf.Dimension("model", 3)])


def test_operations_of_a_collective_have_its_kind_and_axes():
  with tf.Graph().as_default(), tf.name_scope("layer_000/wi"):
    for axes, names in (([0, 1], ("data", "model")), ([1], ("model",))):
      for _ in range(2):  # the second scope has a number
        with (
          collective_scope("all_reduce", SHAPE, axes),
          tf.name_scope("parallel"),
        ):
          x = tf.constant(0)
        assert collective_of(x.op.name) == ("all_reduce", names)


def test_over_no_axis_there_is_none():
  with tf.Graph().as_default(), collective_scope("all_gather", SHAPE, []):
    assert collective_of(tf.constant(0).op.name) is None
  assert collective_of("layer_000/all_reduce") is None
