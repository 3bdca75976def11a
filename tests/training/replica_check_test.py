# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One changed number on one pod stops the run, with variable, pod and step."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import Slice
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.training.replica_check import ReplicaCheck, build_fingerprints
from palm_mtf.training.step import TrainStep
from tests import runs
from tests.mtf_testing import PALM_OPTIMIZER, mesh_layout, small_config


def plant(session, pod, name, index=0):
  """Changes the last bit of one number of a slice."""
  variable = pod.slices[name][index].variable
  value = session.run(variable.read_value())
  value.view(np.uint32).ravel()[-1] ^= 1
  variable.load(value, session)


@pytest.fixture(scope="module", params=[2, 3])
def watched(request):
  """Pods of two devices each, before any step."""
  pods = PodsConfig(num_pods=request.param)
  mesh = mesh_layout("d_ff over model")
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(2, pods.num_pods)) as session,
  ):
    program = build_train_program(
      small_config(num_layers=1),
      mesh,
      PALM_OPTIMIZER,
      batch_size=12,
      seed=0,
      pods=pods,
    )
    session.run(program.initialize)
    before = session.graph.num_operations()
    watch = ReplicaCheck(session, program, lambda: None)
    assert session.graph.num_operations() == before, "no first step waits"
    yield session, program, watch


def test_a_planted_change_is_named_and_taken_back_is_none(watched):
  session, program, watch = watched
  watch.check(0)
  name = "layer_000/mlp/wo/momentum"
  plant(session, program.pods[1], name, index=1)
  with pytest.raises(UserError) as error:
    watch.check(7)
  two = "pods 0 and 1"
  who = two if len(program.pods) == 2 else "pod 1 as on all others"
  assert str(error.value) == (
    f"{name} is not the same on {who} after step 7: a pod's memory, network or "
    "processor is at fault. Nothing of it is saved; go on without that pod's "
    "machine. There is no checkpoint yet."
  )
  plant(session, program.pods[1], "final_norm/scale")
  with pytest.raises(UserError, match="as are 1 other variables"):
    watch.check(8)
  plant(session, program.pods[1], "final_norm/scale")
  plant(session, program.pods[1], name, index=1)
  watch.check(9)


def test_a_run_stops_at_the_next_comparison_and_saves_nothing_since(
  corpus, tmp_path, capsys, monkeypatch
):
  made = TrainStep.__init__
  run = TrainStep.run

  def remember(self, session, program):
    self.planted_in = session, program.pods[1]
    made(self, session, program)

  def run_and_plant(self, batch, step, records):
    result = run(self, batch, step, records)
    if step == 4:
      plant(*self.planted_in, "embedding")
    return result

  monkeypatch.setattr(TrainStep, "__init__", remember)
  monkeypatch.setattr(TrainStep, "run", run_and_plant)
  macros = {"NUM_PODS": 2, "FINGERPRINT_STEPS": 3, "PROMPTS": []}
  assert runs.run("train", corpus, tmp_path, **macros) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert "is not the same on pods 0 and 1 after step 6" in error
  assert error.endswith("checkpoints/step_00000004.")
  found = [path.name for path in (tmp_path / "checkpoints").iterdir()]
  assert found == ["step_00000004"]


def fingerprints(*variables):
  """Returns the fingerprint of each variable, a list of slices."""
  with tf.Graph().as_default(), tf.Session(config=session_config(2)) as session:
    slices = {}
    for number, parts in enumerate(variables):
      slices[str(number)] = []
      for i, part in enumerate(parts):
        with tf.device(f"/device:cpu:{i}"):
          variable = tf.Variable(part, use_resource=True)
        slices[str(number)].append(
          Slice(
            begin=[0] * len(variable.shape),
            sizes=list(variable.shape),
            spec="",
            is_first=True,
            names=[str(number)],
            variable=variable,
            near=variable.device,
          )
        )
    result = build_fingerprints(slices)
    session.run(tf.global_variables_initializer())
    return session.run(result)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_holds(dtype):
  dtype, rng = tf.as_dtype(dtype).as_numpy_dtype, np.random.default_rng(0)
  parts = [rng.normal(size=[3, 5]).astype(dtype) for _ in range(2)]
  kind = {2: np.uint16, 4: np.uint32}[parts[0].itemsize]
  total = sum(
    int(bits) * (2 * i + 1) * (2 * s + 1)
    for s, part in enumerate(parts)
    for i, bits in enumerate(part.view(kind).ravel())
  )
  (number,) = fingerprints(parts)
  assert int(number) % 2**64 == total % 2**64


def test_any_flipped_bit_and_any_exchange_is_seen():
  x = np.random.default_rng(1).normal(size=[4, 7]).astype(np.float32)
  changed = []
  for bit in range(32):
    y = x.copy()
    y.view(np.uint32)[bit % 4, bit % 7] ^= np.uint32(1 << bit)
    changed.append([y])
  zero = x.copy()
  zero[2, 2] = 0.0
  minus = zero.copy()
  minus[2, 2] = -0.0
  others = [[x[::-1].copy()], [x[:2], x[2:]], [x[2:], x[:2]], [zero], [minus]]
  numbers = fingerprints([x], [x.copy()], *changed, *others)
  assert numbers[0] == numbers[1]
  assert len(set(numbers[1:].tolist())) == len(numbers) - 1
