# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products by AMX, whose tiles are emulated on CPUs without it.

emulated_tiles.h implements the tiles as Intel's manual defines them; here, all
else is the package's own code (tiles.cc). The instructions are also compiled,
and read in the machine code.
"""

import ctypes
import functools
import os
import pathlib
import re
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

from palm_mtf.machine import processors
from palm_mtf.native import build
from palm_mtf.native.operations import operations_built_with
from tests import processes
from tests.cases import slow
from tests.cpus import SAPPHIRE_RAPIDS, pretend_cpu

FOLDER = pathlib.Path(__file__).parent
EMULATED = "-include", str(FOLDER / "emulated_tiles.h")
WITHOUT_AMX = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
WITH_AMX = *WITHOUT_AMX, "-mamx-tile", "-mamx-bf16", "-mamx-int8"
NEVER = 2**31 - 1  # rows
MOST_ROWS = 70
# Terms that fill tiles, that fill half of one, and odd ones; several stretches.
INNERS = (1, 33, 64, 150, 600)

needs_compiler = pytest.mark.skipif(
  shutil.which("c++") is None, reason="there is no C++ compiler"
)
needs_avx512 = pytest.mark.skipif(
  "avx512_bf16" not in processors.cpu_flags(),
  reason="tiles work together with AVX-512-BF16, which this CPU lacks",
)


def compile_products(options, folder):
  """Compiles tiles.cc; returns the library's path."""
  library = folder / "tiles.so"
  subprocess.run(
    [
      *("c++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", *options),
      *(f"-I{build._SOURCES}", FOLDER / "tiles.cc", "-o", library),
    ],
    check=True,
  )
  return library


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tiles")
  return ctypes.CDLL(str(compile_products([*WITHOUT_AMX, *EMULATED], folder)))


def pointer(x):
  return x.ctypes.data_as(ctypes.c_void_p)


def multiply(library, dtype, x, w, tile_rows=1):
  y = np.zeros([len(x), w.shape[1]], np.float32)
  sizes = len(x), *w.shape, tile_rows
  given = (pointer(each) for each in (x, w))
  getattr(library, f"multiply_{dtype}")(*given, *sizes, pointer(y))
  return y


def random(rows, inner, kind=ml_dtypes.bfloat16):
  """Returns [rows, inner] and [inner, 130], which is two panels and a part."""
  rng = np.random.default_rng(inner)
  return [
    rng.standard_normal(shape).astype(kind).astype(np.float32)
    for shape in ([rows, inner], [inner, 130])
  ]


def assert_close(y, x, w):
  """Fails if an error exceeds the bound of a float32 sum in any order."""
  exact = x.astype(float) @ w
  bound = np.abs(x).astype(float) @ np.abs(w) * 2**-24 * (len(w) + 2)
  assert np.all(np.abs(y - exact) <= bound)


@needs_compiler
@needs_avx512
@pytest.mark.parametrize("inner", INNERS)
def test_bfloat16_products_by_tiles_are_sums_in_float32(emulated, inner):
  x, w = random(MOST_ROWS, inner)
  whole = multiply(emulated, "bfloat16", x, w)
  assert_close(whole, x, w)
  by_vectors = multiply(emulated, "bfloat16", x, w, NEVER)
  assert_close(by_vectors, x, w)
  # One tile has all terms of up to 32; tiles sum more terms in another order.
  assert np.any(whole != by_vectors) == (inner > 32)
  for rows in (1, 15, 16, 17, 31, 32, 33, 69):
    # A row has the same bits whatever other rows there are, so that prompts may
    # be read in parts.
    found = multiply(emulated, "bfloat16", x[:rows], w)
    np.testing.assert_array_equal(found, whole[:rows])


@needs_compiler
@needs_avx512
@pytest.mark.parametrize("inner", INNERS)
def test_int8_products_by_tiles_are_those_of_avx512(emulated, inner):
  x, w = random(MOST_ROWS, inner, np.float32)
  for rows in (1, 15, 16, 17, 40, MOST_ROWS):
    found = multiply(emulated, "int8", x[:rows], w)
    expected = multiply(emulated, "int8", x[:rows], w, NEVER)
    np.testing.assert_array_equal(found, expected)
  numbers, scales = zip(*map(to_int8, (x, w.T)), strict=True)
  exact = (numbers[0] @ numbers[1].T) * (scales[0] * scales[1].T)
  np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def to_int8(x):
  """Returns whole numbers and the scale of each row, in float64."""
  scale = np.abs(x).max(1, keepdims=True).astype(float) / 127
  return np.round(x / scale), scale


@needs_compiler
@needs_avx512
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 32, MOST_ROWS])
@pytest.mark.parametrize("inner", [32, 40, 96])  # 40 numbers fill no tile
def test_products_of_attention_are_sums_in_float32(
  emulated, inner, rows, is_transposed
):
  x, w = random(rows, inner)
  words = x.astype(ml_dtypes.bfloat16).view(np.uint32)  # pairs of numbers
  if is_transposed:
    words = np.ascontiguousarray(words.T)
  y = np.zeros([rows, w.shape[1]], np.float32)
  emulated.multiply_pairs(
    *(pointer(words), pointer(w.astype(ml_dtypes.bfloat16))),
    *(rows, inner // 2, w.shape[1], is_transposed, pointer(y)),
  )
  assert_close(y, x, w)


def tile_instructions(library):
  """Returns the instructions of AMX in a library."""
  objdump = shutil.which("objdump")
  if not objdump:
    pytest.skip("there is no objdump to read machine code")
  code = subprocess.run(
    [objdump, "-d", "--no-show-raw-insn", library],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  # Other lines name functions, such as `tile`.
  return {*re.findall(r"^ *[0-9a-f]+:\s+((?:ld)?tile\w+|tdp\w+)", code, re.M)}


def options_under(limit, tmp_path, monkeypatch):
  """Returns the compiler's options for a CPU with AMX under a limit."""
  pretend_cpu(SAPPHIRE_RAPIDS, tmp_path, monkeypatch)
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
  return build.choose_instruction_flags(processors.cpu_flags(), "x86_64")


@needs_compiler
@pytest.mark.parametrize("limit", ["AVX512_CORE_AMX", slow("ALL")])
def test_with_amx_products_of_both_dtypes_are_compiled_for_tiles(
  limit, tmp_path, monkeypatch
):
  options = options_under(limit, tmp_path, monkeypatch)
  assert options == [*WITH_AMX]
  assert tile_instructions(compile_products(options, tmp_path)) == {
    *("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"),
    *("tdpbf16ps", "tdpbusd"),
  }


@needs_compiler
@pytest.mark.parametrize(
  "limit",
  ["AVX512_CORE_BF16", slow("AVX512_CORE_FP16"), slow("AVX2"), slow("SSE41")],
)
def test_under_a_lower_limit_no_instruction_of_amx_is_compiled(
  limit, tmp_path, monkeypatch
):
  options = options_under(limit, tmp_path, monkeypatch)
  assert tile_instructions(compile_products(options, tmp_path)) == set()


def test_without_tiles_from_linux_nothing_is_compiled_for_amx(
  tmp_path, monkeypatch
):
  pretend_cpu(SAPPHIRE_RAPIDS, tmp_path, monkeypatch)
  monkeypatch.setattr(processors, "may_use_tiles", lambda: False)
  flags = processors.cpu_flags()
  assert not flags & processors.AMX_FLAGS
  assert "avx512_bf16" in flags
  options = build.choose_instruction_flags(flags, "x86_64")
  assert options == [*WITHOUT_AMX]


def test_linux_gives_tiles_only_to_processes_on_cpus_that_have_them():
  said = processes.python(
    "-c",
    "from palm_mtf.machine.processors import may_use_tiles as may\n"
    "print(may(), may())",
  ).stdout.split()
  flags = processors.read_or_empty(processors.CPUINFO).split()
  assert len({*said}) == 1, "a second request has another answer"
  assert said[0] == "False" or "amx_tile" in flags


@functools.cache
def real():
  """Returns the products that this CPU's tiles compute, or skips the test."""
  if not processors.AMX_FLAGS <= processors.cpu_flags():
    pytest.skip("this CPU has no AMX, so tiles are only emulated")
  folder = pathlib.Path(os.environ["XDG_CACHE_HOME"])
  return ctypes.CDLL(str(compile_products(WITH_AMX, folder)))


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("inner", INNERS)
def test_tiles_of_this_cpu_have_the_bits_of_the_manual(inner, dtype, request):
  library = real()
  emulated = request.getfixturevalue("emulated")
  x, w = random(MOST_ROWS, inner)
  for rows in (1, 16, 33, MOST_ROWS):
    given = dtype, x[:rows], w
    found = multiply(library, *given)
    np.testing.assert_array_equal(found, multiply(emulated, *given))


# Compiles the whole library with emulated tiles, and runs the tests of its
# operations: their results are those of the oracles, and a row's bits, also
# those of prompts that are read in parts, depend on no other row.
@pytest.mark.slow
@needs_compiler
@needs_avx512
def test_operations_with_emulated_tiles_equal_the_oracles():
  if "amx" in operations_built_with():
    pytest.skip("the other tests run with the tiles of this CPU")
  tests = (
    *("native/packing_test.py", "native/self_attention_test.py"),
    "generation/inference/slot_decoder_test.py::"
    "test_parts_of_long_prompts_give_the_bits_of_whole_prompts",
  )
  run = processes.python(
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not lesser"),
    *(FOLDER.parent / each for each in tests),
    variables={"CXX": " ".join(["c++", *EMULATED])},
  )
  assert run.returncode == 0, run.stdout
