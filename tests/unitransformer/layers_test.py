# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A Unitransformer of our layers trains and decodes as our model does.

architecture/block_test.py compares its logits, loss and gradients.
"""

import itertools

import numpy as np
import pytest
from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError
from palm_mtf.foreign_models import DeviceMesh, PodTraining
from palm_mtf.unitransformer import (
  Attention,
  Mlp,
  MultiQueryAttention,
  sublayer_norm,
)
from tests import oracle
from tests.blocks import MIXTURES, block_config, check, make_case
from tests.cases import slow
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  relative_error,
  small_config,
)
from tests.unitransformer.runs_of_layers import (
  FLOAT32,
  as_result,
  configured,
  logits_of,
  of_loss,
  our_name,
  run,
  sampling,
  split_by,
)
from tests.unitransformer.simulated_tpus import run_on_simulated_tpus

PALM = "layer_norm parallel multi_query"
SPLIT = mesh_layout("all over data and model")


def case_of_one_layer():
  """Returns PaLM's block, with two rows."""
  return make_case(PALM, num_layers=1)


def test_each_device_of_mesh_tensorflow_s_tpu_program_equals_the_oracle():
  case = case_of_one_layer()
  devices = run_on_simulated_tpus(
    lambda mesh: of_loss(case.config, mesh, case.batch),
    case.params,
    "all over data and model",
  )
  assert len(devices) == 4
  for values in devices:
    check(case, as_result(values))


@pytest.mark.parametrize(
  "mesh",
  [
    # CPUs run our C++ operations.
    DeviceMesh(mesh_shape="model:2", layout="heads:model,d_ff:model"),
    slow(
      DeviceMesh(
        mesh_shape="data:2,model:2",
        layout="batch:data,heads:model,d_ff:model",
        tpu="v4-8",
      )
    ),
  ],
  ids=["CPUs", "rehearsed TPUs"],
)
def test_foreign_models_train_the_layers_with_the_loss_of_our_model(
  mesh, monkeypatch
):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  config = small_config(num_layers=1)
  targets = case_of_one_layer().batch["targets"]

  def loss_of(mesh, features):
    with configured(config) as model:
      _, loss = model.call_simple(
        transformer.autoregressive_inputs(features["targets"]),
        features["targets"],
        compute_loss=True,
        variable_dtype=FLOAT32,
      )
    return loss

  inputs = np.zeros_like(targets)
  inputs[:, 1:] = targets[:, :-1]
  with PodTraining(
    loss_of,
    {"targets": ("int32", f"length:{config.sequence_length}")},
    mesh=mesh,
    optimizer=PALM_OPTIMIZER,
    global_batch_size=2,
  ) as training:
    for _ in range(2):
      params = {our_name(x): y for x, y in training.variables().items()}
      loss = training.step({"targets": targets})["loss"]
      exact = oracle.loss(config, params, inputs, targets, z_loss=1e-4)
      assert loss == pytest.approx(sum(exact), rel=1e-5)


# --- Decoding ----------------------------------------------------------------

EOS = 1  # the id that Mesh TensorFlow's beam search takes as the end
_FULL = "transformer.Unitransformer.input_full_attention = True"
PROMPTS = [[5, 9], [40, 7, 13, 21, 3], [8, 2, 30], [17]]


def dependent_parameters(config):
  """Returns parameters such that tokens depend on more than the last token."""
  params = oracle.random_parameters(config, seed=1)
  return {**params, "embedding": 0.1 * params["embedding"]}


@pytest.mark.parametrize(
  ("name", "layout", "lines"),
  [
    ("in groups", SINGLE, ()),
    ("GPT-2 with ALiBi", SINGLE, ()),
    # A text continues after inputs that attend in both directions.
    (PALM, SINGLE, (_FULL,)),
    *(slow(x, SINGLE, ()) for x in (PALM, *list(MIXTURES)[2:])),
    *(slow(x, SPLIT, ()) for x in (PALM, *list(MIXTURES)[:2])),
  ],
)
def test_greedy_tokens_with_cached_keys_are_the_oracle_s(name, layout, lines):
  config = block_config(name)
  params = dependent_parameters(config)
  prompts = [PROMPTS[1]] if lines else PROMPTS
  values = run(sampling(config, prompts, *lines), params, layout)
  for row, prompt in zip(values["tokens"], prompts, strict=True):
    size = len(prompt)
    np.testing.assert_array_equal(row[:size], prompt)
    inputs = np.array([[0, *row[:-1]]])
    prefix = np.arange(config.sequence_length)[None] <= size if lines else None
    exact = oracle.forward(config, params, inputs, prefix=prefix)
    np.testing.assert_array_equal(exact.argmax(-1)[0, size:], row[size:])


@pytest.mark.slow
def test_each_device_of_a_tpu_program_decodes_the_tokens_of_one_cpu():
  config = small_config(num_layers=1, sequence_length=5)
  params = dependent_parameters(config)
  build = sampling(config, [[1, 2], [3], [4, 5], [6, 7, 8]])
  one = run(build, params)
  devices = run_on_simulated_tpus(
    build, params, "all over data and model", config.sequence_length
  )
  assert len(devices) == 4
  for values in devices:
    np.testing.assert_array_equal(values["tokens"], one["tokens"])


def likeliest(config, params):
  """Returns the likeliest of all texts that end, padded with zeros."""
  length = config.sequence_length
  texts = itertools.product(range(config.vocab_size), repeat=length)
  texts = np.array(list(texts), np.int32)
  inputs = np.zeros_like(texts)
  inputs[:, 1:] = texts[:, :-1]
  logits = oracle.forward(config, params, inputs)
  logits -= logits.max(-1, keepdims=True)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  log_p = np.take_along_axis(log_p, texts[..., None], -1)[..., 0]
  after = np.cumsum(texts == EOS, axis=1) - (texts == EOS)
  log_p[after > 0] = 0
  log_p[~(texts == EOS).any(axis=1)] = -np.inf
  texts[after > 0] = 0
  return texts[log_p.sum(1).argmax()]


def test_a_beam_search_that_is_wide_enough_finds_the_likeliest_text():
  config = small_config(vocab_size=5, sequence_length=3)
  params = oracle.random_parameters(config, seed=41)

  def build(mesh):
    dims = mtf.Dimension("batch", 1), mtf.Dimension("beam", 40)
    shape = mtf.Shape([*dims, mtf.Dimension("length", 3)])
    with configured(config) as model:
      texts = model.beam_search(
        mtf.zeros(mesh, shape, tf.int32),
        mtf.constant(mesh, 3, dtype=tf.int32),
        variable_dtype=FLOAT32,
        alpha=0.0,
      )
    return {"texts": texts}

  values = run(build, params)
  expected = likeliest(config, params)
  assert np.count_nonzero(expected) == 3
  np.testing.assert_array_equal(values["texts"], [expected])


# --- Attention and batches that our model lacks ------------------------------


def test_an_encoder_attends_in_both_directions():
  case = case_of_one_layer()
  line = "transformer.Unitransformer.autoregressive = False"
  found = logits_of(case.config, case.params, case.batch, line)
  inputs = case.batch["inputs"]
  given = case.config, case.params, inputs
  exact = oracle.forward(*given, prefix=np.ones_like(inputs))
  assert relative_error(found, exact) < 1e-5


def test_inputs_of_a_text_attend_in_both_directions():
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=7)
  ends = np.array([2, 5, 0, 8])
  shape = [len(ends), config.sequence_length]
  targets = np.random.default_rng(8).integers(EOS + 1, 44, shape, np.int32)
  targets[range(4), ends] = EOS
  inputs = np.zeros_like(targets)
  inputs[:, 1:] = targets[:, :-1]
  # The first token after the inputs, EOS, is read in this region too.
  prefix = np.arange(config.sequence_length) <= ends[:, None] + 1
  batch = {"inputs": inputs, "targets": targets}
  found = logits_of(config, params, batch, _FULL)
  exact = oracle.forward(config, params, inputs, prefix=prefix)
  assert relative_error(found, exact) < 1e-5


@pytest.mark.parametrize("split", ["batch", "outer_batch"])
def test_a_batch_of_two_dimensions_has_the_logits_of_one(split):
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=10)
  inputs = np.random.default_rng(11).integers(1, 44, [4, 9], np.int32)
  dims = [mtf.Dimension("outer_batch", 2), mtf.Dimension("batch", 2)]
  how = {"layout": split_by("data:2", f"{split}:data"), "batch_dims": dims}
  found = logits_of(config, params, {"inputs": inputs}, **how)
  assert relative_error(found, oracle.forward(config, params, inputs)) < 1e-5


# --- Refusals ----------------------------------------------------------------

SIZES = {"num_heads": 4, "d_kv": 10}


def build_logits(*lines, layout=SINGLE):
  case = case_of_one_layer()
  logits_of(case.config, case.params, case.batch, *lines, layout=layout)


@pytest.mark.parametrize(
  ("build", "message"),
  [
    (
      lambda: Attention(**SIZES, attention="grouped_query", num_kv_heads=3),
      'Attention.num_kv_heads = 3 and attention = "grouped_query": give a '
      "divisor of num_heads = 4.",
    ),
    (
      lambda: Attention(**SIZES, rotary_fraction=0.3),
      "Attention.rotary_fraction * d_kv = 3: rotary embedding turns pairs of "
      "numbers, so rotary_fraction * d_kv is even; use 4.",
    ),
    (
      lambda: Attention(**SIZES, qk_norm="rms_norm_all_heads"),
      "Attention.qk_norm = 'rms_norm_all_heads': Mesh TensorFlow's layout may "
      "split the heads, all of which the norm needs; use another norm.",
    ),
    (
      lambda: Mlp(d_ff=4, mpl="gelu"),
      "setting of Mlp = 'mpl' (did you mean \"mlp\"?): choose one of 'd_ff', "
      "'mlp', 'biases'.",
    ),
    (
      lambda: MultiQueryAttention(num_heads=0, d_kv=8),
      "MultiQueryAttention.num_heads = 0: give a whole number of at least 1.",
    ),
    (
      lambda: sublayer_norm(None, None, None, norm="layernorm"),
      "sublayer_norm.norm = 'layernorm' (did you mean \"layer_norm\"?): choose "
      "one of 'layer_norm', 'layer_norm_bias', 'rms_norm', 'rms_norm_1p'.",
    ),
    (
      lambda: build_logits("transformer.Unitransformer.ensemble = 2"),
      "Unitransformer.ensemble = 2: the layers of palm_mtf.unitransformer have "
      "the weights of one model; leave ensemble out.",
    ),
    (
      lambda: build_logits(layout=split_by("model:2", "d_model:model")),
      "transformer/block_000/layer_000/norm needs all of d_model, which the "
      "layout splits: take d_model out of the layout rules.",
    ),
  ],
)
def test_what_cannot_work_is_refused_in_one_line(build, message):
  with pytest.raises(UserError) as error:
    build()
  assert str(error.value).splitlines()[0] == message  # gin appends the call
