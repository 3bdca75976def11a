# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mesh TensorFlow decodes with our layers what we do."""

import itertools

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import DecodeConfig
from palm_mtf.errors import UserError
from palm_mtf.unitransformer import MultiQueryAttention
from tests import oracle
from tests.decode_testing import EOD, decode
from tests.mtf_testing import SINGLE, mesh_layout, small_config
from tests.unitransformer.runs_of_layers import (
  FLOAT32,
  Run,
  configured,
  imported,
)
from tests.unitransformer.simulated_tpus import run_on_simulated_tpus

EOS = 1  # of Mesh TensorFlow's beam search


def parameters(config, seed):
  """Returns parameters with which tokens depend on more than the last one."""
  params = oracle.random_parameters(config, seed)
  return {**params, "embedding": 0.1 * params["embedding"]}


def padded(config, prompts):
  """Returns prompts with zeros behind them."""
  rows = np.zeros([len(prompts), config.sequence_length], np.int32)
  for row, prompt in zip(rows, prompts, strict=True):
    row[: len(prompt)] = prompt
  return rows


def sampling(config, prompts):
  """Returns what builds the prompts, continued to their end."""

  def build(mesh):
    ids = imported(mesh, {"ids": padded(config, prompts)})["ids"]
    with configured(config) as model:
      tokens = model.sample_autoregressive(
        ids,
        stop_at_token=config.vocab_size,  # none
        temperature=0.0,
        variable_dtype=FLOAT32,
      )
    return {"tokens": tokens}

  return build


@pytest.mark.parametrize("layout", ["one device", "all over data and model"])
def test_greedy_tokens_with_cached_keys_are_those_of_our_decoder(layout):
  config = small_config()
  params = parameters(config, seed=1)
  rng = np.random.default_rng(2)
  prompts = [list(rng.integers(1, 44, size=n)) for n in (2, 5, 3, 1)]
  mesh = SINGLE if layout == "one device" else mesh_layout(layout)
  (theirs,) = Run(sampling(config, prompts), params, mesh).values
  ours = decode(
    config, params, prompts, DecodeConfig(temperature=0.0), max_tokens=4
  ).tokens
  for row, prompt, expected in zip(
    theirs["tokens"], prompts, ours[:, 0], strict=True
  ):
    np.testing.assert_array_equal(row[: len(prompt)], prompt)
    expected = list(expected)
    end = expected.index(EOD) + 1 if EOD in expected else 4
    assert list(row[len(prompt) :][:end]) == expected[:end]


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
  """Returns the likeliest text that ends, of all there are, with zeros."""
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
def test_sizes_that_cannot_work_are_refused_in_a_line(sizes, message):
  with pytest.raises(UserError) as error:
    MultiQueryAttention(**sizes)
  # Behind it gin says in whose call.
  assert str(error.value).splitlines()[0] == message
