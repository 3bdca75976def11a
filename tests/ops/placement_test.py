# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Both executors implement the protocol of placements.

mypy cannot compare them, because the base classes, Mesh TensorFlow's, have no
types. mypy checks the callers, which may use no other members.
"""

import inspect

import pytest

from palm_mtf.config import MeshLayout
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.ops.placement import Placement
from tests.mtf_testing import placement

LAYOUT = "batch:data,heads:model"
MESH = MeshLayout(mesh_shape="data:2,model:2", layout=LAYOUT, tpu="")


@pytest.mark.parametrize("made", [placement(MESH), XlaPlacement(MESH, "cpu")])
def test_a_placement_has_the_members_and_arguments_of_the_protocol(made):
  assert isinstance(made, Placement)
  for name, method in inspect.getmembers(Placement, inspect.isfunction):
    if not name.startswith("_"):
      _, *arguments = inspect.signature(method).parameters.values()
      inspect.signature(getattr(made, name)).bind(*arguments)
