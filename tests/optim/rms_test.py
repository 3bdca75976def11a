# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of squares become root mean squares by kind of layer."""

import collections

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.config.parameter_names import parsed
from palm_mtf.optim.rms import SumOfSquares, rms_by_kind
from tests.mtf_testing import small_config


@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_every_parameter_is_of_one_of_four_kinds(block):
  config = small_config(num_layers=2, block=block)
  counts = collections.Counter(
    parsed(name).kind for name in parameter_shapes(config)
  )
  norms = {"parallel": 3, "serial": 5}[block]
  assert counts == {"embedding": 1, "norm": norms, "attention": 8, "mlp": 6}


def test_the_root_is_of_the_mean_over_all_numbers_of_a_kind():
  rng = np.random.default_rng(0)
  values = {
    ("update", "layer_000/mlp/wi"): rng.standard_normal(30),
    ("update", "layer_001/mlp/wo"): 5 * rng.standard_normal(3),
    ("parameter", "layer_001/mlp/wo"): rng.standard_normal(3),
  }
  with tf.Graph().as_default(), tf.Session() as session:
    sums = [
      SumOfSquares(of, name, x.size, tf.constant((x**2).sum(), tf.float32))
      for (of, name), x in values.items()
    ]
    found = session.run(rms_by_kind(sums))
  first, second, third = values.values()
  whole = np.concatenate([first, second])
  assert found == pytest.approx(
    {
      "update_rms/mlp": np.sqrt(np.mean(whole**2)),
      "parameter_rms/mlp": np.sqrt(np.mean(third**2)),
    }
  )


def test_what_is_not_measured_is_left_out():
  assert rms_by_kind([]) == {}
