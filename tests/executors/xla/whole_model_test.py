# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Any Mesh TensorFlow model trains on accelerators as on the host path.

The tests give JAX eight virtual CPU devices (tests/conftest.py).
"""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError
from palm_mtf.foreign_models import DeviceMesh, PodsConfig, PodTraining
from tests.cases import slow
from tests.mtf_testing import mesh_layout, relative_error
from tests.settings import FOREIGN_OPTIMIZER
from tests.t5_model import FEATURES, experts_loss, reversed_rows, t5_loss

BATCH_SIZE = 8
B, D = mtf.Dimension("batch", BATCH_SIZE), mtf.Dimension("d", 8)
E, OTHER = mtf.Dimension("e", 4), mtf.Dimension("other", 8)


def training(
  function,
  layout,
  *,
  tpu="v4-8",
  features=(("x", ("float32", "d:8")),),
  pods=PodsConfig(),  # noqa: B008
  num_microbatches=1,
  batch_size=BATCH_SIZE,
):
  mesh = {"layout": layout, "num_microbatches": num_microbatches, "tpu": tpu}
  mesh = DeviceMesh(mesh_shape="a:2,b:2", **mesh)
  how = {"mesh": mesh, "pods": pods, "global_batch_size": batch_size, "seed": 5}
  given = function, dict(features)
  return PodTraining(*given, optimizer=FOREIGN_OPTIMIZER, **how)


def batch_of(seed, size=BATCH_SIZE):
  rng = np.random.default_rng(seed)
  return {"x": rng.normal(size=[size, 8]).astype(np.float32)}


def losses(trained, num_steps=2):
  return [trained.step(batch_of(i))["loss"] for i in range(num_steps)]


T5_RULES = "batch:a,heads:b,d_ff:b,vocab:b"


def train_t5(**settings):
  """Returns variables before and after three steps, and the losses."""
  with training(t5_loss, T5_RULES, features=FEATURES, **settings) as each:
    before, found = each.variables(), []
    for seed in range(3):
      found.append(each.step(reversed_rows(BATCH_SIZE, seed))["loss"])
    each.check_pods()
    return before, each.variables(), found


@pytest.mark.slow
@pytest.mark.parametrize("num_pods", [1, 2])
def test_a_t5_trains_with_the_first_weights_and_losses_of_the_host_path(
  num_pods,
):
  before, after, found = train_t5(tpu="")
  pods = PodsConfig(num_pods=num_pods, fingerprint_steps=1)
  actual = train_t5(pods=pods, num_microbatches=2)
  assert actual[0].keys() == before.keys()
  for name, value in before.items():
    np.testing.assert_array_equal(actual[0][name], value, err_msg=name)
  assert actual[2] == pytest.approx(found, rel=1e-5)
  for name, value in after.items():
    assert relative_error(actual[1][name], value) < 1e-4, name


@pytest.mark.slow
def test_a_mixture_of_experts_has_the_losses_of_the_host_path():
  """Devices exchange tokens, because a mesh axis splits the experts."""
  found = []
  for tpu in ("", "v4-8"):
    settings = {"features": FEATURES, "tpu": tpu}
    with training(experts_loss, "batch:a,experts:b", **settings) as each:
      rows = [reversed_rows(BATCH_SIZE, seed) for seed in range(3)]
      found.append([each.step(x)["loss"] for x in rows])
  assert found[1] == pytest.approx(found[0], rel=1e-5)


def variable(mesh, name, *dims, **settings):
  return mtf.get_variable(mesh, name, mtf.Shape(dims), **settings)


def affine(features):
  x = features["x"]
  scale, bias = (variable(x.mesh, y, D) for y in ("scale", "bias"))
  return x * scale + bias


def mean(x):
  return mtf.reduce_mean(mtf.square(x))


def shifts(mesh, features):
  x = affine(features)
  return (
    mean(mtf.shift(x, 3, D, wrap=True) * features["x"])
    + mean(mtf.shift(x, -3, D, wrap=False) * features["x"])
    + mean(mtf.shift(x, 4, D, wrap=False))
  )


def largest(mesh, features):
  x = affine(features)
  few, _ = mtf.top_k(x, D, mtf.Dimension("k", 2))
  many, places = mtf.top_k(x, D, mtf.Dimension("k", 6))
  return mean(few) + mean(many * mtf.cast(places, tf.float32))


def other_layouts(mesh, features):
  """Splits another dimension over the same axis, and then an unsplit one."""
  x = mtf.rename_dimension(affine(features), "batch", "rows")
  x = mtf.rename_dimension(x, "d", "batch")
  y = mtf.einsum([x, variable(mesh, "kernel", B)], reduced_dims=[B])
  masks = mtf.greater(mtf.rename_dimension(features["x"], "d", "other"), 0.0)
  masks = mtf.rename_dimension(masks, "other", "d")
  return mean(y) + mean(affine(features) * mtf.cast(masks, tf.float32))


def loop(mesh, features):
  outside = mtf.constant(mesh, 1.5)
  _, y = mtf.while_loop(
    lambda i, x: mtf.less(i, 3),
    lambda i, x: [i + 1, x * outside + mtf.reduce_mean(x)],
    [mtf.constant(mesh, 0, dtype=tf.int32), features["x"]],
  )
  return mean(affine(features) * mtf.stop_gradient(y))


def recomputed(mesh, features):
  def layer(x):
    return mtf.tanh(x * variable(mesh, "inner", D))

  return mean(mtf.recompute_grad(layer, [affine(features)]))


def reductions(mesh, features):
  x = affine(features)
  return (
    mean(mtf.softmax(x, D))
    + mtf.reduce_mean(mtf.reduce_max(x, reduced_dim=D))
    - mtf.reduce_mean(mtf.reduce_min(x, reduced_dim=D))
    + mtf.reduce_mean(mtf.reduce_logsumexp(x, D))
    + mean(mtf.layers.layer_norm(mtf.cumsum(x, D), D))
  )


def lookup(mesh, features):
  places = mtf.argmax(features["x"], D)
  rows = mtf.gather(variable(mesh, "table", D, E), places, D)
  return mean(rows * mtf.reduce_mean(affine(features), reduced_dim=D))


def own_function(mesh, features):
  x = affine(features)
  return mean(mtf.slicewise(tf.sin, [x], splittable_dims=x.shape.dims))


def pieces(mesh, features):
  halves = mtf.Shape([B, mtf.Dimension("half", 2), E])
  x = mtf.reshape(affine(features), halves)
  first, second = mtf.unstack(x, halves.dims[1])
  pair = mtf.stack([first, second], "pair", axis=1)
  total = mtf.reduce_sum(pair, reduced_dim=pair.shape.dims[1])
  x = mtf.concat([first, second, total, first], "e")
  x, y = mtf.split(x, x.shape.get_dim_by_name("e"), 2)
  x = mtf.slice(mtf.pad(x - y, [1, 2], "e"), 1, 5, "e")
  return mtf.scalar_summary("loss", mean(mtf.Print(x, [x], "x"))).outputs[0]


def not_trained(mesh, features):
  how = {"initializer": tf.random_normal_initializer(), "trainable": False}
  fixed = variable(mesh, "fixed", D, **how)
  return mean(affine(features) * fixed)


def computed(mesh, features):
  wave = tf.sin(tf.range(8.0) + tf.linalg.trace(tf.eye(3)))
  return mean(affine(features) * mtf.import_tf_tensor(mesh, wave, [D]))


def weighted(mesh, features):
  squares = mtf.square(affine(features))
  weights = mtf.cast(mtf.greater(features["x"], 0.0), tf.float32)
  return mtf.reduce_sum(squares * weights), mtf.reduce_sum(weights)


def image(mesh, features):
  dims = [mtf.Dimension("h", 4), mtf.Dimension("w", 2), mtf.Dimension("in", 1)]
  x = mtf.reshape(affine(features), mtf.Shape([B, *dims]))
  return mean(mtf.layers.conv2d(x, mtf.Dimension("out", 4), name="conv"))


def image_blocks(mesh, features):
  blocks = mtf.Dimension("blocks", 4)
  shape = mtf.Shape([B, blocks, mtf.Dimension("w", 2)])
  x = mtf.reshape(affine(features), shape)
  return mean(mtf.halo_exchange(x, blocks, x.shape.dims[-1], 1))


@pytest.mark.parametrize(
  ("function", "layout"),
  [
    slow(shifts, "batch:a,d:b"),
    (other_layouts, "batch:a,other:b"),
    slow(loop, "batch:a,d:b"),
    slow(largest, "batch:a,d:b"),
    slow(other_layouts, "batch:a,rows:b"),
    slow(recomputed, "batch:a,d:b"),
    slow(reductions, "batch:a,d:b"),
    slow(lookup, "batch:a,e:b"),
    slow(lookup, "batch:a,d:b"),
    slow(own_function, "batch:a,d:b"),
    slow(pieces, "batch:a"),
    slow(not_trained, "batch:a,d:b"),
    slow(computed, "batch:a,d:b"),
    slow(weighted, "batch:a,d:b"),
    slow(image, "batch:a,out:b"),
    slow(image_blocks, "batch:a,blocks:b"),
  ],
)
def test_operations_of_mesh_tensorflow_train_as_on_the_host_path(
  function, layout
):
  with training(function, layout, tpu="") as each:
    expected = losses(each)
  with training(function, layout) as each:
    assert losses(each) == pytest.approx(expected, rel=1e-5)


def draws(mesh, features):
  """Returns 1 + the mean of a random row, if all devices have the same row."""
  x = mtf.random_uniform(mesh, mtf.Shape([D]))
  # Each device keeps a part of the row, and gets the others' parts again.
  parts = mtf.rename_dimension(x, "d", "other")
  again = mtf.rename_dimension(parts, "other", "d")
  rows = mtf.random_uniform(mesh, mtf.Shape([B, OTHER]))
  differs = mtf.reduce_max(mtf.cast(mtf.not_equal(x, again), tf.float32))
  unused = 0.0 * mtf.reduce_mean(affine(features))
  return mtf.reduce_mean(x) + 10.0 * differs + mtf.reduce_mean(rows) + unused


def test_random_numbers_are_new_in_each_step_and_equal_in_equal_slices():
  with training(draws, "batch:a,other:b") as each:
    found = losses(each, 4)
  assert len({*found}) == 4
  for value in found:  # the mean of 8 numbers, and that of 64
    assert 0.5 < value < 1.5


def dropped(mesh, features):
  ones = mtf.ones(mesh, features["x"].shape)
  kept = mtf.dropout(ones, is_training=True, rate=0.25)
  unused = 0.0 * mtf.reduce_mean(affine(features))
  return mean(kept) + unused


@pytest.mark.slow
def test_dropout_keeps_the_share_that_the_model_asks_for_in_pods_too():
  """E[(kept / 0.75)^2] = 0.75 / 0.75^2 = 4 / 3; the masks are those of rows."""
  size, found = 512, []
  for num_pods, num_microbatches in ((1, 2), (2, 1)):
    how = {"num_microbatches": num_microbatches, "batch_size": size}
    how["pods"] = PodsConfig(num_pods=num_pods)
    with training(dropped, "batch:a,d:b", **how) as each:
      found.append([each.step(batch_of(i, size))["loss"] for i in range(3)])
      each.check_pods()
  assert found[0] == pytest.approx([4 / 3] * 3, rel=0.05)
  assert len({*found[0]}) == 3
  assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.slow
def test_variables_cross_between_the_paths_and_a_bad_batch_changes_nothing():
  with training(reductions, "batch:a,d:b", tpu="") as each:
    losses(each)
    saved, done = each.variables(), each.num_steps
    expected = each.step(batch_of(7))["loss"]
  with training(reductions, "batch:a,d:b", num_microbatches=2) as each:
    each.load(saved, num_steps=done)
    for name, value in each.variables().items():
      np.testing.assert_array_equal(value, saved[name], err_msg=name)
    with pytest.raises(UserError, match="not finite"):
      each.step({"x": np.full([BATCH_SIZE, 8], np.inf)})
    for name, value in each.variables().items():
      np.testing.assert_array_equal(value, saved[name], err_msg=name)
    assert each.step(batch_of(7))["loss"] == pytest.approx(expected, rel=1e-5)


def through(function):
  """Returns a model that applies a TensorFlow function to its input."""

  def model(mesh, features):
    x = features["x"]
    how = {"grad_function": lambda op, gradient: [gradient]}
    x = mtf.slicewise(function, [x], splittable_dims=x.shape.dims, **how)
    return mean(x * variable(mesh, "kernel", D))

  return model


def as_text(x):
  return tf.strings.to_number(tf.strings.as_string(x))


def draw_in_loop(mesh, features):
  (y,) = mtf.while_loop(
    lambda x: mtf.less(mtf.reduce_sum(x), 9.0),
    lambda x: [x + mtf.random_uniform(mesh, x.shape)],
    [features["x"]],
  )
  return mean(affine(features) * mtf.stop_gradient(y))


def gamma(mesh, features):
  given = mesh, mtf.Shape([D]), tf.random.gamma
  operation = mtf.ops.RandomOperation(*given, alpha=1.0)
  return mean(affine(features) * operation.outputs[0])


def concat(mesh, features):
  return mean(mtf.concat([affine(features)] * 2, "batch"))


def a_placeholder(mesh, features):
  given = tf.placeholder(tf.float32, [8], "mine")
  return mean(affine(features) * mtf.import_tf_tensor(mesh, given, [D]))


def waits(mesh, features):
  x = affine(features)
  return mtf.depend(mean(x), [x])


@pytest.mark.parametrize(
  ("function", "operation", "reason"),
  [
    (through(as_text), "slicewise/AsString", "XLA has no AsString"),
    (a_placeholder, "mine", "XLA has no Placeholder"),
    (concat, "concat", "can't concat along split axis"),
    (draw_in_loop, "while_loop", "draw random numbers outside of loops"),
    (gamma, "random", "draw by mtf.random_uniform or mtf.random_normal"),
    (waits, "depend", "Mesh does not suppport control dependencies."),
  ],
)
def test_what_accelerators_cannot_run_is_one_line(function, operation, reason):
  with pytest.raises(UserError) as error, training(function, "batch:a"):
    pass
  assert str(error.value) == (
    f"the model function's operation {operation} cannot run on TPUs: "
    f'{reason.removesuffix(".")}; use another operation, or set TPU = "" to '
    "train on CPUs."
  )


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (
      {"pods": PodsConfig(num_pods=2, pods="local_servers")},
      'TPU = "v4-8" and PODS = "local_servers": servers do not have the model '
      'function; set PODS = "in_process".',
    ),
    (
      {"tpu": "v4-16"},
      'TPU = "v4-16" has 2 x 2 x 2 chips = 8 devices, but MESH_SHAPE = '
      '"a:2,b:2" has 4; give the mesh as many.',
    ),
    ({"tpu": "v4-9"}, 'TPU = "v4-9": no such slice (did you mean "v4-8"?)'),
    (
      {"features": {"x": ("int64", "d:8")}},
      "feature x is int64: accelerators hold numbers of at most 32 bits; give "
      "it a dtype such as int32 or float32.",
    ),
  ],
)
def test_settings_that_accelerators_do_not_take_are_one_line(settings, message):
  with (
    pytest.raises(UserError) as error,
    training(lambda mesh, x: mean(affine(x)), "batch:a", **settings),
  ):
    pass
  assert str(error.value).startswith(message)
  assert "\n" not in str(error.value)


def test_a_loop_of_steps_is_refused():
  mesh = mesh_layout("fully sharded", tpu="v4-8", steps_per_loop=2)
  how = {"optimizer": FOREIGN_OPTIMIZER, "global_batch_size": 8}
  with pytest.raises(UserError, match=r"STEPS_PER_LOOP = 2: .* = 1\.$"):
    PodTraining(concat, {}, mesh=mesh, **how)
