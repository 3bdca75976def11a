# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""C++ products have the sums of float64, and bits that nothing else changes."""

import functools
import platform

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.machine.processors import cpu_flags
from palm_mtf.native import build
from palm_mtf.native import matmul as native_matmul
from palm_mtf.native.matmul import matmul, multiplies

needs_avx512_bf16 = pytest.mark.skipif(
  "avx512_bf16" not in cpu_flags(), reason="this CPU lacks AVX512-BF16"
)
# (rows, inner, columns of each joined matrix): tiles, strips and runs of pairs
# that are whole; parts of them; and one row.
SHAPES = [
  (192, 64, [64, 128]),
  (100, 2050, [64]),
  (7, 4130, [70, 2, 31]),
  (203, 34, [1]),
  (1, 2, [3, 64]),
]


def draw(*shape: int) -> np.ndarray:
  rng = np.random.default_rng(sum(shape))
  return rng.normal(size=shape).astype(ml_dtypes.bfloat16)


def run(a, bs, sizes, **how) -> list[np.ndarray]:
  with tf.Graph().as_default(), tf.Session() as session:
    a, *bs = map(tf.constant, (a, *bs))
    return session.run(matmul(a, bs, sizes, **{"threads": 2, **how}))


def assert_is_product(found, a, b):
  a, b = (x.astype(np.float64) for x in (a, b))
  # float32 sums err by at most 2^-24 of the terms' sizes for each addition, of
  # which there are two per pair of terms; bfloat16 results by 2^-8.
  terms = np.abs(a) @ np.abs(b)
  bound = a.shape[1] * 2.0**-23 * terms
  if found.dtype == ml_dtypes.bfloat16:
    bound += 2.0**-8 * np.abs(a @ b)
  assert (np.abs(found.astype(np.float64) - a @ b) <= bound).all()


@needs_avx512_bf16
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_products_and_their_gradients_are_those_of_float64(
  rows, inner, columns, dtype
):
  x = draw(rows, inner)
  kernels = [draw(inner, n) for n in columns]
  joined, total = np.concatenate(kernels, 1), sum(columns)
  (y,) = run(x, kernels, [total], dtype=dtype)
  assert_is_product(y, x, joined)
  (y,) = run(x, [np.ascontiguousarray(joined.T)], [total], transpose_b=True)
  assert_is_product(y, x, joined)
  dy = draw(rows, total)
  if total % 2 == 0:  # `matmul` needs an even inner dimension
    (dx,) = run(dy, kernels, [inner], transpose_b=True, dtype=dtype)
    assert_is_product(dx, dy, joined.T)
  dkernels = run(x, [dy], columns, transpose_a=True, dtype=dtype)
  assert [each.shape[1] for each in dkernels] == columns
  assert_is_product(np.concatenate(dkernels, 1), x.T, dy)


@needs_avx512_bf16
@pytest.mark.parametrize("transpose_a", [False, True])
def test_bits_depend_on_neither_threads_nor_other_rows(transpose_a):
  rows, inner, columns = 300, 2100, 130
  a = draw(rows, inner)
  find = functools.partial(
    run, bs=[draw(inner, columns)], sizes=[columns], transpose_a=transpose_a
  )

  def given(x):
    return np.ascontiguousarray(x.T) if transpose_a else x

  (whole,) = find(given(a))
  for threads in (1, 3):
    assert (find(given(a), threads=threads)[0] == whole).all()
  for some in (slice(0, 1), slice(5, 9), slice(100, 300)):
    assert (find(given(a[some]))[0] == whole[some]).all()


@needs_avx512_bf16
def test_a_number_that_is_not_finite_reaches_only_its_row():
  a = draw(8, 64)
  a[3, 5] = np.nan
  (y,) = run(a, [draw(64, 70)], [70])
  assert np.isnan(y[3].astype(np.float32)).all()
  assert np.isfinite(np.delete(y, 3, 0).astype(np.float32)).all()


# The flags of Zen 4, of Sapphire Rapids, whose tiles oneDNN uses, of a CPU
# without AVX512-BF16, and of one without other instructions of the library.
_ZEN_4 = frozenset(
  {"avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"}
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize(
  ("flags", "is_chosen"),
  [
    (_ZEN_4, True),
    (_ZEN_4 | {"amx_bf16"}, False),
    (_ZEN_4 - {"avx512_bf16"}, False),
    (_ZEN_4 - {"avx512_vnni"}, False),
  ],
)
def test_the_cpu_flags_choose_between_this_product_and_that_of_onednn(
  flags, is_chosen, monkeypatch
):
  # A choice by time could differ between two processes of a run.
  for module in (build, native_matmul):
    monkeypatch.setattr(module, "cpu_flags", lambda: flags)
  x = tf.zeros([4, 6], tf.bfloat16)
  assert multiplies(x, 6, threads=2) == is_chosen
  assert not multiplies(x, 6, threads=0)  # no C++ operations
  assert not multiplies(x, 5, threads=2)
  assert not multiplies(tf.cast(x, tf.float32), 6, threads=2)
