# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefill and steps with a cache give the logits of one forward pass."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode import weight_maker as decode_weights
from palm_mtf.generation.decode.forward import (
  build_palm,
  import_rows,
  prefill,
  run_blocks,
  take_slices,
)
from palm_mtf.generation.decode.rows import join_rows, split_rows
from palm_mtf.generation.decode.step import NativeStep, make_step
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.mesh.session import session_config
from palm_mtf.native.operations import operations
from tests import oracle
from tests.blocks import block_config, fast_only
from tests.cpus import SAPPHIRE_RAPIDS, ZEN_4, pretend_cpu
from tests.mtf_testing import (
  LAYOUTS,
  SINGLE,
  load_decode_model,
  mesh_layout,
  random_tokens,
  run_model,
  small_config,
)

ROWS, PROMPT = 4, 4


def cached_logits(
  config, params, inputs, mesh_rules=SINGLE, weight_dtype="activation"
):
  """Returns logits from the prompt's last place on, [rows, places, vocab]."""
  with tf.Graph().as_default():
    model = build_decode_model(config, mesh_rules, weight_dtype)
    step = make_step(model)

    def split(x):
      return split_rows(model.placement, tf.constant(x, tf.int32))

    cache = prefill(
      model,
      tf.constant(inputs[:, :PROMPT]),
      split([PROMPT] * ROWS),
      config.sequence_length,
    )
    places = []
    # The first step reads the prompt's last token again.
    for place in range(PROMPT - 1, config.sequence_length):
      logits, cache = step.read(
        split(inputs[:, place]), split([place] * ROWS), cache
      )
      places.append(logits)
    whole = [tf.cast(join_rows(model.placement, x), tf.float32) for x in places]
    config_ = session_config(mesh_rules.num_devices)
    with tf.Session(config=config_) as session:
      load_decode_model(session, model, params)
      return np.stack(session.run(whole), axis=1)


def case_of(config):
  """Returns parameters, and a batch of ROWS."""
  params = oracle.random_parameters(config, seed=1)
  return params, random_tokens(config, ROWS, seed=3)


@functools.cache
def full_logits(config):
  """Returns the logits of one forward pass over `case_of`."""
  result = run_model(config, *case_of(config), backward=False)
  return result.logits[:, PROMPT - 1 :]


@pytest.fixture
def without_operations(monkeypatch):
  """Makes weights as if the C++ operations could not be compiled."""
  monkeypatch.setattr(decode_weights, "operations", lambda: None)


MULTI_HEAD = {"attention": "multi_head", "norm": "rms_norm"}
SERIAL = {"block": "serial"}
BOTH = {**MULTI_HEAD, **SERIAL}


@pytest.mark.parametrize(
  ("changes", "layout"),
  [
    ({}, "one device"),
    (MULTI_HEAD, "one device"),
    (SERIAL, "one device"),
    (BOTH, "one device"),
    ({"final_norm_scale": "none"}, "one device"),
    # Slow, because generate_program_test.py and int8 below have this layout.
    pytest.param(BOTH, "all over data and model", marks=pytest.mark.slow),
    pytest.param({}, "all over data and model", marks=pytest.mark.slow),
    pytest.param({}, "two axes but no batch", marks=pytest.mark.slow),
    pytest.param(MULTI_HEAD, "two axes but no batch", marks=pytest.mark.slow),
  ],
)
def test_cached_logits_equal_those_of_a_forward_pass(changes, layout):
  config = small_config(**changes)
  params, batch = case_of(config)
  mesh = mesh_layout(layout) if layout in LAYOUTS else SINGLE
  cached = cached_logits(config, params, batch["inputs"], mesh)
  full = full_logits(config)
  np.testing.assert_allclose(cached, full, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("without_operations")
@pytest.mark.parametrize("changes", [{}, BOTH])
def test_tensorflow_operations_give_the_same_logits(changes):
  config = small_config(**changes)
  params, batch = case_of(config)
  cached = cached_logits(config, params, batch["inputs"])
  full = full_logits(config)
  np.testing.assert_allclose(cached, full, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
  "layout",
  [
    "one device",
    pytest.param("all over data and model", marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize(
  "name",
  fast_only("LLaMA 3", "Gemma", "GPT-2", "Gopher", "GPT-NeoX", "Qwen 3"),
)
def test_cached_logits_of_other_blocks_are_the_oracle_s(name, layout):
  config = block_config(name)
  params, batch = case_of(config)
  mesh = mesh_layout(layout) if layout in LAYOUTS else SINGLE
  cached = cached_logits(config, params, batch["inputs"], mesh)
  exact = oracle.forward(config, params, batch["inputs"])[:, PROMPT - 1 :]
  limit = 1e-5 * np.abs(exact).max()
  np.testing.assert_allclose(cached, exact, atol=limit, rtol=0)


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
  ("name", "missing"),
  [
    ("LLaMA", None),
    ("LLaMA 3", None),
    ("Gemma", None),
    ("Mistral", "ATTENTION_WINDOW"),
    ("GPT-2", "NORM"),
    ("GPT-NeoX", "BLOCK"),
    ("Qwen 3", "QK_NORM"),
    ("no positions", "MLP"),
  ],
)
def test_what_the_cpp_step_lacks_is_computed_by_tensorflow_and_told_once(
  name, missing, caplog
):
  decode_weights._tell_missing.cache_clear()
  caplog.set_level("INFO")
  for _ in range(2):
    with tf.Graph().as_default():
      model = build_decode_model(block_config(name), SINGLE, "activation")
    assert model.is_packed == (missing is None)
  lines = [x.getMessage() for x in caplog.records]
  told = [x for x in lines if "TensorFlow computes the decoding steps" in x]
  assert len(told) == (missing is not None)
  assert all(x.startswith(f"{missing} = ") for x in told)


@pytest.mark.usefixtures("without_operations")
@pytest.mark.parametrize("name", ["LLaMA 3", "Gemma"])
def test_other_blocks_need_no_cpp_operations(name):
  config = block_config(name)
  params, batch = case_of(config)
  cached = cached_logits(config, params, batch["inputs"])
  exact = oracle.forward(config, params, batch["inputs"])[:, PROMPT - 1 :]
  limit = 1e-5 * np.abs(exact).max()
  np.testing.assert_allclose(cached, exact, atol=limit, rtol=0)


def test_bfloat16_differs_only_by_its_rounding():
  config = small_config(activation_dtype="bfloat16")
  params, batch = case_of(config)
  cached = cached_logits(config, params, batch["inputs"])
  exact = oracle.forward(config, params, batch["inputs"])
  full = full_logits(config)
  # The logits themselves are not rounded (LOGITS_DTYPE).
  assert np.any(cached.astype(ml_dtypes.bfloat16) != cached)
  error = np.abs(cached - exact[:, PROMPT - 1 :]).max()
  assert error < 1.5 * np.abs(full - exact[:, PROMPT - 1 :]).max()


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
def test_with_amx_steps_are_in_cpp_and_long_prompts_are_multiplied_by_onednn(
  tmp_path, monkeypatch
):
  def prompts_logits(length):
    with tf.Graph().as_default() as graph, tf.Session() as session:
      model = build_decode_model(config, SINGLE, "activation")
      assert isinstance(make_step(model), NativeStep)
      mesh, shape, palm = build_palm(model, 1, length)
      tokens = import_rows(model, mesh, tf.constant(inputs[:, :length]), shape)
      x = run_blocks(model, palm, palm.embed(tokens), [])
      ((x,),) = (y.tensor_list for y in take_slices(model, mesh, [x]))
      load_decode_model(session, model, params)
      operations = {x.type for x in graph.get_operations()}
      return operations & {"PalmProduct", "MatMul"}, session.run(x)

  config = small_config(activation_dtype="bfloat16", sequence_length=80)
  params = oracle.random_parameters(config, seed=1)
  inputs = random_tokens(config, 1, seed=3)["inputs"]
  pretend_cpu(ZEN_4, tmp_path, monkeypatch)
  operations_in_cpp, in_cpp = prompts_logits(80)
  pretend_cpu(SAPPHIRE_RAPIDS, tmp_path, monkeypatch)
  operations_of_amx, by_onednn = prompts_logits(80)
  operations_of_short, short = prompts_logits(8)
  assert operations_in_cpp == operations_of_short == {"PalmProduct"}
  assert operations_of_amx == {"MatMul"}
  np.testing.assert_array_equal(short, in_cpp[:, :8])
  # Both sum in float32 and round to bfloat16; the order of a sum differs.
  error = by_onednn.astype(np.float64) - in_cpp
  assert np.linalg.norm(error) < 4e-3 * np.linalg.norm(in_cpp.astype(float))


@pytest.mark.slow
@pytest.mark.parametrize(
  "layout",
  [
    "all over data and model",
    pytest.param("two axes but no batch", marks=pytest.mark.slow),
  ],
)
def test_int8_logits_are_near_and_the_same_in_every_layout(layout, monkeypatch):
  config = small_config()
  params, batch = case_of(config)
  full = full_logits(config)
  int8 = cached_logits(config, params, batch["inputs"], weight_dtype="int8")
  assert 1e-3 < np.abs(int8 - full).max() < 0.03 * np.abs(full).max()
  split = cached_logits(
    config, params, batch["inputs"], mesh_layout(layout), "int8"
  )
  monkeypatch.setattr(decode_weights, "operations", lambda: None)
  plain = cached_logits(config, params, batch["inputs"], weight_dtype="int8")
  np.testing.assert_allclose(split, plain, atol=1e-5, rtol=0)
  # The C++ products also round rows to int8.
  assert np.abs(plain - int8).max() < 0.03 * np.abs(full).max()


def test_int4_logits_are_near_and_the_same_if_not_compiled(monkeypatch):
  config = small_config()
  # Heads fill whole groups of weights; otherwise o and wo would share a group.
  config = dataclasses.replace(config, d_kv=16)
  params, batch = case_of(config)
  full = full_logits(config)
  int4 = cached_logits(config, params, batch["inputs"], weight_dtype="int4")
  assert 1e-3 < np.abs(int4 - full).max() < 0.3 * np.abs(full).max()
  monkeypatch.setattr(decode_weights, "operations", lambda: None)
  plain = cached_logits(config, params, batch["inputs"], weight_dtype="int4")
  # The C++ products also round rows to int8.
  assert np.abs(plain - int4).max() < 0.03 * np.abs(full).max()


def test_a_token_that_the_vocabulary_lacks_is_refused():
  config = small_config()
  params = oracle.random_parameters(config, seed=1)
  inputs = random_tokens(config, ROWS, seed=3)["inputs"]
  inputs[1, PROMPT] = config.vocab_size
  with pytest.raises(tf.errors.InvalidArgumentError, match="lies outside"):
    cached_logits(config, params, inputs)
