# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Invariances of the whole model; block_test.py compares with the oracle."""

import dataclasses
import functools
import itertools
import json
import pathlib

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import ModelConfig
from palm_mtf.model.dims import model_dims
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from tests import oracle
from tests.cases import slow
from tests.mtf_testing import (
  LAYOUTS,
  SINGLE,
  mesh_layout,
  random_documents,
  random_tokens,
  relative_error,
  run_model,
  small_config,
)

Z_LOSS = 0.1  # large, so that its gradient counts


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
    tokens = batch["inputs"][row, inside]
    alone["inputs"][len(documents), : inside.sum()] = tokens
    documents.append(packed[row, inside])
  logits = run_model(config, params, alone, backward=False).logits
  given = zip(documents, logits, alone["inputs"], strict=True)
  for document, seen, inputs in given:
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
    slow(layout, *form, unless=not (layout in ONE_DIMENSION or (i + j) % 2))
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
    tokens = mtf.zeros(mesh, [dims.batch, dims.length], tf.int32)
    Palm(config, dims, TrainedWeights(mesh, config, dims)).logits(tokens)
    return {v.name: v.shape.to_integer_list for v in mesh.graph.all_variables}


@pytest.mark.parametrize("block", ["parallel", "serial"])
@pytest.mark.parametrize("attention", ["multi_query", "multi_head"])
def test_variables_are_those_of_the_golden_file(block, attention):
  """A renamed variable breaks checkpoints; then this file's diff shows it."""
  golden = pathlib.Path(__file__).with_name("palm_variables.json")
  variables = _variables(small_config(block=block, attention=attention))
  assert variables == json.loads(golden.read_text())[f"{block} {attention}"]
