# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefill and steps with a cache give the logits of one forward pass."""

import dataclasses

import gguf
import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.generation.decode import weight_maker as decode_weights
from palm_mtf.generation.decode.forward import (
  build_palm,
  import_rows,
  prefill,
  reads_parts,
  run_blocks,
  take_slices,
)
from palm_mtf.generation.decode.rows import join_rows, split_rows
from palm_mtf.generation.decode.step import NativeStep, make_step
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.mesh.session import session_config
from palm_mtf.native.blocks import quantize
from palm_mtf.native.decoding import BY_FLAGS, Products, find_missing_in_step
from palm_mtf.native.operations import operations
from tests import oracle, processes
from tests.blocks import SETTINGS, block_config, fast_only
from tests.cases import slow
from tests.mtf_testing import (
  SINGLE,
  load_decode_model,
  mesh_layout,
  random_tokens,
  relative_error,
  run_model,
  small_config,
)

ROWS, PROMPT = 4, 4
# The second step reads the cache that the first one wrote.
PLACES = range(PROMPT, PROMPT + 2)


def experts(count, chosen):
  counts = {"num_experts": count, "experts_per_token": chosen}
  return {"mlp": "experts", **counts}


# Settings that are neither PaLM's nor in tests/blocks.py.
OTHERS = {
  "multi-head": {"attention": "multi_head", "final_norm_scale": "none"},
  "serial": {"block": "serial"},
  "serial, multi-head": {
    "block": "serial",
    "attention": "multi_head",
    "norm": "rms_norm",
  },
  "parallel, experts": {**experts(5, 2), "shared_experts": 1, "d_expert": 12},
  "one expert": {**experts(1, 1), "router_normalizes": False},
  # Such a model can be imported, but not trained.
  "one of three experts": experts(3, 1),
  "normed experts": {
    **experts(4, 4),
    "block": "serial",
    "norm": "rms_norm",
    "branch_norm": True,
    "expert_mlp": "geglu",
  },
}


def make_config(name):
  """Returns PaLM's small model, or one of OTHERS or tests/blocks.py."""
  if name == "PaLM" or name in OTHERS:
    return small_config(**OTHERS.get(name, {}))
  return block_config(name)


def cached_logits(
  config, params, inputs, mesh_rules=SINGLE, weight_dtype="activation"
):
  """Returns logits at PLACES, [rows, places, vocab]."""
  with tf.Graph().as_default():
    model = build_decode_model(config, mesh_rules, weight_dtype)
    step = make_step(model)

    def split(x):
      return split_rows(model.placement, tf.constant(x, tf.int32))

    num_rows = len(inputs)
    given = tf.constant(inputs[:, :PROMPT]), split([PROMPT] * num_rows)
    cache = prefill(model, *given, config.sequence_length)
    places = []
    for place in PLACES:
      given = split(inputs[:, place]), split([place] * num_rows)
      logits, cache = step.read(*given, cache)
      places.append(logits)
    whole = [tf.cast(join_rows(model.placement, x), tf.float32) for x in places]
    config_ = session_config(mesh_rules.num_devices)
    with tf.Session(config=config_) as session:
      load_decode_model(session, model, params)
      return np.stack(session.run(whole), axis=1)


def case_of(config):
  """Returns parameters, inputs of ROWS, and the oracle's logits at PLACES."""
  params = oracle.random_parameters(config, seed=1)
  inputs = random_tokens(config, ROWS, seed=3)["inputs"]
  exact = oracle.forward(config, params, inputs)
  return params, inputs, exact[:, PLACES.start : PLACES.stop]


@pytest.fixture
def without_operations(monkeypatch):
  """Makes weights as if the C++ operations could not be compiled."""
  monkeypatch.setattr(decode_weights, "operations", lambda: None)


def check_cached_logits(name, mesh=SINGLE):
  config = make_config(name)
  params, inputs, exact = case_of(config)
  cached = cached_logits(config, params, inputs, mesh)
  limit = 2e-6 * np.abs(exact).max()
  np.testing.assert_allclose(cached, exact, atol=limit, rtol=0)


@pytest.mark.parametrize(
  "name",
  [
    *("PaLM", "multi-head", "one expert", "one of three experts"),
    *map(slow, ("serial", "serial, multi-head")),
    *map(slow, ("parallel, experts", "normed experts")),
    *fast_only(
      *("LLaMA 3.1", "Gemma 3", "Cohere 2", "GPT-3", "Gopher", "GPT-NeoX"),
      "DeepSeek-V3",
    ),
    slow("norms of groups of heads"),
    "OLMoE with its norm",
  ],
)
def test_cached_logits_are_the_oracle_s(name):
  check_cached_logits(name)


# Slow, because generate_program_test.py and int8 below have such layouts.
@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "layout"),
  [
    *((name, "all over data and model") for name in SETTINGS),
    ("PaLM", "all over data and model"),
    ("serial, multi-head", "all over data and model"),
    ("PaLM", "two axes but no batch"),
    ("multi-head", "two axes but no batch"),
  ],
)
def test_split_logits_are_the_oracle_s(name, layout):
  check_cached_logits(name, mesh_layout(layout))


# The tests above also compute the other blocks of tests/blocks.py without C++.
@pytest.mark.usefixtures("without_operations")
@pytest.mark.parametrize(
  "name",
  [
    *("Yarn LLaMA 2", "Gemma 3", "Mixtral"),
    *(slow(x) for x in ("PaLM", "Gemma", "Mistral", "Cohere 2")),
  ],
)
def test_tensorflow_operations_give_the_same_logits(name):
  check_cached_logits(name)


@pytest.mark.parametrize(
  ("name", "missing"),
  [
    ("LLaMA 3", None),
    ("LLaMA 3.1", None),
    ("Yarn LLaMA 2", None),
    ("Gemma", None),
    ("Mistral", None),
    ("Qwen 3", None),
    ("Gemma 3", None),
    ("Cohere 2", None),
    ("GPT-2", "NORM"),
    ("GPT-NeoX", "BLOCK"),
    ("no positions", "MLP"),
    ("Mixtral", None),
    ("OLMoE", None),
    ("DeepSeek-V3", None),
    ("GLaM", "MLP"),
    ("OLMoE with its norm", None),
  ],
)
def test_what_the_cpp_step_lacks_is_found(name, missing):
  assert find_missing_in_step(block_config(name)) == missing


def test_layers_with_unlike_activations_are_computed_by_tensorflow():
  variants = {"a": {}, "b": {"MLP": "geglu"}}
  config = small_config(num_layers=2, layers="a, b", variants=variants)
  assert find_missing_in_step(config) == "VARIANTS"
  params, inputs, exact = case_of(config)
  cached = cached_logits(config, params, inputs)
  np.testing.assert_allclose(cached, exact, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize(
  "dtype", ["float32", slow("bfloat16"), slow("int8"), "int4", slow("q4_k")]
)
def test_experts_of_a_row_do_not_depend_on_other_rows(dtype):
  is_float = dtype.endswith(("32", "16"))
  activations = dtype if is_float else "float32"
  config = block_config("DeepSeek-V3", activation_dtype=activations)
  params, inputs, _ = case_of(config)
  weight_dtype = "activation" if is_float else dtype
  # Twenty rows are more than C++ multiplies at a time.
  many = random_tokens(config, 20, seed=4)["inputs"]
  many[7] = inputs[0]
  alone = np.repeat(inputs[:1], ROWS, 0)
  found, expected = (
    cached_logits(config, params, rows, weight_dtype=weight_dtype)
    for rows in (many, alone)
  )
  np.testing.assert_array_equal(found[7], expected[0])


@pytest.mark.parametrize("name", [slow("Mixtral"), "DeepSeek-V3"])
def test_of_equal_scores_the_first_experts_are_chosen(name):
  config = block_config(name)
  params, inputs, _ = case_of(config)
  for part, w in params.items():
    if part.endswith("router"):
      params[part] = np.zeros_like(w)
    if part.endswith("router_bias"):
      params[part] = np.full_like(w, 0.5)
    if "/experts/" in part:  # experts that no row chooses are not read
      w[config.experts_per_token :] = np.nan
  found = cached_logits(config, params, inputs)
  for part, w in params.items():
    if "/experts/" in part:
      w[config.experts_per_token :] = 0.0
  exact = oracle.forward(config, params, inputs)[:, PROMPT : PROMPT + 2]
  np.testing.assert_allclose(found, exact, atol=2e-6 * np.abs(exact).max())


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
def test_what_the_cpp_step_lacks_is_computed_by_tensorflow_and_told_once(
  caplog,
):
  decode_weights._tell_missing.cache_clear()
  caplog.set_level("INFO")
  for name in ("LLaMA 3", "GPT-2", "GPT-2"):
    with tf.Graph().as_default():
      model = build_decode_model(block_config(name), SINGLE, "activation")
    assert model.is_packed == (name == "LLaMA 3")
  lines = [x.getMessage() for x in caplog.records]
  (told,) = (x for x in lines if "TensorFlow computes the decoding steps" in x)
  assert told.startswith("NORM = ")


def test_bfloat16_differs_only_by_its_rounding():
  config = small_config(activation_dtype="bfloat16")
  params, inputs, exact = case_of(config)
  cached = cached_logits(config, params, inputs)
  batch = {"inputs": inputs, "targets": inputs}
  full = run_model(config, params, batch, backward=False).logits
  full = full[:, PLACES.start : PLACES.stop]
  # The logits themselves are not rounded (LOGITS_DTYPE).
  assert np.any(cached.astype(ml_dtypes.bfloat16) != cached)
  assert np.abs(cached - exact).max() < 1.5 * np.abs(full - exact).max()


BY_ONEDNN = Products(onednn=64)


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
  ("products", "activation", "weights", "in_parts"),
  [
    (BY_FLAGS, "bfloat16", "activation", True),
    (BY_ONEDNN, "bfloat16", "int8", True),
    (BY_ONEDNN, "float32", "activation", True),
    (BY_ONEDNN, "bfloat16", "activation", False),
  ],
)
def test_prompts_are_read_whole_where_the_bits_depend_on_the_number_of_rows(
  products, activation, weights, in_parts
):
  config = small_config(activation_dtype=activation)
  with tf.Graph().as_default():
    model = build_decode_model(config, SINGLE, weights, products)
  assert reads_parts(model) == in_parts


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
def test_where_onednn_is_faster_it_multiplies_long_prompts_but_no_steps():
  def prompts_logits(length, products):
    with tf.Graph().as_default() as graph, tf.Session() as session:
      model = build_decode_model(config, SINGLE, "activation", products)
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
  operations_in_cpp, in_cpp = prompts_logits(80, BY_FLAGS)
  operations_of_onednn, by_onednn = prompts_logits(80, BY_ONEDNN)
  operations_of_short, short = prompts_logits(8, BY_ONEDNN)
  assert operations_in_cpp == operations_of_short == {"PalmProduct"}
  assert operations_of_onednn == {"MatMul"}
  np.testing.assert_array_equal(short, in_cpp[:, :8])
  # Both sum in float32 and round to bfloat16; the order of a sum differs.
  error = by_onednn.astype(np.float64) - in_cpp
  assert np.linalg.norm(error) < 4e-3 * np.linalg.norm(in_cpp.astype(float))


@pytest.mark.slow
@pytest.mark.parametrize(
  "layout", ["all over data and model", slow("two axes but no batch")]
)
def test_int8_logits_are_near_and_the_same_in_every_layout(layout, monkeypatch):
  config = small_config()
  params, inputs, exact = case_of(config)
  int8 = cached_logits(config, params, inputs, weight_dtype="int8")
  assert 1e-3 < np.abs(int8 - exact).max() < 0.03 * np.abs(exact).max()
  split = cached_logits(config, params, inputs, mesh_layout(layout), "int8")
  monkeypatch.setattr(decode_weights, "operations", lambda: None)
  plain = cached_logits(config, params, inputs, weight_dtype="int8")
  np.testing.assert_allclose(split, plain, atol=1e-5, rtol=0)
  # The C++ products also round rows to int8.
  assert np.abs(plain - int8).max() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["PaLM", slow("Gemma 3")])
def test_int4_logits_are_near_and_the_same_if_not_compiled(name, monkeypatch):
  # Heads fill whole groups of weights; otherwise o and wo would share a group.
  config = dataclasses.replace(make_config(name), d_kv=16)
  params, inputs, exact = case_of(config)
  int4 = cached_logits(config, params, inputs, weight_dtype="int4")
  assert 1e-3 < np.abs(int4 - exact).max() < 0.3 * np.abs(exact).max()
  monkeypatch.setattr(decode_weights, "operations", lambda: None)
  plain = cached_logits(config, params, inputs, weight_dtype="int4")
  # The C++ products also round rows to int8.
  assert np.abs(plain - int4).max() < 0.03 * np.abs(exact).max()


def rounded(w, weight_dtype):
  """Rounds a matrix [inner, outer] to what kernels.py says, in float64."""
  if weight_dtype == "int8":
    scale = np.abs(w).max(0) / 127
    return np.round(w / scale) * scale
  if weight_dtype.endswith("_k"):  # the gguf package reads our blocks
    kind = gguf.GGMLQuantizationType[weight_dtype.upper()]
    rows = np.pad(w.T, [[0, 0], [0, -len(w) % 256]]).astype(np.float32)
    read = gguf.quants.dequantize(quantize(rows, weight_dtype), kind)
    return read[:, : len(w)].T
  groups = []
  for group in np.split(w, range(32, len(w), 32)):
    extreme = np.where(group.max(0) > -group.min(0), group.max(0), group.min(0))
    tried = []
    for share in (1, 0.95, 0.9, 0.85, 0.8, 0.75):
      scale = (extreme * share / -8).astype(ml_dtypes.bfloat16).astype(float)
      tried.append(np.clip(np.round(group / scale), -8, 7) * scale)
    best = np.argmin([np.square(x - group).sum(0) for x in tried], 0)
    groups.append(np.choose(best, tried))
  return np.concatenate(groups)


def rounded_parameters(params, weight_dtype):
  """Rounds kernels, each expert's by itself; the table to 8 or 6 bits."""
  found = dict(params)
  of_table = "q6_k" if weight_dtype.endswith("_k") else "int8"
  for name, w in params.items():
    if name == "output_embedding":
      found[name] = rounded(w.T, of_table).T
    elif "/experts/" in name:
      found[name] = np.stack([rounded(each, weight_dtype) for each in w])
    elif w.ndim > 1 and name.startswith("layer_") and "router" not in name:
      matrix = oracle.as_matrix(name, w)
      found[name] = rounded(matrix, weight_dtype).reshape(w.shape)
  return found


@pytest.mark.parametrize(
  ("name", "weight_dtype"),
  [
    ("Mixtral", "int8"),
    ("Mixtral", "int4"),
    slow("DeepSeek-V3", "int8"),
    slow("DeepSeek-V3", "int4"),
  ],
)
def test_quantized_experts_have_the_logits_of_an_oracle_of_rounded_weights(
  name, weight_dtype, without_operations
):
  config = make_config(name)
  params, inputs, exact = case_of(config)
  found = cached_logits(config, params, inputs, weight_dtype=weight_dtype)
  params = rounded_parameters(params, weight_dtype)
  expected = oracle.forward(config, params, inputs)[:, PLACES]
  assert relative_error(found, expected) < 1e-5
  assert relative_error(exact, expected) > 1e-3


class RoundingKernel(np.ndarray):
  """A float64 kernel whose products round their rows to int8, as in C++."""

  def __array_ufunc__(self, ufunc, method, x, *others, **how):
    if ufunc is np.matmul:
      x = round_rows(np.asarray(x), 1)
    others = [np.asarray(y) for y in others]
    return getattr(ufunc, method)(np.asarray(x), *others, **how)

  def __array_function__(self, function, types, args, how):
    if function is not np.einsum:
      return super().__array_function__(function, types, args, how)
    names, x, w = args
    of_rows, _, of_result = names.replace("->", ",").split(",")
    summed = [y for y in of_rows if y not in of_result]  # they come last
    return np.einsum(names, round_rows(x, len(summed)), np.asarray(w))


def round_rows(x, axes):
  """Rounds rows, the last axes of x, to int8 with a scale per 32 numbers."""
  rows = x.reshape(-1, np.prod(x.shape[-axes:]))
  size = rows.shape[1]
  groups = np.pad(rows, [[0, 0], [0, -size % 32]]).reshape(len(rows), -1, 32)
  scale = np.abs(groups).max(-1, keepdims=True) / 127
  scale[scale == 0] = 1
  groups = np.round(groups / scale) * scale
  return groups.reshape(len(rows), -1)[:, :size].reshape(x.shape)


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
  ("name", "weight_dtype"),
  [
    ("LLaMA 3", "q4_k"),
    ("Mixtral", "q6_k"),
    *(slow("LLaMA 3", x) for x in ("q5_k", "q6_k")),
    *(slow("DeepSeek-V3", x) for x in ("q4_k", "q5_k")),
  ],
)
def test_k_quants_have_the_logits_of_an_oracle_of_the_file_s_weights(
  name, weight_dtype
):
  config = make_config(name)
  params, inputs, exact = case_of(config)
  found = cached_logits(config, params, inputs, weight_dtype=weight_dtype)
  rounded = rounded_parameters(params, weight_dtype)
  for part, w in rounded.items():
    if w is not params[part]:
      rounded[part] = w.astype(np.float64).view(RoundingKernel)
  expected = oracle.forward(config, rounded, inputs)[:, PLACES]
  assert relative_error(found, expected) < 1e-5
  assert relative_error(exact, expected) > 1e-2


@pytest.mark.parametrize(
  ("weight_dtype", "nearest"), [("q4_k", "int4"), ("q6_k", "int8")]
)
@pytest.mark.parametrize("reason", ["no C++", "two devices", "GPT-2"])
def test_k_quants_outside_of_cpp_are_refused(
  weight_dtype, nearest, reason, monkeypatch
):
  layout = SINGLE
  if reason == "no C++":
    monkeypatch.setattr(decode_weights, "operations", lambda: None)
  if reason == "two devices":
    layout = mesh_layout("heads over model")
  config = make_config(reason if reason == "GPT-2" else "PaLM")
  with (
    tf.Graph().as_default(),
    pytest.raises(UserError, match=f"'{weight_dtype}'.*\"{nearest}\"") as told,
  ):
    build_decode_model(config, layout, weight_dtype)
  assert "\n" not in str(told.value)


def test_a_token_that_the_vocabulary_lacks_is_refused():
  config = small_config()
  params, inputs, _ = case_of(config)
  inputs[1, PROMPT] = config.vocab_size
  with pytest.raises(tf.errors.InvalidArgumentError, match="lies outside"):
    cached_logits(config, params, inputs)


# The library is compiled again, for a CPU with AVX2 and for one without.
@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX2", "SSE41"])
def test_lesser_cpus_compute_the_same_experts(limit):
  run = processes.python(
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k"),
    "(expert or Mixtral or DeepSeek) and not lesser",
    variables={"ONEDNN_MAX_CPU_ISA": limit},
  )
  assert run.returncode == 0, run.stdout
