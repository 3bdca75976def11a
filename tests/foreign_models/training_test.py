# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mesh TensorFlow's T5 encoder-decoder trains on several pods as on one."""

import dataclasses
import re

import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf._tf import mtf, tf
from palm_mtf.config import MeshLayout
from palm_mtf.errors import UserError
from palm_mtf.foreign_models import DeviceMesh, PodsConfig, PodTraining
from palm_mtf.foreign_models.training import convert_numbers
from palm_mtf.mesh.cpu_gpu import CpuGpuDevices
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.model_loss import ModelLoss
from palm_mtf.programs.train_program import build_program
from palm_mtf.runtime.program import Program
from palm_mtf.training.step import TrainStep
from tests import oracle
from tests.cases import slow
from tests.mtf_testing import feed_of, relative_error
from tests.refusals import message_of
from tests.settings import FOREIGN_OPTIMIZER
from tests.t5_model import FEATURES, MeshTensorFlow, reversed_rows, t5_loss

BATCH_SIZE, NUM_STEPS = 8, 3
ONE_DEVICE = DeviceMesh(mesh_shape="", layout="")
RULES = "batch:data,heads:model,d_ff:model,vocab:model"
TWO_DEVICES, FOUR_DEVICES = (
  DeviceMesh(mesh_shape=x, layout=RULES, num_microbatches=2)
  for x in ("data:1,model:2", "data:2,model:2")
)
TWO_PODS = PodsConfig(num_pods=2, fingerprint_steps=1)
# Every clip is active, and every setting that depends on parameter names.
OPTIMIZER = dataclasses.replace(
  FOREIGN_OPTIMIZER,
  update_clip=0.9,
  gradient_clip=0.5,
  weight_decay_exponent=1.5,
  weight_decay_on="all_but_scales",
)


def training(mesh=ONE_DEVICE, pods=PodsConfig(), **changes):  # noqa: B008
  settings = {"optimizer": OPTIMIZER, "global_batch_size": BATCH_SIZE}
  settings |= {"mesh": mesh, "pods": pods, "seed": 5, **changes}
  return PodTraining(t5_loss, FEATURES, **settings)


def train(mesh=ONE_DEVICE, pods=PodsConfig(), **changes):  # noqa: B008
  """Returns variables before and after the steps, and the losses."""
  with training(mesh, pods, **changes) as each:
    before = each.variables()
    metrics = [
      each.step(reversed_rows(BATCH_SIZE, seed)) for seed in range(NUM_STEPS)
    ]
    each.check_pods()
    return before, each.variables(), [x["loss"] for x in metrics]


@pytest.fixture(scope="module")
def one_pod():
  return train()


def parameters(variables):
  slots = ("/momentum", "/second_moment", "_row", "_column")
  return {
    name: np.float64(x)
    for name, x in variables.items()
    if not name.endswith(slots)
  }


def test_frozen_variables_keep_their_bits_and_have_no_slots():
  before, after, _ = train(frozen=["shared/*", "*SelfAttention*"])
  frozen = {x for x in parameters(before) if re.match("shared/|.*SelfAtt", x)}
  assert frozen
  for name in parameters(before):
    is_same = before[name].tobytes() == after[name].tobytes()
    assert is_same == (name in frozen), name
    assert (f"{name}/second_moment" in after) == (name not in frozen)


# Slow, because two pods take the steps of the oracle below, too.
@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh",
  [ONE_DEVICE, TWO_DEVICES, FOUR_DEVICES],
  ids=["one device", "two", "four"],
)
def test_two_pods_train_as_one_pod_with_the_whole_batch(mesh, one_pod):
  """Compares the pods' bits after every step (FINGERPRINT_STEPS)."""
  before, after, losses = train(mesh, TWO_PODS)
  expected_before, expected_after, expected_losses = one_pod
  assert before.keys() == expected_before.keys()
  for name, value in expected_before.items():
    np.testing.assert_array_equal(before[name], value, err_msg=name)
  # Sums have another order, and each step's g / sqrt(v) amplifies rounding.
  assert losses == pytest.approx(expected_losses, rel=1e-5)
  for name, value in expected_after.items():
    assert relative_error(after[name], value) < 1e-3, name


@pytest.mark.parametrize("second_moment", ["full", slow("factored")])
def test_steps_of_two_pods_equal_adafactor_on_mesh_tensorflows_own_gradients(
  second_moment,
):
  """Compares the pods' bits after every step (FINGERPRINT_STEPS)."""
  optimizer = dataclasses.replace(OPTIMIZER, second_moment=second_moment)
  before, after, losses = train(ONE_DEVICE, TWO_PODS, optimizer=optimizer)
  params = parameters(before)
  model = MeshTensorFlow(BATCH_SIZE)
  adafactor = oracle.Adafactor(optimizer, params)
  for seed, seen in enumerate(losses):
    batch = reversed_rows(BATCH_SIZE, seed)
    loss, gradients = model.loss_and_gradients(params, batch)
    assert seen == pytest.approx(loss, rel=1e-5)
    params = adafactor.step(params, gradients)
  assert params.keys() == parameters(after).keys()
  for name, value in params.items():
    assert relative_error(after[name], value) < 1e-3, name


@pytest.mark.slow
def test_steps_on_the_runtime_have_the_losses_of_a_plain_session():
  """The runtime and a TensorFlow session run the same graph (Table 1)."""
  mesh = DeviceMesh(mesh_shape="data:2", layout="batch:data")
  with runtime.connect(devices=2) as slices:
    client = slices.programs
    with client.graph.as_default():
      program = build_program(
        ModelLoss(t5_loss, FEATURES, mesh, num_rows=BATCH_SIZE, seed=5),
        mesh,
        OPTIMIZER,
        batch_size=BATCH_SIZE,
        pods=PodsConfig(),
        devices=CpuGpuDevices(slices.devices[0], [slices.devices]),
      )
    client.call(Program(operations=[program.initialize]))
    step = TrainStep(client, program)
    with tf.Session(graph=client.graph, config=session_config(2)) as plain:
      plain.run(program.initialize)  # the session has its own variables
      for number in range(NUM_STEPS):
        batch = reversed_rows(BATCH_SIZE, number)
        last = program.update
        metrics, _ = plain.run(
          [last.outputs, last.operations], feed_of(program, batch, number)
        )
        assert step.run(batch, number)["loss"] == float(metrics["loss"])


@pytest.mark.slow
def test_training_continues_from_loaded_variables_on_another_mesh(one_pod):
  before, after, _ = one_pod
  with training(TWO_DEVICES) as each:
    each.load(before, num_steps=0)
    for seed in range(NUM_STEPS - 1):
      each.step(reversed_rows(BATCH_SIZE, seed))
    saved, done = each.variables(), each.num_steps
    each.load(before, num_steps=0)
    each.load(saved, num_steps=done)
    each.step(reversed_rows(BATCH_SIZE, done))
    for name, value in each.variables().items():
      assert relative_error(value, after[name]) < 1e-3, name
    with pytest.raises(UserError, match=r'no variable "shared/embeding" .did'):
      each.load({"shared/embeding": np.zeros([1])}, num_steps=0)
    with pytest.raises(UserError, match=r'no "targets": give every feature'):
      each.step({"inputs": np.ones([BATCH_SIZE, 8])})
    with pytest.raises(UserError, match=r"inputs is \[7, 8\] .* give \[8, 8\]"):
      each.step(reversed_rows(7, seed=0))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"pods": PodsConfig(num_pods=3)},
      "a batch of 8 is not divisible by NUM_PODS = 3",
    ),
    (
      {"optimizer": dataclasses.replace(OPTIMIZER, parameter_scale="stacked")},
      'PARAMETER_SCALE = "stacked" joins matrices of PaLM',
    ),
    (
      {"pods": PodsConfig(on_pod_failure="shrink")},
      'ON_POD_FAILURE = "shrink": give "stop"',
    ),
    (
      {"mesh": MeshLayout(mesh_shape="", layout="", stages=2)},
      "STAGES = 2: a model function has one mesh per pod; set STAGES = 1.",
    ),
    (
      {"mesh": DeviceMesh(mesh_shape="data:2", layout="bach:data")},
      'layout rule "bach:data": the model has no dimension "bach"',
    ),
    (
      {"mesh": DeviceMesh(mesh_shape="data:3", layout="batch:data")},
      "batch=8 is not divisible by mesh axis data=3",
    ),
    (
      {"mesh": DeviceMesh(mesh_shape="a:2", layout="heads:a,d_model:a")},
      "a tensor of the model has both dimensions",
    ),
    (
      {"frozen": ["shared/embeding"]},
      'no parameter matches "shared/embeding" (did you mean "shared/embedding"',
    ),
    ({"frozen": ["*"]}, "freezes all parameters"),
    ({"frozen": "shared/*"}, "give a list of patterns of names of variables"),
  ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(changes, message):
  with pytest.raises(UserError) as error, training(**changes):
    pass
  assert message in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("value", "dtype", "read"),
  [
    ([[1, 2], [3, 4]], tf.float32, [[1.0, 2.0], [3.0, 4.0]]),
    (np.float64(0.1), tf.float32, np.float32(0.1)),
    ([True, 2.0], tf.int32, [1, 2]),
    (np.array([np.nan]), tf.float32, [np.nan]),
    (np.ones(2, tf.bfloat16.as_numpy_dtype), tf.bfloat16, [1.0, 1.0]),
  ],
)
def test_numbers_of_any_library_are_taken(value, dtype, read):
  found = convert_numbers("x", value, dtype)
  assert found.dtype == dtype.as_numpy_dtype
  np.testing.assert_array_equal(found, read)


@pytest.mark.parametrize(
  ("value", "dtype"),
  [
    ([1.5], tf.int32),
    ([np.nan], tf.int32),
    ([2**31], tf.int32),
    ([-1], tf.uint8),
    (["a"], tf.float32),
    ([[1], [1, 2]], tf.float32),
    (None, tf.float32),
    ([1j], tf.float32),
  ],
)
def test_what_the_dtype_cannot_hold_is_refused(value, dtype):
  assert message_of(convert_numbers, "x in the batch", value, dtype) == (
    f"x in the batch: give numbers that {dtype.name} holds, in an array or in "
    "lists of equal lengths."
  )


D = mtf.Dimension("d", 4)


def kernel(mesh, dtype=tf.float32, **settings):
  return mtf.get_variable(mesh, "kernel", mtf.Shape([D]), dtype, **settings)


def small_training(function, num_pods=1, features=(("x", ("float32", "d:4")),)):
  return PodTraining(
    function,
    dict(features),
    mesh=ONE_DEVICE,
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
    (a_loss_for_each_row, "a_loss_for_each_row returns a tensor [batch="),
    (no_variable, "makes no variable that is trained"),
    (bfloat16_slices, "variable kernel is kept in bfloat16"),
    (an_unused_variable, "does not depend on the variable unused"),
  ],
)
def test_a_function_without_a_loss_to_train_is_refused(function, message):
  with pytest.raises(UserError) as error, small_training(function):
    pass
  assert message in str(error.value)
  assert "\n" not in str(error.value)


def test_a_feature_of_another_form_is_refused():
  with pytest.raises(UserError, match="feature x = 'int32': give the dtype"):
    small_training(no_variable, features={"x": "int32"})


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
    with small_training(weighted, num_pods, features) as each:
      first = each.variables()["kernel"]
      losses = (x @ first - 1.0) ** 2
      assert each.step(batch)["loss"] == pytest.approx(
        (losses[2] + 3 * losses[3]) / 4, rel=1e-5
      )
      after.append(each.variables()["kernel"])
  assert relative_error(after[1], after[0]) < 1e-5
