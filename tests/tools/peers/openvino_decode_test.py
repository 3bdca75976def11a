# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graphs for OpenVINO and for ONNX Runtime decode the same model."""

import argparse
import importlib
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.peers
SIZES = argparse.Namespace(
  **{"num_layers": 2, "d_model": 64, "num_heads": 2, "d_kv": 32, "d_ff": 128},
  **{"vocab_size": 512, "sequence_length": 24, "batch_size": 3},
  dtype="float32",
)


@pytest.fixture
def peer(monkeypatch):
  """Imports a module of tools/peers/, which imports others by their names."""
  folder = Path(__file__).parents[3] / "tools" / "peers"
  monkeypatch.syspath_prepend(str(folder))
  return importlib.import_module


def predict(decoder, texts):
  """Returns the likeliest tokens after 6 tokens, after 7 and so on."""
  found = [decoder.read(texts[:, :6], 0).copy()]
  for place in range(6, SIZES.sequence_length):
    found.append(decoder.read(texts[:, [place]], place).copy())
  return np.hstack(found)


def test_both_choose_the_same_tokens_in_float32(peer, tmp_path):
  """Both draw the same weights; a graph with another model differs at once."""
  onnx, openvino = map(peer, ("onnx_decode", "openvino_decode"))
  shape = [SIZES.batch_size, SIZES.sequence_length]
  texts = np.random.default_rng(1).integers(SIZES.vocab_size, size=shape)
  theirs = onnx.Graph(SIZES, tmp_path)
  ours = openvino.Graph(SIZES)
  assert ours.num_parameters == theirs.num_parameters
  assert ours.step_bytes == theirs.step_bytes
  expected = predict(onnx.Decoder(SIZES, theirs.path), texts)
  assert len(np.unique(expected)) > 20
  decoder = openvino.Decoder(ours.model, SIZES.dtype)
  for _ in range(2):  # the second time, the cache begins again
    found = predict(decoder, texts)
    np.testing.assert_array_equal(found, expected)
