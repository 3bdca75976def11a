# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a device keeps: the built program, the closed form, the paper."""

import collections
import dataclasses
import math

import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.memory import device_bytes, parameter_slices
from palm_mtf.accounting.params import count_norm_scales, count_parameters
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.programs.train_program import build_train_program
from tests.accounting.published_sizes import PALM_540B
from tests.mtf_testing import LAYOUTS, PALM_OPTIMIZER, mesh_layout, small_config

QUICK = ("batch over data", "padded vocab over three", "PaLM's 2D")


@pytest.mark.parametrize(
  "layout",
  [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in LAYOUTS
  ],
)
def test_the_built_program_keeps_the_bytes_of_the_closed_form(layout):
  config = small_config(num_layers=1)
  mesh = mesh_layout(layout, num_microbatches=2)
  with tf.Graph().as_default() as graph:
    build_train_program(config, mesh, PALM_OPTIMIZER, batch_size=8, seed=0)
    kept = collections.defaultdict(collections.Counter)
    for each in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
      name = each.op.name
      kind = "weights"
      if "/second_moment/" in name or "/momentum/" in name:
        kind = "slots"
      elif "_sum/" in name:
        kind = "gradients" if "/gradient_sum/" in name else "losses"
      size = each.dtype.size * math.prod(each.shape.as_list())
      kept[each.device][kind] += size
  expected = device_bytes(config, mesh, PALM_OPTIMIZER)
  assert len(kept) == mesh.num_devices
  for device, found in kept.items():
    del found["losses"]
    assert dict(found) == dataclasses.asdict(expected), device


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_fully_sharded_over_n_devices_each_keeps_an_nth(num_devices):
  config = small_config()
  whole, split = (
    device_bytes(
      config,
      MeshLayout(
        mesh_shape=f"data:{num_devices}", layout=layout, num_microbatches=2
      ),
      PALM_OPTIMIZER,
    )
    for layout in ("batch:data", "batch:data,d_model_stored:data")
  )
  numbers = count_parameters(config) + count_norm_scales(config)
  assert (whole.weights, whole.slots) == (4 * numbers, 8 * numbers)
  assert whole.gradients == 4 * numbers
  assert split.weights * num_devices == whole.weights
  assert split.slots * num_devices == whole.slots
  assert split.gradients * num_devices == whole.gradients


def test_palm_540b_over_256_by_12_keeps_what_its_3072_chips_had():
  """175.9M parameters a chip, and what all 12 chips of `model` have alike.

  These are k and v of the one head, and the norm scales.
  """
  mesh = MeshLayout(
    mesh_shape="data:256,model:12",
    layout="batch:data,heads:model,d_ff:model,vocab:model,"
    "d_model_stored:data,d_model_residual:model",
  )
  numbers = sum(x.size for x in parameter_slices(PALM_540B, mesh).values())
  c = PALM_540B
  alike = 2 * c.num_layers * c.d_model * c.d_kv
  alike += (c.num_layers + 1) * c.d_model
  padding = 8 * c.d_model  # 256,008 rows
  parts = count_parameters(c) + count_norm_scales(c) - alike + padding
  assert numbers * 3072 == parts + 12 * alike
  assert numbers == pytest.approx(175.9e6 * 1.023, rel=1e-3)
