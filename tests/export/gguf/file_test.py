# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files are those of the specification, and of the gguf package."""

import numpy as np
import pytest

from palm_mtf.export.gguf.dtypes import DTYPES
from palm_mtf.export.gguf.file import Tensor, write_gguf
from tests.export.gguf.read_gguf import read_gguf

METADATA = {
  "general.architecture": "command-r",
  "a.truth": True,
  "a.number": 7,
  "a.share": 0.5,
  "some.texts": ["", "\u2581a", "b"],
  "some.scores": np.array([0.0, -1.5], "<f4"),
  "some.types": np.array([3, 1], "<i4"),
}
SHAPES = {"one": (5,), "two": (3, 64), "three": (2, 32)}


@pytest.fixture(scope="module")
def values():
  rng = np.random.default_rng(0)
  return {
    name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in SHAPES.items()
  }


@pytest.fixture(scope="module", params=DTYPES)
def path(request, values, tmp_path_factory):
  """A file with a vector in float32 and matrices in a dtype."""
  path = tmp_path_factory.mktemp("gguf") / "model.gguf"
  tensors = {
    name: Tensor(x, DTYPES[request.param if len(x) == 2 else "float32"])
    for name, x in SHAPES.items()
  }
  write_gguf(str(path), METADATA, tensors, values.__getitem__)
  return path


def _assert_near(found, expected) -> None:
  # Half a step of int8, and a rounding to float16.
  limit = np.abs(expected).max() * (0.5 / 127 + 2**-11)
  np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def test_a_reader_of_the_specification_finds_everything(path, values):
  found = read_gguf(path)
  assert found.metadata == {
    name: x.tolist() if isinstance(x, np.ndarray) else x
    for name, x in METADATA.items()
  }
  np.testing.assert_array_equal(found.tensors["one"], values["one"])
  for name, value in values.items():
    assert found.tensors[name].shape == value.shape
    _assert_near(found.tensors[name], value)


def test_the_gguf_package_finds_everything(path, values):
  gguf = pytest.importorskip("gguf")
  reader = gguf.GGUFReader(path)
  for name, value in METADATA.items():
    found = reader.get_field(name).contents()
    expected = value.tolist() if isinstance(value, np.ndarray) else value
    assert found == expected, name
  for tensor in reader.tensors:
    found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    _assert_near(found, values[tensor.name])
