# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A Unitransformer of our layers is our model, and decodes the same texts."""

import dataclasses
import itertools

import numpy as np
import pytest
from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError
from palm_mtf.foreign_models import DeviceMesh, PodsConfig, PodTraining
from palm_mtf.unitransformer import (
  Attention,
  Mlp,
  MultiQueryAttention,
  sublayer_norm,
)
from tests import oracle
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  MeshLayout,
  mesh_layout,
  random_documents,
  relative_error,
  run_model,
  small_config,
)
from tests.unitransformer.runs_of_layers import (
  FLOAT32,
  Run,
  assert_close,
  assert_decodes_like_our_model,
  computed,
  configured,
  imported,
  of_loss,
  our_name,
  parameters,
  sampling,
  tokens_of,
)
from tests.unitransformer.simulated_tpus import run_on_simulated_tpus


@pytest.mark.parametrize(
  "form",
  [
    {},
    pytest.param({"norm": "rms_norm"}, marks=pytest.mark.slow),
    {"block": "serial"},
  ],
  ids=["parallel", "rms_norm", "serial"],
)
def test_logits_loss_and_gradients_are_those_of_our_model_to_1e_5(form):
  config = small_config(**form)
  params = oracle.random_parameters(config, seed=1)
  batch = tokens_of(config, seed=2)
  ours = run_model(config, params, batch)
  theirs = computed(config, params, batch)
  assert relative_error(theirs.pop("logits"), ours.logits) < 1e-5
  assert theirs.pop("loss") == pytest.approx(ours.loss + ours.z_loss, rel=1e-5)
  assert theirs.keys() == ours.gradients.keys()
  for name, gradient in theirs.items():
    assert relative_error(gradient, ours.gradients[name]) < 1e-5, name


def test_documents_of_a_packed_row_have_the_logits_of_our_model():
  config = small_config()
  params = oracle.random_parameters(config, seed=3)
  batch = random_documents(config, batch_size=4, seed=4)
  ours = run_model(config, params, batch, backward=False).logits
  del batch["loss_weights"]
  theirs = computed(config, params, batch)["logits"]
  inside = batch["segments"] > 0
  assert relative_error(theirs[inside], ours[inside]) < 1e-5


def test_bfloat16_activations_agree_with_the_oracle_to_their_8_bits():
  """One rounding is 2^-9 = 0.2%; a logit has some twenty roundings."""
  config = small_config()
  params = oracle.random_parameters(config, seed=1)
  inputs = tokens_of(config, seed=2)["inputs"]

  def build(mesh):
    with configured(config) as model:
      logits, _ = model.call_simple(
        imported(mesh, {"inputs": inputs})["inputs"],
        None,
        compute_loss=False,
        variable_dtype=mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16),
      )
    return {"logits": mtf.cast(logits, tf.float32)}

  (values,) = Run(build, params).values
  exact = oracle.forward(config, params, inputs)
  assert relative_error(values["logits"], exact) < 0.02


def trained(config, params, batch, layout):
  """Returns the losses of steps on one batch, and each step's gradients."""

  def build(mesh):
    gradients = of_loss(config, mesh, batch)
    variables = mesh.graph.trainable_variables
    optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.02)
    optimizer.apply_grads(
      [gradients[our_name(x.name)] for x in variables], variables
    )
    return gradients

  return Run(build, params, layout, num_steps=12).values


@pytest.mark.slow
def test_training_on_a_mesh_that_splits_batch_and_model_equals_one_device():
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=5)
  batch = tokens_of(config, seed=6)
  one = trained(config, params, batch, SINGLE)
  four = trained(config, params, batch, mesh_layout("all over data and model"))
  for name, value in one[0].items():
    assert relative_error(four[0][name], value) < 1e-5, name
  losses = [[step["loss"] for step in steps] for steps in (one, four)]
  np.testing.assert_allclose(*losses, rtol=1e-3)
  assert losses[0][-1] < 0.5 * losses[0][0]


def test_each_device_of_mesh_tensorflow_s_tpu_program_has_what_one_cpu_has():
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=7)
  batch = tokens_of(config, seed=8)
  one = computed(config, params, batch)
  devices = run_on_simulated_tpus(
    lambda mesh: of_loss(config, mesh, batch),
    params,
    "all over data and model",
  )
  assert len(devices) == 4
  for values in devices:
    for name, value in one.items():
      assert relative_error(values[name], value) < 1e-5, name


@pytest.mark.slow
def test_recomputed_layers_have_the_same_gradients():
  config = small_config()
  params = oracle.random_parameters(config, seed=9)
  batch = tokens_of(config, seed=10)
  kept = computed(config, params, batch)
  again = computed(
    config, params, batch, "transformer.LayerStack.recompute_grads = True"
  )
  for name, value in kept.items():
    assert relative_error(again[name], value) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one device", "all over data and model"])
def test_gradients_of_mesh_tensorflow_s_microbatches_add_up(layout):
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=13)
  batch = tokens_of(config, seed=14)

  def build(mesh):
    def loss_of(features):
      with configured(config) as model:
        _, loss = model.call_simple(
          features["inputs"],
          features["targets"],
          compute_loss=True,
          variable_dtype=FLOAT32,
          num_microbatches=2,
        )
      return {"loss": loss}

    whole = mtf.Dimension("batch", 4)
    gradients, outputs = mtf.serialize_training_step(
      imported(mesh, batch), loss_of, whole, num_splits=2
    )
    names = [our_name(x.name) for x in mesh.graph.trainable_variables]
    return {**outputs, **dict(zip(names, gradients, strict=True))}

  mesh = SINGLE if layout == "one device" else mesh_layout(layout)
  (parts,) = Run(build, params, mesh).values
  one = computed(config, params, batch)
  del one["logits"]
  assert_close(parts, one)


def test_foreign_models_train_the_layers_with_the_loss_of_our_model():
  """On this mesh, CPUs run our C++ operations."""
  config = small_config()
  batch = tokens_of(config, seed=15)
  del batch["inputs"]

  def loss_of(mesh, features):
    with configured(config) as model:
      _, loss = model.call_simple(
        transformer.autoregressive_inputs(features["targets"]),
        features["targets"],
        compute_loss=True,
        variable_dtype=FLOAT32,
      )
    return loss

  with PodTraining(
    loss_of,
    {"targets": ("int32", f"length:{config.sequence_length}")},
    mesh=DeviceMesh(mesh_shape="model:2", layout="heads:model,d_ff:model"),
    optimizer=dataclasses.replace(PALM_OPTIMIZER, z_loss=0.0),
    global_batch_size=4,
    pods=PodsConfig(num_pods=2),
  ) as training:
    for _ in range(2):
      variables = {our_name(x): y for x, y in training.variables().items()}
      params = {x: variables[x] for x in oracle.parameter_shapes(config)}
      loss = training.step(batch)["loss"]
      ours = run_model(config, params, tokens_of(config, seed=15))
      assert loss == pytest.approx(ours.loss + ours.z_loss, rel=1e-5)


@pytest.mark.slow
def test_a_mesh_that_splits_positions_gives_what_one_device_does():
  config = small_config(sequence_length=8)
  params = oracle.random_parameters(config, seed=11)
  batch = tokens_of(config, seed=12)
  one = computed(config, params, batch)
  layout = mesh_layout("all over data and model")
  # palm_mtf has no such layout.
  object.__setattr__(layout, "layout", "batch:data,length:model")
  (four,) = Run(
    lambda mesh: of_loss(config, mesh, batch), params, layout
  ).values
  for name, value in one.items():
    assert relative_error(four[name], value) < 1e-5, name


EOS = 1  # the id that Mesh TensorFlow's beam search takes as the end


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one device", "all over data and model"])
def test_greedy_tokens_with_cached_keys_equal_our_decoders(layout):
  mesh = SINGLE if layout == "one device" else mesh_layout(layout)
  assert_decodes_like_our_model(small_config(), mesh)


@pytest.mark.slow
def test_each_device_of_a_tpu_program_decodes_the_tokens_of_one_cpu():
  config = small_config(num_layers=1, sequence_length=5)
  params = parameters(config, seed=1)
  build = sampling(config, [[1, 2], [3], [4, 5], [6, 7, 8]])
  (one,) = Run(build, params).values
  devices = run_on_simulated_tpus(
    build, params, "all over data and model", config.sequence_length
  )
  assert len(devices) == 4
  for values in devices:
    np.testing.assert_array_equal(values["tokens"], one["tokens"])


def likeliest(config, params):
  """Returns the likeliest of all texts that end, padded with zeros."""
  length = config.sequence_length
  texts = np.array(
    list(itertools.product(range(config.vocab_size), repeat=length)), np.int32
  )
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

  (values,) = Run(build, params).values
  expected = likeliest(config, params)
  assert np.count_nonzero(expected) == 3
  np.testing.assert_array_equal(values["texts"], [expected])


# --- Other settings ----------------------------------------------------------

_GROUPS = dict(attention="grouped_query", num_kv_heads=2)
FORMS = {
  "in groups": dict(
    _GROUPS,
    norm="rms_norm_1p",
    mlp="geglu_tanh",
    rotary_fraction=0.4,
    rotary_pairs="neighbours",
    rotary_base=5e5,
    biases="qkv",
  ),
  "GPT-2 with ALiBi": dict(
    block="serial",
    norm="layer_norm_bias",
    norm_epsilon=1e-4,
    attention="multi_head",
    positions="alibi",
    mlp="gelu_tanh",
    biases="o,mlp",
  ),
  "Transformer-XL": dict(
    _GROUPS, positions="transformer_xl", attention_window=4, mlp="relu"
  ),
  "T5": dict(block="serial", norm="rms_norm", positions="t5", mlp="geglu"),
  "multi-head": dict(attention="multi_head", mlp="relu2", qk_norm="rms_norm"),
  "no positions": dict(positions="none", mlp="gelu", biases="mlp"),
}
# The others only when slow tests run.
_FAST = ("in groups", "GPT-2 with ALiBi")


@pytest.fixture(
  params=[
    pytest.param(x, marks=() if x in _FAST else pytest.mark.slow) for x in FORMS
  ]
)
def config(request):
  """The settings of a small model."""
  return small_config(**FORMS[request.param])


def test_other_settings_have_the_logits_of_the_oracle_and_our_gradients(config):
  params = oracle.random_parameters(config, seed=1)
  batch = tokens_of(config, seed=2)
  ours = run_model(config, params, batch)
  theirs = computed(config, params, batch)
  assert theirs.keys() == {"logits", "loss", *ours.gradients}
  assert_close(theirs, ours.gradients)
  exact = oracle.forward(config, params, batch["inputs"])
  assert_close(theirs, {"logits": exact})


def test_greedy_tokens_with_other_settings_equal_our_decoders(config):
  assert_decodes_like_our_model(config)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["in groups", "GPT-2 with ALiBi"])
def test_a_mesh_that_splits_heads_gives_what_one_device_does(form):
  config, layout = small_config(**FORMS[form]), "all over data and model"
  params = oracle.random_parameters(config, seed=3)
  batch = random_documents(config, batch_size=4, seed=4)
  del batch["loss_weights"]
  batch["targets"] = np.maximum(batch["targets"], 1)
  one = computed(config, params, batch)
  assert_close(computed(config, params, batch, layout=mesh_layout(layout)), one)
  again = "transformer.LayerStack.recompute_grads = True"
  assert_close(computed(config, params, batch, again), one)
  assert_decodes_like_our_model(config, mesh_layout(layout))


def test_an_encoder_attends_in_both_directions():
  config = small_config()
  params = oracle.random_parameters(config, seed=5)
  batch = tokens_of(config, seed=6)
  line = "transformer.Unitransformer.autoregressive = False"
  found = computed(config, params, batch, line)["logits"]
  prefix = np.ones_like(batch["inputs"])
  exact = oracle.forward(config, params, batch["inputs"], prefix=prefix)
  assert relative_error(found, exact) < 1e-5


_FULL = "transformer.Unitransformer.input_full_attention = True"


def test_inputs_of_a_text_attend_in_both_directions():
  config = small_config()
  params = oracle.random_parameters(config, seed=7)
  batch = tokens_of(config, seed=8)
  ends = [2, 5, 0, 8]
  batch["targets"] = np.maximum(batch["targets"], EOS + 1)
  batch["targets"][range(4), ends] = EOS
  batch["inputs"][:, 1:] = batch["targets"][:, :-1]
  # The first token after the inputs, EOS, is read in this region too.
  prefix = np.arange(config.sequence_length) <= np.array(ends)[:, None] + 1
  found = computed(config, params, batch, _FULL)["logits"]
  exact = oracle.forward(config, params, batch["inputs"], prefix=prefix)
  assert relative_error(found, exact) < 1e-5


def test_a_text_continues_after_inputs_that_attend_in_both_directions():
  config = small_config()
  params = oracle.random_parameters(config, seed=9)
  prompt = [3, 4, 5, 6]
  build = sampling(config, [prompt], _FULL)
  tokens = Run(build, params).values[0]["tokens"][0]
  np.testing.assert_array_equal(tokens[:4], prompt)
  inputs = np.array([[0, *tokens[:-1]]])
  prefix = np.arange(config.sequence_length)[None] <= len(prompt)
  exact = oracle.forward(config, params, inputs, prefix=prefix)
  np.testing.assert_array_equal(exact.argmax(-1)[0, 4:], tokens[4:])


@pytest.mark.parametrize("split", ["batch", "outer_batch"])
def test_a_batch_of_two_dimensions_has_the_logits_of_one(split):
  config, layout = small_config(), mesh_layout("batch over data")
  params = oracle.random_parameters(config, seed=10)
  inputs = tokens_of(config, seed=11)["inputs"]
  # palm_mtf has no layout of outer_batch.
  object.__setattr__(layout, "layout", f"{split}:data")
  dims = [mtf.Dimension("outer_batch", 2), mtf.Dimension("batch", 2)]
  shape = mtf.Shape([*dims, mtf.Dimension("length", config.sequence_length)])

  def build(mesh):
    tokens = tf.constant(inputs.reshape(shape.to_integer_list))
    with configured(config) as model:
      logits, _ = model.call_simple(
        mtf.import_tf_tensor(mesh, tokens, shape),
        None,
        compute_loss=False,
        variable_dtype=FLOAT32,
      )
    return {"logits": logits}

  (values,) = Run(build, params, layout).values
  exact = oracle.forward(config, params, inputs)
  assert relative_error(values["logits"].reshape(exact.shape), exact) < 1e-5


@pytest.mark.parametrize(
  ("layer", "settings", "message"),
  [
    (
      Attention,
      {"attention": "grouped_query", "num_kv_heads": 3},
      'Attention.num_kv_heads = 3 and attention = "grouped_query": give a '
      "divisor of num_heads = 4.",
    ),
    (
      Attention,
      {"rotary_fraction": 0.3},
      "Attention.rotary_fraction * d_kv = 3: rotary embedding turns pairs of "
      "numbers, so rotary_fraction * d_kv is even; use 4.",
    ),
    (
      Attention,
      {"d_kv": None},
      "Attention.d_kv = None: give a whole number of at least 1.",
    ),
    (
      Mlp,
      {"mpl": "gelu"},
      "setting of Mlp = 'mpl' (did you mean \"mlp\"?): choose one of 'd_ff', "
      "'mlp', 'biases'.",
    ),
  ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(
  layer, settings, message
):
  sizes = {"d_ff": 4} if layer is Mlp else {"num_heads": 4, "d_kv": 10}
  with pytest.raises(UserError) as error:
    layer(**{**sizes, **settings})
  assert str(error.value).splitlines()[0] == message  # gin appends the call


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    (
      {"num_heads": 4, "d_kv": 9},
      "MultiQueryAttention.d_kv = 9: rotary embedding turns pairs of numbers, "
      "so d_kv is even; use 10.",
    ),
    (
      {"num_heads": 0, "d_kv": 8},
      "MultiQueryAttention.num_heads = 0: give a whole number of at least 1.",
    ),
  ],
)
def test_sizes_that_cannot_work_are_refused_in_one_line(sizes, message):
  with pytest.raises(UserError) as error:
    MultiQueryAttention(**sizes)
  # gin appends the call.
  assert str(error.value).splitlines()[0] == message


# gin appends the call after the first line.


def test_an_unknown_norm_is_refused_with_the_nearest():
  with pytest.raises(UserError) as error:
    sublayer_norm(None, None, None, norm="layernorm")
  assert str(error.value).splitlines()[0] == (
    "sublayer_norm.norm = 'layernorm' (did you mean \"layer_norm\"?): choose "
    "one of 'layer_norm', 'layer_norm_bias', 'rms_norm', 'rms_norm_1p'."
  )


def logits(layout, *lines):
  config = small_config()
  tokens = {"inputs": np.zeros([4, config.sequence_length], np.int32)}

  def build(mesh):
    with configured(config, *lines) as model:
      logits, _ = model.call_simple(
        imported(mesh, tokens)["inputs"],
        None,
        compute_loss=False,
        variable_dtype=FLOAT32,
      )
    return {"logits": logits}

  Run(build, oracle.random_parameters(config, seed=1), layout)


def test_an_ensemble_is_refused():
  with pytest.raises(UserError) as error:
    logits(SINGLE, "transformer.Unitransformer.ensemble = 2")
  assert str(error.value).splitlines()[0] == (
    "Unitransformer.ensemble = 2: the layers of palm_mtf.unitransformer have "
    "the weights of one model; leave ensemble out."
  )


def test_a_layout_that_splits_d_model_is_refused():
  layout = MeshLayout(mesh_shape="model:2", layout="heads:model")
  object.__setattr__(
    layout, "layout", "d_model:model"
  )  # palm_mtf has no such layout
  with pytest.raises(UserError) as error:
    logits(layout)
  assert str(error.value) == (
    "transformer/block_000/layer_000/norm needs all of d_model, which the "
    "layout splits: take d_model out of the layout rules."
  )
