# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""When stored weights are gathered; palm_test.py tests the results."""

import collections

import pytest

from palm_mtf._tf import tf
from palm_mtf.config import MeshLayout
from palm_mtf.mesh.cpu_gpu import ALL_GATHER
from palm_mtf.programs.train_program import build_train_program
from tests.cases import slow
from tests.mtf_testing import small_config
from tests.settings import step_config
from tools.traffic import collective_of

KERNELS = ("attention/q", "attention/k", "attention/o", "mlp/wi", "mlp/wo")


def ancestors(op, *, with_control):
  """Returns all operations before `op`, itself included."""
  seen, todo = {op}, [op]
  while todo:
    op = todo.pop()
    before = {x.op for x in op.inputs}
    if with_control:
      before |= set(op.control_inputs)
    todo += before - seen
    seen |= before
  return seen


def gathers_by_variable(program):
  """Returns the operations before each gather on device 0, by variable."""
  needed = ancestors(program.update.operations[0], with_control=True)
  gathers = collections.defaultdict(list)
  for op in needed:
    is_gather = op.type == "ConcatV2" and op.device.endswith("CPU:0")
    if is_gather and (collective_of(op.name) or [""])[0] == ALL_GATHER:
      (name,) = {
        parameter
        for each in ancestors(op, with_control=False)
        for parameter in program.parameters
        if f"/{parameter}/slice_" in f"/{each.name}"
        and each.type == "VarHandleOp"
      }
      gathers[name].append(ancestors(op, with_control=True))
  return gathers


# Slow: "attention" keeps less than "none" and more than "layer".
@pytest.mark.parametrize("remat", ["none", "layer", slow("attention")])
def test_a_kernel_is_gathered_when_it_is_used_and_again_on_the_way_back(remat):
  """Forward after all earlier layers, backward after the loss."""
  with tf.Graph().as_default():
    rules = "batch:data,d_model_stored:data"
    mesh = MeshLayout(mesh_shape="data:2", layout=rules)
    config = step_config(small_config(remat=remat), mesh)
    program = build_train_program(config, batch_size=4, seed=0)
    gathers = gathers_by_variable(program)
  targets = program.update.inputs["gradients[0]/copy_0/targets"].op
  for name in KERNELS:
    forward, backward = sorted(gathers[f"layer_001/{name}"], key=len)
    assert targets not in forward
    assert targets in backward
    names = {op.name for op in forward if op.type == "VarHandleOp"}
    assert any(x.startswith("layer_000/mlp/wo/") for x in names)
  uses = gathers["embedding"]
  assert [targets in each for each in uses] == [False, False]
