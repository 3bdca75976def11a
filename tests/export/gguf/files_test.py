# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Each type is read as llama.cpp defines it; damage is refused."""

import struct

import gguf
import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.architectures import read_model_metadata
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.model import import_gguf_parameters
from tests import llama_cpp_peer
from tests.blocks import SETTINGS
from tests.export.gguf.architectures_test import SIZES, compute, write
from tests.mtf_testing import small_config
from tests.transformers_folder import parameters


def dequantize(name, block):
  """Returns the numbers of one block, written after ggml-common.h."""
  if name == "BF16":
    return [struct.unpack("<f", b"\0\0" + block)[0]]
  (first,) = struct.unpack_from("<e", block)
  if name == "F16":
    return [first]
  if name == "Q8_0":
    return [first * x for x in struct.unpack("32b", block[2:])]
  nibbles = [x & 15 for x in block[2:]] + [x >> 4 for x in block[2:]]
  return [first * (x - 8) for x in nibbles]


# {type: (numbers per block, bytes per block)}; the test with llama.cpp's
# quantizer has all types.
BLOCKS = {"F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q8_0": (32, 34)}


def write_raw(folder, name, blocks) -> GgufFile:
  """Returns a file with blocks of a type as its tensor x."""
  path = str(folder / "model.gguf")
  writer = gguf.GGUFWriter(path, "llama")
  kind = gguf.GGMLQuantizationType[name]
  writer.add_tensor("x", blocks, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return GgufFile(path)


@pytest.mark.parametrize("name", BLOCKS)
def test_random_blocks_are_the_numbers_of_the_format(name, tmp_path):
  numbers, size = BLOCKS[name]
  rng = np.random.default_rng(0)
  blocks = rng.integers(256, size=[6, size], dtype=np.uint8)
  # Each block begins with a finite number of 16 bits.
  firsts = rng.normal(size=6).astype("<f2")
  if name == "BF16":
    firsts = (firsts.astype("<f4").view("<u4") >> 16).astype("<u2")
  blocks[:, :2] = firsts.view(np.uint8).reshape(6, 2)
  file = write_raw(tmp_path, name, blocks.reshape(2, -1))
  assert file.dtypes == {"x": name}
  assert file.shapes == {"x": (2, 3 * numbers)}
  expected = [dequantize(name, x.tobytes()) for x in blocks]
  found = file.read("x")
  assert found.dtype == np.float32
  # A product of three numbers is rounded to float32 twice.
  largest = np.abs(expected).max()
  np.testing.assert_allclose(
    found, np.reshape(expected, found.shape), rtol=0, atol=3e-7 * largest
  )


MODEL = small_config(**{**SIZES, **SETTINGS["LLaMA 3"]})


@pytest.fixture(scope="module")
def whole(vocabulary, tmp_path_factory):
  """A file that is imported without an error."""
  path = tmp_path_factory.mktemp("whole") / "model.gguf"
  write(path, MODEL, parameters(MODEL), vocabulary)
  return path


def copy(source, path, *, drop=(), **changes):
  """Writes a file again without some tensors, and with other keys."""
  file = GgufFile(str(source))
  shapes = {name: x for name, x in file.shapes.items() if name not in drop}
  write_gguf(str(path), file.metadata | changes, shapes, "float32", file.read)


NOT_A_NUMBER = struct.pack("<f", float("nan"))
# {a change of the file's bytes: message}
DAMAGED = {
  (lambda x: x[:-1000]): "is no whole GGUF file",
  (lambda x: x[:5000]): "is no whole GGUF file",
  (lambda x: b"GGML" + x[4:]): "is no whole GGUF file",
  (lambda x: b""): "is no whole GGUF file",
  (lambda x: x[:-4] + NOT_A_NUMBER): "holds a number that is not finite",
}
# (tensors that are left out, other metadata, message)
OTHERS = [
  ([], ("general.architecture", "mamba"), "general.architecture = 'mamba'"),
  (
    [],
    ("llama.rope.scaling.type", "longrope"),
    "llama.rope.scaling.type = 'longrope'",
  ),
  (
    [],
    ("llama.final_logit_softcapping", 30.0),
    "llama.final_logit_softcapping = 30.0",
  ),
  (["blk.1.ffn_up.weight"], (), "blk.1.ffn_up.weight is missing"),
  ([], ("tokenizer.ggml.model", "bert"), "tokenizer.ggml.model = 'bert'"),
  ([], ("tokenizer.chat_template", 5), "chat_template = 5: is not a text"),
  *(
    ([], (f"tokenizer.ggml.{key}", value), f"x.gguf: tokenizer.ggml.{key}{why}")
    for key, value, why in (
      ("model", ["llama"], " = ['llama']: is not a text"),
      ("bos_token_id", "x", " = 'x': is not a whole number"),
      ("bos_token_id", 1.5, " = 1.5: is not a whole number"),
      ("eos_token_id", True, " = True: is not a whole number"),
      ("unknown_token_id", [1], " = [1]: is not a whole number"),
      ("unknown_token_id", 1, " = 1: is also the eos_token_id"),
      ("tokens", "abc", " = 'abc': is not an array of texts"),
      ("tokens", [1, 2], " = [1, 2]: is not an array of texts"),
      ("token_type", 1, " = 1: is not an array of whole numbers"),
      ("token_type", [99] * 912, ": holds 99"),
      ("scores", 1.0, " = 1.0: is not an array of numbers"),
      ("scores", ["x"], " = ['x']: is not an array of numbers"),
      ("scores", [float("nan")] * 912, ": holds a number that is not finite"),
      ("add_space_prefix", "no", " = 'no': is not true or false"),
    )
  ),
]


def import_file(path, output):
  return main(["import", str(path), "--output", str(output)])


def test_a_whole_file_is_imported(whole, tmp_path):
  assert import_file(whole, tmp_path / "run") == 0
  copied = tmp_path / "copied.gguf"
  copy(whole, copied)
  assert import_file(copied, tmp_path / "again") == 0


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(damage, whole, tmp_path, capsys):
  path = tmp_path / "model.gguf"
  path.write_bytes(damage(whole.read_bytes()))
  check_refused(path, DAMAGED[damage], capsys)


@pytest.mark.parametrize("drop, change, message", OTHERS)
def test_another_file_is_refused_in_one_line(
  drop, change, message, whole, tmp_path, capsys
):
  path = tmp_path / "x.gguf"
  copy(whole, path, drop=drop, **dict([change] if change else []))
  check_refused(path, message, capsys)


def check_refused(path, message, capsys):
  assert import_file(path, path.parent / "run") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert [*path.parent.iterdir()] == [path]


def test_a_path_without_a_file_is_refused_in_one_line(tmp_path, capsys):
  assert import_file(tmp_path / "no.gguf", tmp_path / "run") == 2
  assert capsys.readouterr().err.endswith("no.gguf: no such file.\n")


def test_a_type_that_the_gguf_package_does_not_read_is_refused(tmp_path):
  blocks = np.zeros([1, 292], np.uint8)
  file = write_raw(tmp_path, "Q8_K", blocks)
  with pytest.raises(UserError, match="its x is Q8_K, which is not read"):
    file.read("x")


# {type of llama.cpp's quantizer: largest difference from the logits of the same
# weights in float32, relative to their range}. llama.cpp rounds the activations
# in each product: to int8 with a scale per 32 or 256 numbers (steps of 1/127 of
# the largest), to float16 (steps of 2^-11) or to bfloat16 (steps of 2^-8).
QUANTIZED = {
  **dict.fromkeys(["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"], 1.5e-2),
  **dict.fromkeys(["Q4_K_M", "Q5_K_M", "Q6_K"], 1.5e-2),
  **{"F16": 5e-4, "BF16": 4e-3},
}


@pytest.fixture(scope="module")
def large(vocabulary, tmp_path_factory):
  """A file in float32 with rows of 256 numbers, which K-quants need."""
  path = tmp_path_factory.mktemp("large") / "model.gguf"
  sizes = {**SIZES, "d_model": 256, "d_kv": 64, "d_ff": 512}
  model = small_config(**{**sizes, **SETTINGS["LLaMA 3"]})
  write(path, model, parameters(model), vocabulary)
  return path


@pytest.mark.peers
@pytest.mark.parametrize("name", QUANTIZED)
def test_files_of_llama_cpps_quantizer_have_its_numbers_and_logits(
  name, large, tmp_path
):
  path, plain = tmp_path / "quantized.gguf", tmp_path / "float32.gguf"
  quantize = llama_cpp_peer.quantize
  llama_cpp_peer.call(quantize, large, path, f"MOSTLY_{name}")
  llama_cpp_peer.call(quantize, path, plain, "ALL_F32")
  file, theirs = GgufFile(str(path)), GgufFile(str(plain))
  assert {"F32"} < {*file.dtypes.values()}
  assert {*theirs.dtypes.values()} == {"F32"}
  assert file.shapes == theirs.shapes
  for tensor in file.shapes:  # bit for bit
    np.testing.assert_array_equal(file.read(tensor), theirs.read(tensor))
  own, model = read_model_metadata(file.metadata, file.shapes, str(path))
  params = import_gguf_parameters(file, model, own, str(path))
  ids = [*range(1, 17)]
  ours = compute(model, params, ids)
  for each, limit in ((plain, 1e-6), (path, QUANTIZED[name])):
    found = llama_cpp_peer.call(llama_cpp_peer.compute_logits, each, ids)
    difference = np.abs(found - ours).max()
    assert difference < limit * np.ptp(ours)
