# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole model against the oracles, and its invariances."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import ModelConfig
from palm_mtf.model.dims import model_dims
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from tests import oracle, oracle_jax
from tests.accounting.published_sizes import PALM_8B, PALM_62B, PALM_540B
from tests.mtf_testing import (
  LAYOUTS,
  SINGLE,
  mesh_layout,
  random_documents,
  random_examples,
  random_tokens,
  relative_error,
  run_model,
  small_config,
  without_compiler,
)

FORMS = [
  dict(norm=norm, block=block, attention=attention)
  for norm, block, attention in itertools.product(
    ["layer_norm", "rms_norm"],
    ["parallel", "serial"],
    ["multi_query", "multi_head"],
  )
]
FORM_NAMES = [" ".join(form.values()) for form in FORMS]
NO_FINAL_SCALE = dict(FORMS[0], final_norm_scale="none")
# The first four hold every pair of choices.
PAIRS = [FORMS[i] for i in (0, 3, 5, 6)] + [
  pytest.param(FORMS[i], marks=pytest.mark.slow) for i in (1, 2, 4, 7)
]
PAIR_NAMES = [FORM_NAMES[i] for i in (0, 3, 5, 6, 1, 2, 4, 7)]
Z_LOSS = 0.1  # large, so that its gradient counts


@pytest.mark.parametrize(
  "form",
  [*FORMS, NO_FINAL_SCALE],
  ids=[*FORM_NAMES, "no final scale"],
)
def test_float32_agrees_with_the_oracles_to_1e_5(form):
  config = small_config(**form)
  params = oracle.random_parameters(config, seed=1)
  tokens = random_tokens(config, batch_size=4, seed=2)
  result = run_model(config, params, tokens, z_loss=Z_LOSS)
  logits = oracle.forward(config, params, tokens["inputs"])
  loss, z_loss, gradients = oracle_jax.loss_and_gradients(
    config, params, tokens["inputs"], tokens["targets"], Z_LOSS
  )
  assert relative_error(result.logits, logits) < 1e-5
  assert result.loss == pytest.approx(loss, rel=1e-5)
  assert result.z_loss == pytest.approx(z_loss, rel=1e-5)
  assert result.gradients.keys() == gradients.keys()
  for name, gradient in gradients.items():
    assert relative_error(result.gradients[name], gradient) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(
  "dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.05)]
)
@pytest.mark.parametrize("form", PAIRS[:2], ids=PAIR_NAMES[:2])
def test_without_a_compiler_the_model_is_the_oracles_too(
  form, dtype, tolerance, monkeypatch
):
  without_compiler(monkeypatch)
  config = small_config(activation_dtype=dtype, **form)
  params = oracle.random_parameters(config, seed=1)
  tokens = random_tokens(config, batch_size=4, seed=2)
  result = run_model(config, params, tokens, z_loss=Z_LOSS)
  _, _, gradients = oracle_jax.loss_and_gradients(
    config, params, tokens["inputs"], tokens["targets"], Z_LOSS
  )
  for name, gradient in gradients.items():
    error = relative_error(result.gradients[name], gradient)
    assert error < tolerance, name


@pytest.mark.parametrize("form", PAIRS, ids=PAIR_NAMES)
def test_bfloat16_agrees_with_the_oracles_to_its_8_bits(form):
  """One rounding is 2^-9 = 0.2%; a gradient has some twenty roundings."""
  config = small_config(activation_dtype="bfloat16", **form)
  params = oracle.random_parameters(config, seed=1)
  tokens = random_tokens(config, batch_size=4, seed=2)
  result = run_model(config, params, tokens, z_loss=Z_LOSS)
  logits = oracle.forward(config, params, tokens["inputs"])
  loss, z_loss, gradients = oracle_jax.loss_and_gradients(
    config, params, tokens["inputs"], tokens["targets"], Z_LOSS
  )
  assert relative_error(result.logits, logits) < 0.02
  assert result.loss == pytest.approx(loss, rel=0.01)
  assert result.z_loss == pytest.approx(z_loss, rel=0.01)
  for name, gradient in gradients.items():
    assert relative_error(result.gradients[name], gradient) < 0.05, name


@pytest.mark.parametrize("form", PAIRS[:4], ids=PAIR_NAMES[:4])
@pytest.mark.parametrize("batch_of", [random_documents, random_examples])
def test_documents_weights_and_prefixes_agree_with_the_oracles_to_1e_5(
  form, batch_of
):
  config = small_config(**form)
  params = oracle.random_parameters(config, seed=7)
  batch = batch_of(config, batch_size=4, seed=8)
  result = run_model(config, params, batch, z_loss=Z_LOSS)
  masks = batch["segments"], batch.get("prefix")
  logits = oracle.forward(config, params, batch["inputs"], *masks)
  loss, z_loss = oracle.loss(config, params, **batch, z_loss=Z_LOSS)
  *_, gradients = oracle_jax.loss_and_gradients(
    config, params, **batch, z_loss=Z_LOSS
  )
  assert relative_error(result.logits, logits) < 1e-5
  assert result.loss == pytest.approx(loss, rel=1e-5)
  assert result.z_loss == pytest.approx(z_loss, rel=1e-5)
  for name, gradient in gradients.items():
    assert relative_error(result.gradients[name], gradient) < 1e-5, name


def test_a_document_has_the_same_logits_inside_a_row_and_alone_at_its_start():
  """So positions need not restart with each document."""
  config = small_config()
  params = oracle.random_parameters(config, seed=9)
  batch = random_documents(config, batch_size=4, seed=10)
  packed = run_model(config, params, batch, backward=False).logits
  alone = {name: np.zeros([8, 9], np.int32) for name in ("inputs", "targets")}
  documents = []
  for row, segment in itertools.product(range(4), (1, 2)):
    inside = batch["segments"][row] == segment
    alone["inputs"][len(documents), : inside.sum()] = batch["inputs"][
      row, inside
    ]
    documents.append(packed[row, inside])
  logits = run_model(config, params, alone, backward=False).logits
  for document, seen, inputs in zip(
    documents, logits, alone["inputs"], strict=True
  ):
    length = len(document)
    assert relative_error(document, seen[:length]) < 1e-5
    exact = oracle.forward(config, params, inputs[np.newaxis, :length])[0]
    assert relative_error(document, exact) < 1e-5


@pytest.mark.parametrize("attention", ["multi_query", "multi_head"])
def test_tokens_of_one_segment_do_not_change_another_s_logits_by_a_bit(
  attention,
):
  config = small_config(attention=attention)
  params = oracle.random_parameters(config, seed=11)
  batch = random_tokens(config, batch_size=2, seed=12)
  batch["segments"] = np.repeat(np.int32([[1, 2, 0], [5, 4, 5]]), 3, axis=1)
  before = run_model(config, params, batch, backward=False).logits
  changed = np.copy(batch["inputs"])
  changed[:, 3:6] = (changed[:, 3:6] + 7) % config.vocab_size
  batch["inputs"] = changed
  after = run_model(config, params, batch, backward=False).logits
  others = [0, 1, 2, 6, 7, 8]
  np.testing.assert_array_equal(after[:, others], before[:, others])
  assert np.all(np.any(after[:, 3:6] != before[:, 3:6], axis=-1))


def test_what_padding_holds_changes_neither_loss_nor_any_gradient_by_a_bit():
  config = small_config()
  params = oracle.random_parameters(config, seed=13)
  batch = random_documents(config, batch_size=4, seed=14)
  padding = batch["segments"] == 0
  assert padding.any()
  other = {name: np.copy(value) for name, value in batch.items()}
  for name in ("inputs", "targets"):
    other[name][padding] = (other[name][padding] + 5) % config.vocab_size
  one, two = (run_model(config, params, b, z_loss=0.1) for b in (batch, other))
  assert (one.loss, one.z_loss) == (two.loss, two.z_loss)
  for name, gradient in one.gradients.items():
    np.testing.assert_array_equal(two.gradients[name], gradient, err_msg=name)


@pytest.mark.parametrize("attention", ["multi_query", "multi_head"])
def test_future_tokens_do_not_change_past_logits(attention):
  config = small_config(attention=attention)
  params = oracle.random_parameters(config, seed=3)
  tokens = random_tokens(config, batch_size=4, seed=4)
  before = run_model(config, params, tokens, backward=False).logits
  changed = {name: np.copy(value) for name, value in tokens.items()}
  changed["inputs"][:, 5:] = (changed["inputs"][:, 5:] + 7) % config.vocab_size
  after = run_model(config, params, changed, backward=False).logits
  np.testing.assert_array_equal(after[:, :5], before[:, :5])
  assert np.all(np.any(after[:, 5:] != before[:, 5:], axis=-1))


@functools.cache
def _run_on(layout: str | None, block: str, attention: str, rows):
  config = small_config(num_layers=1, block=block, attention=attention)
  if attention == "multi_query":  # in two blocks of positions
    config = dataclasses.replace(config, sequence_length=140)
  return run_model(
    config,
    oracle.random_parameters(config, seed=5),
    rows(config, batch_size=4, seed=6),
    mesh=mesh_layout(layout) if layout else SINGLE,
    z_loss=Z_LOSS,
  )


OF_TOKENS = ("parallel", "multi_query", random_tokens)
OF_DOCUMENTS = ("serial", "multi_head", random_documents)


# Layouts whose splits other layouts cover are slow. For each other layout, one
# of two cases is slow, in turns.
ONE_DIMENSION = {
  "batch over data",
  "heads over model",
  "d_ff over model",
  "vocab over model",
  "vocab over four",
}


@pytest.mark.parametrize(
  "layout, block, attention, rows",
  [
    pytest.param(
      layout,
      *form,
      marks=pytest.mark.slow if layout in ONE_DIMENSION or (i + j) % 2 else (),
    )
    for i, layout in enumerate(LAYOUTS)
    for j, form in enumerate((OF_TOKENS, OF_DOCUMENTS))
  ],
)
def test_layouts_do_not_change_results(layout, block, attention, rows):
  single = _run_on(None, block, attention, rows)
  split = _run_on(layout, block, attention, rows)
  assert relative_error(split.logits, single.logits) < 1e-6
  assert split.loss == pytest.approx(single.loss, rel=1e-6)
  assert split.z_loss == pytest.approx(single.z_loss, rel=1e-6)
  for name, gradient in single.gradients.items():
    # Only the order of float32 sums differs.
    assert relative_error(split.gradients[name], gradient) < 3e-6, name


def _variables(config: ModelConfig) -> dict[str, list[int]]:
  with tf.Graph().as_default():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dims = model_dims(config, 1, SINGLE)
    tokens = mtf.import_tf_tensor(
      mesh,
      tf.zeros([1, config.sequence_length], tf.int32),
      mtf.Shape([dims.batch, dims.length]),
    )
    Palm(config, dims, TrainedWeights(mesh, config, dims)).logits(tokens)
    return {v.name: v.shape.to_integer_list for v in mesh.graph.all_variables}


# PaLM Table 1 prints 8.63, 62.50 and 540.35 billion. The exact counts follow
# from its sizes, with the tied embedding once and without the norms' scales.
@pytest.mark.parametrize(
  "config, published",
  [
    (PALM_8B, 8_631_877_632),
    (PALM_62B, 62_495_129_600),
    (PALM_540B, 540_354_281_472),
  ],
  ids=["8B", "62B", "540B"],
)
def test_full_size_model_holds_exactly_the_published_parameters(
  config, published
):
  variables = _variables(config)
  scales = [s for name, s in variables.items() if name.endswith("/scale")]
  kernels = [s for name, s in variables.items() if not name.endswith("/scale")]
  assert sum(map(math.prod, kernels)) == published
  assert sum(map(math.prod, scales)) == (config.num_layers + 1) * config.d_model


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_variables_are_those_of_the_golden_file(form):
  """A renamed variable breaks checkpoints; then this file's diff shows it."""
  golden = pathlib.Path(__file__).with_name("palm_variables.json")
  key = f"{form['block']} {form['attention']}"
  variables = _variables(small_config(**form))
  assert variables == json.loads(golden.read_text())[key]
