# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in llama.cpp's mixtures lose as little as by its own quantizer.

The gguf package reads the blocks, without our code.
"""

import ctypes
import importlib.util
import pathlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from palm_mtf.errors import UserError
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.metadata import read_model_metadata
from palm_mtf.export.gguf.mixtures import FILE_TYPES
from palm_mtf.export.gguf.model import import_gguf_parameters
from palm_mtf.native import operations
from palm_mtf.native.blocks import BLOCK_TYPES, quantize
from tests import llama_cpp_peer
from tests.blocks import SETTINGS
from tests.export.gguf.architectures_test import SIZES, compute, write
from tests.mtf_testing import small_config
from tests.transformers_folder import parameters

ARCHITECTURE = "general.architecture"


def read_blocks(w, name, importance=None):
  """Returns w, quantized and read again."""
  blocks = quantize(w, name, importance)
  return quants.dequantize(blocks, GGMLQuantizationType[name.upper()])


def round_plainly(w, steps, group):
  """Rounds to equal steps between the ends of each group, in float64."""
  x = w.astype(float).reshape(-1, group)
  low = np.minimum(x.min(1, keepdims=True), 0)
  step = (np.maximum(x.max(1, keepdims=True), 0) - low) / steps
  return (np.round((x - low) / step) * step + low).reshape(w.shape)


# {type: (steps between the ends of a group, weights per group)}
STEPS = {
  **{"q4_k": (15, 32), "q5_k": (31, 32), "q5_1": (31, 32)},
  **{"q6_k": (63, 16), "q5_0": (31, 32)},
}
# A q6_k and a q5_0 have as many steps below 0 as above, so they waste some.
WASTED = {"q6_k": 1.8, "q5_0": 1.6}


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_search_loses_less_than_equal_steps(name):
  rng = np.random.default_rng(0)
  w = rng.standard_t(6, size=[21, 512]).astype(np.float32) * 0.02
  w[3], w[4, :256] = 0, 0.01
  found = read_blocks(w, name)
  assert not found[3].any()
  np.testing.assert_allclose(found[4, :256], 0.01, rtol=2e-3)
  rest = np.delete(w, [3, 4], 0)
  lost = np.square(np.delete(found, [3, 4], 0) - rest).mean()
  plain = np.square(round_plainly(rest, *STEPS[name]) - rest).mean()
  assert 0.5 * plain < lost < WASTED.get(name, 1.0) * plain


def quantize_by_llama_cpp(w, name):
  """Returns the blocks of llama.cpp's quantizer, without statistics."""
  package = pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent
  ggml = ctypes.CDLL(str(package / "lib" / "libggml-base.so"))
  kind = ctypes.c_int(GGMLQuantizationType[name.upper()])
  rows, columns = w.shape
  size, num_bytes = BLOCK_TYPES[name]
  found = np.empty([rows, columns // size * num_bytes], np.uint8)
  ggml.ggml_quantize_init(kind)
  ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
  written = ggml.ggml_quantize_chunk(
    kind,
    ctypes.c_void_p(w.ctypes.data),
    ctypes.c_void_p(found.ctypes.data),
    *(ctypes.c_int64(x) for x in (0, rows, columns)),
    ctypes.c_void_p(None),
  )
  assert written == found.size
  return found


def check_weights_quantized_again(w, name, blocks):
  kind = GGMLQuantizationType[name.upper()]
  given = quants.dequantize(blocks, kind)
  again = read_blocks(given, name)
  same = (again == given).reshape(-1, 256).all(1)
  assert same.mean() > 0.95
  lost = np.square(again - given).sum()
  assert lost < 2e-3 * np.square(given - w).sum()


# WEIGHT_DTYPE quantizes the weights of an imported file again.
@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_most_blocks_keep_their_numbers_if_quantized_again(name):
  w = np.random.default_rng(0).normal(size=[32, 1024]).astype(np.float32)
  check_weights_quantized_again(w, name, quantize(w, name))


@pytest.mark.peers
@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_most_blocks_of_llama_cpp_keep_their_numbers(name):
  w = np.random.default_rng(0).normal(size=[512, 1024]).astype(np.float32)
  check_weights_quantized_again(w, name, quantize_by_llama_cpp(w, name))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_columns_that_matter_more_lose_less(name):
  rng = np.random.default_rng(0)
  w = rng.normal(size=[16, 512]).astype(np.float32)
  importance = np.where(np.arange(512) % 8, 1.0, 100.0)
  plain, found = (
    np.square(read_blocks(w, name, x) - w) for x in (None, importance)
  )
  assert (found * importance).sum() < 0.9 * (plain * importance).sum()
  assert found.sum() > plain.sum()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_large_weights_and_any_unit_of_importance_lose_as_little(name):
  """The largest float16 numbers, and factors whose squares overflow."""
  rng = np.random.default_rng(2)
  w = rng.standard_normal([9, 256]).astype(np.float32)
  importance = rng.random(256).astype(np.float32) + 0.1
  usual = np.square(read_blocks(w, name, importance) - w).mean()
  for factor in (1e-30, 1e30):
    found = read_blocks(w, name, (importance * factor).astype(np.float32))
    assert np.square(found - w).mean() < 1.01 * usual
  largest = np.clip(w * 1e6, -65504, 65504)
  assert np.abs(read_blocks(largest, name) - largest).mean() < 0.05 * 65504


def test_without_a_compiler_a_mixture_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(operations, "library", lambda: None)
  with pytest.raises(UserError, match=r"q4_k needs C\+\+.*; use q8_0"):
    write_gguf(
      str(tmp_path / "model.gguf"),
      {ARCHITECTURE: "llama", "llama.block_count": 1},
      {"blk.0.attn_q.weight": (1, 256)},
      "q4_k_m",
      lambda name: np.ones([1, 256], np.float32),
    )


SHAPE = {**SIZES, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 9}
# {name: settings that differ from SHAPE}
MODELS = {
  "llama": SETTINGS["LLaMA 3"],
  # Rows of 96 numbers are no whole blocks of 256, so other types hold them.
  "narrow": SETTINGS["LLaMA 3"] | {"d_model": 96, "d_kv": 32, "d_ff": 256},
  "gpt2": SETTINGS["GPT-2"] | {"mlp": "gelu_tanh"},
  "8 experts": SETTINGS["Mixtral"] | {"num_experts": 8},
  "4 experts": SETTINGS["Mixtral"] | {"num_experts": 4},
}
MIXTURES = {"q4_k_m": "Q4_K_M", "q5_k_m": "Q5_K_M", "q6_k": "Q6_K"}


@pytest.fixture(scope="module", params=MODELS)
def whole(request, vocabulary, tmp_path_factory):
  """A model and its file in float32."""
  path = tmp_path_factory.mktemp("whole") / "model.gguf"
  model = small_config(**{**SHAPE, **MODELS[request.param]})
  write(path, model, parameters(model), vocabulary)
  return GgufFile(str(path)), path


@pytest.mark.peers
@pytest.mark.parametrize("has_statistics", [False, True])
@pytest.mark.parametrize("dtype", MIXTURES)
def test_tensors_have_llama_cpps_types_and_no_larger_errors(
  dtype, has_statistics, whole, tmp_path
):
  file, source = whole
  rng = np.random.default_rng(0)
  importance = {}
  for name, shape in file.shapes.items():
    if len(shape) > 1 and has_statistics:
      inputs = (*shape[:-2], shape[-1])
      importance[name] = np.exp(rng.normal(size=inputs)).astype(np.float32)
  ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
  llama_cpp_peer.call(
    llama_cpp_peer.quantize,
    source,
    theirs,
    f"MOSTLY_{MIXTURES[dtype]}",
    importance,
  )
  metadata = file.metadata | {"general.file_type": FILE_TYPES[dtype]}
  write_gguf(str(ours), metadata, file.shapes, dtype, file.read, importance)
  ours, theirs = GgufFile(str(ours)), GgufFile(str(theirs))
  assert ours.dtypes == theirs.dtypes
  key = "general.file_type"
  assert ours.metadata[key] == theirs.metadata[key]
  for name in file.shapes:
    w, factors = file.read(name), importance.get(name, np.float32(1))
    if w.ndim > 2 and has_statistics:
      factors = factors[:, np.newaxis]
    lost, expected = (
      (np.square(x.read(name) - w) * factors).sum() for x in (ours, theirs)
    )
    assert lost <= 1.05 * expected, name


# Without experts: rounded activations change which experts a row chooses.
@pytest.mark.peers
@pytest.mark.parametrize("dtype", MIXTURES)
@pytest.mark.parametrize("whole", ["llama", "narrow", "gpt2"], indirect=True)
def test_llama_cpp_computes_the_logits_of_our_import(dtype, whole, tmp_path):
  file, _ = whole
  path = str(tmp_path / "model.gguf")
  write_gguf(path, file.metadata, file.shapes, dtype, file.read)
  ids = [*range(1, 17)]
  found = llama_cpp_peer.call(llama_cpp_peer.compute_logits, path, ids)
  file = GgufFile(path)
  own, model = read_model_metadata(file.metadata, file.shapes, path, file.read)
  params = import_gguf_parameters(file, model, own, path)
  expected = compute(model, params, ids)
  # llama.cpp rounds activations to int8, in steps of 1/127 of the largest.
  assert np.abs(found - expected).max() < 1.5e-2 * np.ptp(expected)
