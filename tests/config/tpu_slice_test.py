# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices of TPUs have the chips of their names, and a mesh has to fit."""

import pytest

from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.config.mesh_layout import MeshLayout, check_layout
from palm_mtf.config.tpu_slice import check_pods, tpu_slice
from tests.mtf_testing import small_config
from tests.refusals import message_of


@pytest.mark.parametrize(
  ("name", "devices", "hosts"),
  [
    ("v2-8", 8, 1),
    ("v3-8", 8, 1),
    ("v3-32", 32, 4),
    ("v4-8", 4, 1),
    ("v4-128", 64, 16),
    ("v4-12x16x16", 3072, 768),  # facts of PaLM's pod: 3,072 chips, 768 hosts
    # Rows of the tables on Google's pages; v6e in VMs, which are its hosts.
    ("v5p-128", 64, 16),
    ("v5p-16x16x24", 6144, 1536),
    ("v6e-4", 4, 1),
    ("v6e-8", 8, 1),
    ("v6e-16", 16, 4),
    ("v6e-256", 256, 64),
  ],
)
def test_a_slice_has_the_devices_and_hosts_of_its_name(name, devices, hosts):
  where = tpu_slice(name)
  assert (where.num_devices, where.num_hosts) == (devices, hosts)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: tpu_slice("v3-16"),
      'TPU = "v3-16": no such slice (did you mean "v4-16"?). Name a slice by '
      'its cores, as in "v3-8" or "v4-128", or a v4 or v5p slice by its chips, '
      'as in "v4-4x4x8".',
    ),
    (
      lambda: tpu_slice("v4-3x4x4"),
      'TPU = "v4-3x4x4": a host has 2 x 2 x 1 chips, so x and y must be even '
      'numbers, as in "v4-4x4x8".',
    ),
    (
      lambda: tpu_slice("v5p-4x3x4"),
      'TPU = "v5p-4x3x4": a host has 2 x 2 x 1 chips, so x and y must be even '
      'numbers, as in "v5p-4x4x8".',
    ),
    (
      lambda: MeshLayout(mesh_shape="data:4", layout="batch:data", tpu="v3-8"),
      'TPU = "v3-8" has 2 x 2 x 1 chips x 2 = 8 devices, but MESH_SHAPE = '
      '"data:4" has 4; give the mesh as many.',
    ),
    *[
      (
        lambda value=value: DeviceMesh(mesh_shape="", layout="", tpu=value),
        f'TPU = {value!r}: give the name of a slice, such as "v3-8", or "" for '
        "none.",
      )
      for value in (None, 0, 8, ())
    ],
    (
      lambda: tpu_slice("v4-\u0668"),  # eight in Arabic-Indic digits
      'TPU = "v4-\u0668": no such slice (did you mean "v4-8"?). Name a slice '
      'by its cores, as in "v3-8" or "v4-128", or a v4 or v5p slice by its '
      'chips, as in "v4-4x4x8".',
    ),
    (
      lambda: MeshLayout(mesh_shape="", layout="", steps_per_loop=9),
      'STEPS_PER_LOOP = 9 and TPU = "": only TPUs do several steps in a call; '
      "set STEPS_PER_LOOP = 1.",
    ),
    (
      lambda: check_layout(
        MeshLayout(
          mesh_shape="data:4", layout="batch:data", tpu="v4-8", steps_per_loop=9
        ),
        small_config(),
        8,
        num_pods=2,
      ),
      "STEPS_PER_LOOP = 9 and NUM_PODS = 2: pods exchange gradients after each "
      "step; set STEPS_PER_LOOP = 1.",
    ),
    (
      lambda: check_pods(tpu_slice("v4-8"), PodsConfig(num_pods=2)),
      'TPU = "v4-8" has 1 host, PODS = "in_process" and NUM_PODS = 2: a pod in '
      "process is one host's TPUs, and there is one; for others start "
      '`palm_mtf pods serve` on each host and set PODS = "cluster".',
    ),
    (
      lambda: check_pods(
        tpu_slice("v4-16"), PodsConfig(pods="cluster", islands=[["a:1"]])
      ),
      'TPU = "v4-16" has 2 hosts, and ISLANDS gives pod 0 1; list the server '
      "of each host, in the order of its workers.",
    ),
  ],
)
def test_what_does_not_fit_is_told_with_the_rule_and_the_fix(make, message):
  assert message_of(make) == message
