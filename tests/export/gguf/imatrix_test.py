# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics are written and read as llama.cpp's imatrix files."""

import types

import gguf
import numpy as np
import pytest

from palm_mtf.architecture.column_statistics import ColumnStatistics
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.imatrix import (
  make_imatrix,
  read_imatrix,
  read_importance,
)
from tests.blocks import block_config

MODEL = block_config("Mixtral")
# {parameter in a layer: number of inputs}; wi and wo have one row per expert.
INPUTS = {
  **{f"attention/{x}": 24 for x in "qkv"},
  **{"attention/o": 40, "mlp/router": 24},
  **{"mlp/experts/wi_gate": 24, "mlp/experts/wi": 24, "mlp/experts/wo": 36},
}


def _statistics():
  rng, found = np.random.default_rng(0), {}
  for name, inputs in [
    *((f"layer_{i:03d}/{x}", y) for i in range(2) for x, y in INPUTS.items()),
    ("output_embedding", 24),
  ]:
    shape = (6,) if "/experts/" in name else ()
    sums = rng.random((*shape, inputs)).astype(np.float32)
    found[name] = ColumnStatistics(
      sums.astype(np.float64), rng.integers(0, 90, shape) + 9 * (not shape)
    )
    if name.endswith(("/k", "/v")):  # q, k and v read the same input
      found[name] = found[f"{name[:-1]}q"]
  return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("imatrix") / "a.gguf")
  trained = types.SimpleNamespace(model=MODEL, gguf_origin={})
  exported = make_imatrix(trained, _statistics, ["a.txt", "b.txt"])
  exported.write(path, None)
  return path


def test_the_file_has_the_names_and_shapes_of_llama_cpp(path):
  """Its tools/imatrix/README.md and imatrix.cpp (save_imatrix) say these."""
  reader = gguf.GGUFReader(path)
  keys = {name: field.contents() for name, field in reader.fields.items()}
  assert keys["general.type"] == "imatrix"
  assert keys["imatrix.datasets"] == ["a.txt", "b.txt"]
  assert keys["imatrix.chunk_size"] == MODEL.sequence_length
  tensors = {x.name: x for x in reader.tensors}
  wanted = _statistics()
  for theirs, ours, count in (
    ("blk.1.ffn_down_exps.weight", "layer_001/mlp/experts/wo", 6),
    ("blk.0.attn_output.weight", "layer_000/attention/o", 1),
    ("blk.0.attn_k.weight", "layer_000/attention/q", 1),
    ("output.weight", "output_embedding", 1),
  ):
    sums, counts = (tensors[theirs + x] for x in (".in_sum2", ".counts"))
    inputs = wanted[ours].sums.shape[-1]
    assert [*sums.shape] == [inputs, count]  # llama.cpp names columns first
    assert [*counts.shape] == [1, count]
    np.testing.assert_array_equal(
      sums.data.ravel(), wanted[ours].sums.ravel().astype(np.float32)
    )
    np.testing.assert_array_equal(counts.data.ravel(), wanted[ours].tokens)


def test_statistics_are_read_as_they_were_written(path):
  wanted, found = _statistics(), read_imatrix(path, MODEL)
  assert found.keys() == wanted.keys()
  for name, each in wanted.items():
    np.testing.assert_array_equal(found[name].sums, each.sums)
    np.testing.assert_array_equal(found[name].tokens, each.tokens)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"d_expert": 16}, "blk.0.ffn_down_exps.weight.in_sum2 is .*another model"),
    ({"num_layers": 3}, "blk.2.attn_q.weight.in_sum2 is missing.*another"),
    ({"num_layers": 1}, "has 'blk.1.attn_k.*', which the model lacks"),
  ],
)
def test_statistics_of_another_model_are_refused(path, changes, message):
  model = block_config("Mixtral", **changes)
  with pytest.raises(UserError, match=message):
    read_imatrix(path, model)


def test_the_importance_of_an_input_is_its_mean_square(tmp_path):
  path, statistics = str(tmp_path / "a.gguf"), _statistics()
  name = "layer_000/mlp/experts/wo"
  sums, tokens, _ = statistics[name]
  sums[1, 5], tokens[3], sums[3] = 0, 0, 0  # never used
  trained = types.SimpleNamespace(model=MODEL, gguf_origin={})
  make_imatrix(trained, lambda: statistics, ["a.txt"]).write(path, None)
  found = read_importance(path, MODEL)
  expert = found["blk.0.ffn_down_exps.weight"]
  np.testing.assert_allclose(expert[0], sums[0] / tokens[0], rtol=1e-4)
  assert 0 < expert[1, 5] < 1e-5 * expert[1].mean()
  np.testing.assert_array_equal(expert[3], 1)
  sums, tokens, _ = statistics["layer_001/attention/q"]
  np.testing.assert_allclose(
    found["blk.1.attn_v.weight"], sums / tokens, rtol=1e-4
  )
