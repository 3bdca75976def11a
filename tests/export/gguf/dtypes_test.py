# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers are rounded as llama.cpp rounds them."""

import numpy as np
import pytest

from palm_mtf.errors import UserError
from palm_mtf.export.gguf.dtypes import DTYPES, FLOAT16, FLOAT32, dtype_of

Q8_0 = DTYPES["q8_0"]


def _blocks(x) -> np.ndarray:
  encoded = Q8_0.encode(np.asarray(x, np.float32), "x")
  return np.frombuffer(encoded, [("scale", "<f2"), ("numbers", "i1", 32)])


def test_a_block_is_its_largest_number_over_127_and_whole_numbers_of_it():
  x = np.linspace(-254, 100, 32)
  (block,) = _blocks(x)
  assert block["scale"] == 2
  assert block["numbers"][0] == -127
  assert np.abs(block["numbers"] - x / 2).max() <= 0.5


def test_halves_are_rounded_away_from_zero():
  (block,) = _blocks([127, 0.5, -0.5, 1.5, 2.5, -2.5, *[0] * 26])
  assert block["numbers"][:6].tolist() == [127, 1, -1, 2, 3, -3]


def test_a_block_of_zeros_is_zeros():
  (block,) = _blocks(np.zeros(32))
  assert block["scale"] == 0
  assert not block["numbers"].any()


def test_bytes_are_those_of_the_gguf_package():
  gguf = pytest.importorskip("gguf")
  x = np.random.default_rng(0).standard_normal([64, 96]).astype(np.float32)
  expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
  assert bytes(Q8_0.encode(x, "x")) == expected.tobytes()


@pytest.mark.parametrize(
  "shape, wanted, expected",
  [
    ((64,), Q8_0, FLOAT32),  # scales of norms
    ((64,), FLOAT16, FLOAT32),
    ((4, 64), Q8_0, Q8_0),
    ((4, 48), Q8_0, FLOAT16),  # no whole blocks
    ((4, 48), FLOAT32, FLOAT32),
  ],
)
def test_what_a_dtype_cannot_hold_has_a_larger_one(shape, wanted, expected):
  assert dtype_of(shape, wanted) == expected


@pytest.mark.parametrize("dtype", [FLOAT16, Q8_0])
def test_a_number_that_float16_cannot_hold_is_refused(dtype):
  with pytest.raises(UserError, match="numbers of x are beyond float16"):
    dtype.encode(np.full([1, 32], 1e8, np.float32), "x")
