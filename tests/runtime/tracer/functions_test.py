# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorFlow and Mesh TensorFlow functions compute the same on every slice."""

import functools

import mesh_tensorflow as mtf
import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf._tf import tf
from palm_mtf.config import DecodeConfig, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.mesh.cpu_gpu import CpuGpuDevices
from palm_mtf.programs.model_loss import ModelLoss
from palm_mtf.programs.train_program import build_program
from palm_mtf.runtime.program import Program
from palm_mtf.training.step import TrainStep
from tests import oracle
from tests.decode_testing import Decoder, decode
from tests.mtf_testing import small_config
from tests.refusals import message_of
from tests.settings import FOREIGN_OPTIMIZER

GREEDY = DecodeConfig(temperature=0.0)


# Each test has its own client, because a program costs the more the more
# programs its client has.
@pytest.fixture
def client():
  with runtime.connect(devices=8) as client:
    yield client


@pytest.fixture
def slices(client):
  """Slices of 1, 2, 4 and 8 devices, by their number."""
  shapes = {1: "1", 2: "2", 4: "data:2,model:2", 8: "2x2x2"}
  return dict(zip(shapes, client.slices(*shapes.values()), strict=True))


def bits(x):
  return x.view(np.uint32).tolist()


def test_each_device_runs_its_own_loops():
  """Otherwise every iteration would send values to the first device."""
  record = tf.RunMetadata()
  goes_on = lambda y: tf.reduce_sum(y) < 100  # noqa: E731
  square = runtime.function(
    lambda x: tf.while_loop(goes_on, lambda y: (y * y,), [x])[0]
  )
  with runtime.connect(devices=2) as client:
    (both,) = client.slices("2")
    how = {"options": tf.RunOptions(output_partition_graphs=True)}
    how["run_metadata"] = record
    client.programs.run = functools.partial(client.programs.run, **how)
    found = square.on(both)(np.array([2.0, 3.0], np.float32)).fetch()
  assert found.tolist() == [256.0, 6561.0]
  nodes = [x for graph in record.partition_graphs for x in graph.node]
  products = [x.device.lower() for x in nodes if x.op == "Mul"]
  assert sorted(x[-13:] for x in products) == ["/device:cpu:0", "/device:cpu:1"]


@pytest.mark.parametrize("dispatch", ["chained", "fused"])
def test_devices_add_up_in_their_order_and_get_the_same_bits(
  client, slices, dispatch
):
  rng = np.random.default_rng(0)
  x = np.float32(rng.standard_normal((8, 50)) * 10.0 ** rng.integers(-4, 4, 50))
  twice = runtime.function(
    lambda x: runtime.all_sum(runtime.all_sum(x) / 3 - x) * 2
  )

  @client.program(dispatch=dispatch)
  def f(x):
    return twice.on(slices[8])(x)

  def add_rows(rows):
    total = rows[0]
    for row in rows[1:]:
      total = total + row
    return total

  first = add_rows(x) / np.float32(3) - x
  expected = [bits(add_rows(first) * 2)] * 8
  assert bits(f(x).fetch()) == expected


def test_a_device_gets_its_rows_and_whole_scalars(slices):
  shapes = []

  def scale(x, factor):
    shapes.append((x.shape.as_list(), factor.shape.as_list()))
    return x * factor, tf.reduce_sum(x)

  x = np.arange(24, dtype=np.float32).reshape(8, 3)
  y, sums = runtime.function(scale).on(slices[4])(x, 2.0)
  assert {*map(str, shapes)} == {"([2, 3], [])"}
  np.testing.assert_array_equal(y.fetch(), 2 * x)
  np.testing.assert_array_equal(sums.fetch(), x.reshape(4, 6).sum(axis=1))


def test_arrays_keep_their_rows_on_slices_of_other_sizes(slices):
  x = np.arange(48.0).reshape(16, 3)
  y, same = x, runtime.function(lambda x: tf.identity(x))
  for n in (4, 1, 8, 2, 8):
    y = same.on(slices[n])(y)
  np.testing.assert_array_equal(y.fetch(), x)


def model(mesh, x, scale):
  """Returns products and their sum; x [batch, d_in], scale []."""
  batch, d_in = x.shape.dims
  d_out = mtf.Dimension("d_out", 6)
  kernel = mtf.get_variable(mesh, "kernel", mtf.Shape([d_in, d_out]))
  y = mtf.einsum([x * scale, kernel], mtf.Shape([batch, d_out]))
  return {"y": y, "sum": mtf.reduce_sum(y)}


LAYOUTS = [
  ("1", ""),
  ("data:2,model:2", "batch:data,d_out:model"),
  ("2x2x2", "d_in:y"),
]


def test_layouts_of_a_mesh_function_change_no_result():
  x = np.float32(np.random.default_rng(0).standard_normal((4, 10)))
  found = []
  for shape, layout in LAYOUTS:
    function = runtime.mesh_function(
      model, dims=["batch d_in", ""], layout=layout, seed=3
    )
    with runtime.connect(devices=8) as client:
      a, b = client.slices(shape, "2")
      made = function.on(a)(x, 0.5)
      found.append((made["y"].fetch(), made["sum"].fetch()))
      # The result is split as the layout says, and can be read elsewhere.
      moved = runtime.function(lambda y: y + 0).on(b)(made["y"])
      np.testing.assert_array_equal(moved.fetch(), found[-1][0])
  first, _ = found[0]
  assert np.abs(first).min() > 1e-4
  for y, total in found:
    np.testing.assert_allclose(y, first, rtol=1e-5)
    assert total == pytest.approx(first.sum(), rel=1e-5)


def read_scale(mesh):
  return mtf.get_variable(mesh, "scale", mtf.Shape([mtf.Dimension("d", 4)]))


def test_functions_share_a_variable_by_its_name(slices):
  twice = runtime.mesh_function(lambda mesh: 2 * read_scale(mesh))
  once = runtime.mesh_function(read_scale)
  first = once.on(slices[2])().fetch()
  np.testing.assert_array_equal(twice.on(slices[2])().fetch(), 2 * first)
  np.testing.assert_array_equal(once.on(slices[2])().fetch(), first)


def test_a_variable_has_one_place(slices):
  once = runtime.mesh_function(read_scale)
  once.on(slices[2])()
  split = runtime.mesh_function(read_scale, layout="d:x")
  for call in (once.on(slices[8]), split.on(slices[2])):
    assert message_of(call) == (
      'variable "scale" is on other devices, or in another layout, in an '
      "earlier function; give it another name, or the same slice and layout."
    )


def loss(mesh, features):
  x = features["x"]
  kernel = mtf.get_variable(mesh, "loss_kernel", x.shape[1:])
  y = mtf.reduce_sum(x * kernel, output_shape=x.shape[:1])
  return mtf.reduce_mean(mtf.square(y - 1))


def build_step(client, slice_):
  """Returns a training step of `loss` on a slice."""
  mesh = DeviceMesh(mesh_shape="x:2", layout="batch:x")
  with client.programs.graph.as_default():
    program = build_program(
      ModelLoss(loss, {"x": ("float32", "d:8")}, mesh, num_rows=4, seed=0),
      mesh,
      FOREIGN_OPTIMIZER,
      batch_size=4,
      pods=PodsConfig(),
      devices=CpuGpuDevices(client.devices[0], [slice_.devices]),
    )
    step = TrainStep(client.programs, program)
    client.programs.call(Program(operations=[program.initialize]))
  return step


def test_training_evaluation_and_decoding_run_next_to_traced_programs(
  client, slices
):
  """The evaluation reads the trained weights, between the steps."""
  x = np.float32(np.random.default_rng(0).standard_normal((4, 8)))
  step = build_step(client, slices[2])
  evaluate = runtime.mesh_function(
    lambda mesh, x: loss(mesh, {"x": x}), dims=["batch d"], layout="batch:x"
  )
  config, prompt = small_config(), [1, 2, 3]
  params = oracle.random_parameters(config, seed=3)
  decoder = Decoder(client.programs, config, params, [prompt], GREEDY, 3)
  count = runtime.function(lambda n: n + 1)
  counted, trained, evaluated = np.zeros(4), [], []
  decoder.start()
  for i in range(3):
    counted = count.on(slices[4])(counted)
    evaluated.append(evaluate.on(slices[2])(x))
    trained.append(step.run({"x": x}, i)["loss"])
    decoder.advance(i + 1)
  assert counted.fetch().tolist() == [3] * 4
  assert trained[2] < trained[0]
  assert [x.fetch() for x in evaluated] == pytest.approx(trained, rel=1e-6)
  apart = decode(config, params, [prompt], GREEDY, max_tokens=3)
  assert decoder.read().tokens.tolist() == apart.tokens.tolist()


def test_a_function_is_found_by_its_name(slices):
  made = runtime.function(lambda x: x - 1, name="less")
  assert runtime.function("less") is made
  assert message_of(runtime.function, "lass") == (
    'there is no function "lass" (did you mean "less"?); register it by '
    'runtime.function(code, name="lass").'
  )


def halve(x):
  return x / 2


def choose(x):
  return tf.boolean_mask(x, x > 0)


def remember(x):
  return tf.Variable(x, use_resource=True)


def fail(x):
  raise KeyError("no such key")


@pytest.mark.parametrize(
  ("function", "inputs", "message"),
  [
    (
      halve,
      [np.zeros(3)],
      'input 0 of halve has 3 rows, which the 2 devices of slice "x:2" cannot '
      "share equally; give a multiple of 2.",
    ),
    (
      halve,
      [np.zeros(2), 1.0],
      "halve: too many positional arguments; give one input per argument.",
    ),
    (
      halve,
      [],
      "halve: missing a required argument: 'x'; give one input per argument.",
    ),
    (
      choose,
      [np.ones(2)],
      "choose returns a tensor of shape (None,): return tensors whose shapes "
      "do not depend on values.",
    ),
    (
      remember,
      [np.ones(2)],
      "remember makes a variable or chooses a device; make its state inputs "
      "and results, or write a mesh_function.",
    ),
    (
      fail,
      [np.ones(2)],
      "fail: KeyError: 'no such key' "
      "(tests/runtime/tracer/functions_test.py:LINE, in fail)",
    ),
    (
      halve,
      [{"x": 1}],
      "input 0 of halve is dict: give numbers; a buffer can only be an input "
      "of a program.",
    ),
  ],
)
def test_what_a_function_cannot_do_is_one_line(
  slices, function, inputs, message
):
  message = message.replace("LINE", str(fail.__code__.co_firstlineno + 1))
  call = runtime.function(function).on(slices[2])
  assert message_of(call, *inputs) == message


def test_dimensions_of_a_mesh_function_are_named(slices):
  function = runtime.mesh_function(model, dims=["batch d_in"])
  assert message_of(function.on(slices[2]), np.zeros((2, 3)), 1.0) == (
    "model is called with inputs of [2, 0] dimensions, and dims = ['batch "
    "d_in']; name every dimension."
  )


def test_all_sum_outside_of_a_function_or_in_a_branch_is_refused(slices):
  def branch(x):
    return tf.cond(x[0] > 0, lambda: runtime.all_sum(x), lambda: x)

  for call in (
    lambda: runtime.all_sum(np.zeros(2)),
    lambda: runtime.function(branch).on(slices[2])(np.zeros(2)),
  ):
    assert message_of(call) == (
      "all_sum is called outside of a function of a slice, or in a loop or "
      "branch of it; call it directly in a function that is passed to "
      "runtime.function."
    )
