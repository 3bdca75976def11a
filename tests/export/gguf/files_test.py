# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of each type are read as llama.cpp defines them; damage is refused.

`dequantize` is written only after the block layouts of llama.cpp's
ggml-common.h and ggml-quants.c.
"""

import itertools
import struct

import gguf
import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.metadata import read_model_metadata
from palm_mtf.export.gguf.model import import_gguf_parameters
from tests import llama_cpp_peer
from tests.blocks import SETTINGS
from tests.export.gguf.architectures_test import SIZES, compute, write
from tests.mtf_testing import small_config
from tests.transformers_folder import parameters


def halves(block, *places):
  """Returns the float16 numbers at some bytes of a block."""
  return [struct.unpack_from("<e", block, x)[0] for x in places]


def nibbles(block):
  """Returns the low, then the high, halves of bytes."""
  return [x & 15 for x in block] + [x >> 4 for x in block]


def fifth_bits(block):
  """Returns 32 bits of a little-endian number, each times 16."""
  (bits,) = struct.unpack("<I", block)
  return [(bits >> i & 1) * 16 for i in range(32)]


def dequantize_q4_k(block):
  """256 numbers: in each of 8 parts, a scale and a minimum of 6 bits."""
  (d, least), packed, quants = halves(block, 0, 2), block[4:16], block[16:]
  found = []
  for j in range(8):
    if j < 4:
      scale, minimum = packed[j] & 63, packed[j + 4] & 63
    else:
      scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
      minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
    part = quants[32 * (j // 2) : 32 * (j // 2) + 32]
    values = [x >> 4 if j % 2 else x & 15 for x in part]
    found += [d * scale * x - least * minimum for x in values]
  return found


def dequantize_q6_k(block):
  """256 numbers of 4 low and 2 high bits, with a scale per 16 of them."""
  low, high, scales = block[:128], block[128:192], block[192:208]
  scales = struct.unpack("16b", scales)
  (d,) = halves(block, 208)
  found = [0.0] * 256
  for half, i in itertools.product(range(2), range(32)):
    a, b = low[64 * half + i], low[64 * half + 32 + i]
    bits = high[32 * half + i]
    values = [a & 15, b & 15, a >> 4, b >> 4]
    for j, x in enumerate(values):
      x = (x | (bits >> 2 * j & 3) << 4) - 32
      at = 32 * j + i
      found[128 * half + at] = d * scales[8 * half + at // 16] * x
  return found


def dequantize(name, block):
  """Returns the numbers of one block."""
  if name == "F16":
    return halves(block, 0)
  if name == "BF16":
    return [struct.unpack("<f", b"\0\0" + block)[0]]
  if name == "Q8_0":
    (d,) = halves(block, 0)
    return [d * x for x in struct.unpack("32b", block[2:])]
  if name == "Q4_0":
    (d,) = halves(block, 0)
    return [d * (x - 8) for x in nibbles(block[2:])]
  if name == "Q4_1":
    d, least = halves(block, 0, 2)
    return [d * x + least for x in nibbles(block[4:])]
  if name == "Q5_0":
    (d,) = halves(block, 0)
    parts = zip(nibbles(block[6:]), fifth_bits(block[2:6]), strict=True)
    return [d * (x + high - 16) for x, high in parts]
  if name == "Q5_1":
    d, least = halves(block, 0, 2)
    parts = zip(nibbles(block[8:]), fifth_bits(block[4:8]), strict=True)
    return [d * (x + high) + least for x, high in parts]
  return {"Q4_K": dequantize_q4_k, "Q6_K": dequantize_q6_k}[name](block)


# {type: (numbers per block, bytes per block, places of float16 scales)}
BLOCKS = {
  "F16": (1, 2, [0]),
  "BF16": (1, 2, []),
  "Q4_0": (32, 18, [0]),
  "Q4_1": (32, 20, [0, 2]),
  "Q5_0": (32, 22, [0]),
  "Q5_1": (32, 24, [0, 2]),
  "Q8_0": (32, 34, [0]),
  "Q4_K": (256, 144, [0, 2]),
  "Q6_K": (256, 210, [208]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_random_blocks_are_the_numbers_of_the_format(name, tmp_path):
  numbers, size, scales = BLOCKS[name]
  rng = np.random.default_rng(0)
  blocks = rng.integers(256, size=[6, size], dtype=np.uint8)
  for place in scales:
    values = rng.normal(size=6).astype("<f2")
    blocks[:, place : place + 2] = values.view(np.uint8).reshape(6, 2)
  if name == "BF16":
    blocks = (rng.normal(size=6).astype("<f4").view("<u4") >> 16).astype("<u2")
    blocks = blocks.view(np.uint8).reshape(6, 2)
  path = str(tmp_path / "model.gguf")
  writer = gguf.GGUFWriter(path, "llama")
  kind = gguf.GGMLQuantizationType[name]
  writer.add_tensor("x", blocks.reshape(2, -1), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  file = GgufFile(path)
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
  assert capsys.readouterr().err.endswith(
    "no.gguf: No such file or directory.\n"
  )


def test_a_type_that_the_gguf_package_does_not_read_is_refused(tmp_path):
  path = str(tmp_path / "model.gguf")
  writer = gguf.GGUFWriter(path, "llama")
  kind = gguf.GGMLQuantizationType.Q8_K
  size = gguf.GGML_QUANT_SIZES[kind][1]
  writer.add_tensor("x", np.zeros([1, size], np.uint8), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(UserError, match="its x is Q8_K, which is not read"):
    GgufFile(path).read("x")


# {type of llama.cpp's quantizer: largest difference from the logits of the same
# weights in float32, relative to their range}. llama.cpp rounds the activations
# in each product: to int8 with a scale per 32 or 256 numbers (steps of 1/127 of
# the largest), to float16 (steps of 2^-11) or to bfloat16 (steps of 2^-8).
QUANTIZED = {
  **dict.fromkeys(["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"], 1.5e-2),
  **dict.fromkeys(["Q4_K_M", "Q5_K_M", "Q6_K"], 1.5e-2),
  **{"F16": 5e-4, "BF16": 4e-3},
}


@pytest.fixture(scope="module", params=["LLaMA 3", "Mixtral"])
def large(request, vocabulary, tmp_path_factory):
  """A file in float32 with rows of 256 numbers, which K-quants need."""
  path = tmp_path_factory.mktemp("large") / "model.gguf"
  sizes = {**SIZES, "d_model": 256, "d_kv": 64, "d_ff": 512}
  model = small_config(**{**sizes, **SETTINGS[request.param]})
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
