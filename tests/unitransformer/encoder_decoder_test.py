# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""gin/models/t5_*.gin make T5, and a packed row has T5's logits."""

import math
import os
import re

import gin
import numpy as np
import pytest
from mesh_tensorflow.transformer import transformer

from palm_mtf import gin_path
from palm_mtf._tf import mtf, tf
from palm_mtf.cli.gin_folder import gin_folder
from palm_mtf.errors import UserError
from palm_mtf.ops.variables import adopt_variables
from palm_mtf.unitransformer import bitransformer
from tests.cases import slow
from tests.source_files import ROOT

# {file: (parameters of the released weights, T5's own gin file)}
T5 = {
  "t5_base": (222_903_552, "t5.1.0.base"),
  "t5_large": (737_668_096, "t5.1.0.large"),
  "t5_3b": (2_851_598_336, "t5.1.0.3B"),
  "t5_11b": (11_307_321_344, "t5.1.0.11B"),
}
T5_MACROS = """
make_bitransformer.input_vocab_size = 32128
make_bitransformer.output_vocab_size = 32128
dropout_rate = 0.0
"""
SMALL = ["NUM_LAYERS = 2", "D_MODEL = 16", "D_FF = 32", "VOCAB_SIZE = 128"]


@pytest.fixture(autouse=True)
def clear_gin():
  gin.clear_config()
  yield
  gin.clear_config()


def parse_preset(name, *changes):
  gin.add_config_file_search_path(gin_path())
  gin.parse_config_file(f"{gin_path()}/models/{name}.gin")
  gin.parse_config(changes)


def make_features(mesh, **values):
  """Returns the rows of features, [1, length] each, on a mesh."""
  made = {}
  for name, x in values.items():
    dtype = np.float32 if name == "loss_weights" else np.int32
    row = mtf.Dimension("length", len(x))
    shape = mtf.Shape([mtf.Dimension("batch", 1), row])
    made[name] = mtf.import_tf_tensor(mesh, np.array([x], dtype), shape)
  return made


def build_graph(call):
  """Returns the Mesh TensorFlow graph of `call`; makes no variables."""
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  shape = mtf.Shape([mtf.Dimension("batch", 1), mtf.Dimension("length", 16)])
  with tf.Graph().as_default(), adopt_variables(mesh, 0):
    call(mtf.zeros(mesh, shape, tf.int32))
  return mesh.graph


def call_t5(tokens):
  model = transformer.make_bitransformer()
  model.call_simple(tokens, tokens, compute_loss=False)


@pytest.mark.parametrize("name", [x if x == "t5_base" else slow(x) for x in T5])
def test_a_preset_is_t5s_own_gin_file_and_has_the_published_count(name):
  """Mesh TensorFlow's operations are the same, one by one."""
  t5 = pytest.importorskip("t5", reason="t5 is not installed")
  count, file = T5[name]
  parse_preset(name)
  ours = build_graph(call_t5)
  shapes = [x.shape.to_integer_list for x in ours.all_variables]
  assert sum(map(math.prod, shapes)) == count
  header = f"\n# Parameters: {count:,}.\n"
  assert header in (gin_folder() / "models" / f"{name}.gin").read_text()
  gin.clear_config()
  for package in (t5, mtf):
    folder = {t5: "models/gin", mtf: "transformer/gin"}[package]
    path = os.path.join(os.path.dirname(package.__file__), folder)
    gin.add_config_file_search_path(path)
  gin.parse_config_file("defaults.gin", skip_unknown=True)
  gin.parse_config_file(f"models/{file}.gin", skip_unknown=True)
  gin.parse_config(T5_MACROS)
  theirs = build_graph(call_t5)
  ours, theirs = (
    ([x.name for x in y.all_variables], [x.to_string for x in y.operations])
    for y in (ours, theirs)
  )
  assert ours == theirs


def test_t5_1_1_is_two_bindings_and_the_width_of_its_mlp():
  """docs/t5.md has the bindings and the number of parameters."""
  page = (ROOT / "docs/t5.md").read_text(encoding="utf-8")
  bindings = re.findall(r"`(transformer[\w.]+ = .+?)`", page)
  assert len(bindings) == 2
  parse_preset("t5_base", "D_FF = 2048", *bindings)
  variables = build_graph(call_t5).all_variables
  count = sum(x.shape.size for x in variables)
  assert count == 247_577_856
  assert f"{count:,}" in page


@pytest.mark.peers
@pytest.mark.parametrize("name", T5)
def test_a_preset_has_as_many_parameters_as_transformers_t5(name):
  import torch
  import transformers

  parse_preset(name)
  sizes = {
    x: gin.query_parameter(f"%{x.upper()}")
    for x in ("num_layers", "d_model", "num_heads", "d_kv", "d_ff")
  }
  config = transformers.T5Config(vocab_size=32128, **sizes)
  with torch.device("meta"):
    model = transformers.T5ForConditionalGeneration(config)
  assert model.num_parameters() == T5[name][0]


def test_examples_in_a_packed_row_have_the_logits_of_t5_for_each_alone():
  """Two examples, then padding; T5 has inputs and targets in two arrays."""
  parse_preset("t5_tiny", *SMALL)
  first, second = ([5, 6, 7, 8], [9, 3]), ([11, 12], [13, 14, 15])
  (a, b), (c, d) = first, second
  sizes = [len(x) for x in (a, b, c, d)]
  with tf.Graph().as_default():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    rows = make_features(
      mesh,
      targets=[*a, *b, *c, *d, 0],
      prefix=[1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0],
      loss_weights=np.repeat([0, 1, 0, 1, 0], [*sizes, 1]),
      segments=np.repeat([1, 2, 0], [6, 5, 1]),
    )
    packed, alone = bitransformer(rows, tf.float32), []
    for example in (first, second):
      given = (make_features(mesh, x=x)["x"] for x in example)
      model = transformer.make_bitransformer()
      alone.append(model.call_simple(*given, compute_loss=False)[0])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl([], [], [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    fetched = [lowering.export_to_tf_tensor(x) for x in (packed, *alone)]
    with tf.Session() as session:
      session.run(tf.global_variables_initializer())
      session.run(lowering.copy_masters_to_slices())
      row, *expected = (x[0] for x in session.run(fetched))
  for begin, example, logits in zip((4, 8), (b, d), expected, strict=True):
    found = row[begin : begin + len(example)]
    np.testing.assert_allclose(found, logits, atol=1e-5)
    assert np.ptp(logits) > 0.01


def test_rows_without_inputs_are_refused():
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  with tf.Graph().as_default():
    row = make_features(mesh, inputs=[0, 1], targets=[1, 2])
  with pytest.raises(UserError, match='OBJECTIVE = "causal": an encoder'):
    bitransformer(row, tf.float32)
