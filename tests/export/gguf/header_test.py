# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A GGUF header is read as the gguf package reads it, or refused in one line.

The bytes are written here, after the format's specification.
"""

import os
import struct

import gguf
import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.files import GgufFile
from tests.refusals import message_of

U8, U32, TEXT, ARRAY = 0, 4, 8, 9


def text(x):
  x = x if isinstance(x, bytes) else x.encode()
  return struct.pack("<Q", len(x)) + x


def key(name, kind, value):
  return text(name) + struct.pack("<I", kind) + value


def u32(*values):
  return struct.pack(f"<{len(values)}I", *values)


def u64(*values):
  return struct.pack(f"<{len(values)}Q", *values)


def tensor(name, shape, offset, kind=0):  # float32
  return text(name) + u32(len(shape)) + u64(*shape) + u32(kind) + u64(offset)


def file(keys=(), tensors=(), data=b"", version=3, counts=None):
  counts = counts or (len(tensors), len(keys))
  head = b"GGUF" + u32(version) + u64(*counts) + b"".join([*keys, *tensors])
  return head + bytes(-len(head) % 32) + data


A, B = tensor("a", [4, 2], 0), tensor("b", [8], 32)
DATA = bytes(64)
BIG_ENDIAN = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
NESTED = u32(ARRAY) + u64(1)
# {file: message}
DAMAGED = {
  b"": "the header goes beyond the file",
  b"GGUF": "the header goes beyond the file",
  b"GGML" + file()[4:]: "it does not begin with GGUF",
  file(version=1): "it has version 1; 2 and 3 are read",
  # Numbers of things that are not there take neither time nor memory.
  file(counts=(0, 2**60)): "the header goes beyond the file",
  file(counts=(2**60, 0)): "the header goes beyond the file",
  file([u64(2**63)]): "the header goes beyond the file",
  file([key("x", TEXT, u64(2**62))]): "the header goes beyond the file",
  file([key("x", ARRAY, u32(U32) + u64(2**60))]): "the header goes beyond",
  file([key("x", ARRAY, u32(U8) + u64(2**62))]): "the header goes beyond",
  file([key("x", ARRAY, u32(TEXT) + u64(2**62))]): "the header goes beyond",
  file([key("x", ARRAY, u32(U8) + u64(2**23) + bytes(2**23))]): (
    "the header has over 4,194,304 numbers"
  ),
  file([key("x", ARRAY, NESTED * 5000)]): "x is an array of arrays",
  file([key("x", ARRAY, u32(ARRAY) + u64(0))]): "x is an array of arrays",
  file([key("x", 13, u32(1))]): "x has the unknown type 13",
  file([key("x", ARRAY, u32(99) + u64(1))]): "x has the unknown type 99",
  file([key("x", TEXT, text(b"\xff"))]): "can't decode byte 0xff",
  file([key(b"\xff", U32, u32(1))]): "can't decode byte 0xff",
  file([key("x", U32, u32(1))] * 2): "it has the key x twice",
  file([key("general.alignment", U32, u32(0))]): "alignment = 0 is no power",
  file([key("general.alignment", U32, u32(3))]): "alignment = 3 is no power",
  file([key("general.alignment", TEXT, text("a"))]): "alignment = a is no",
  file([], [A, A], DATA): "it has the tensor a twice",
  file([], [A, tensor("b", [8], 0)], DATA): "b begins at byte 0, not at 32",
  file([], [A, tensor("b", [8], 64)], DATA * 2): "byte 64, not at 32",
  file([], [A, tensor("b", [8], 34)], DATA * 2): "byte 34, not at 32",
  file([], [A, tensor("b", [8], 2**40)], DATA): "not at 32",
  file([], [B, A], DATA): "b begins at byte 32, not at 0",
  file([], [A, B], DATA[:-1]): "b ends beyond the file's 191 bytes",
  file([], [tensor("a", [2**40, 2**40], 0)], DATA): "a ends beyond the file's",
  file([], [tensor("a", [], 0)], DATA): "a is () in blocks of 1",
  file([], [tensor("a", [0], 0)], DATA): "a is (0,) in blocks of 1",
  file([], [tensor("a", [1] * 5, 0)], DATA): "a has 5 dimensions",
  file([], [tensor("a", [8], 0, 200)], DATA): "200 is not a valid GGML",
  file([], [tensor("a", [33], 0, 8)], DATA): "a is (33,) in blocks of 32",
}


@pytest.mark.parametrize("content", DAMAGED, ids=lambda x: DAMAGED[x])
def test_a_damaged_header_is_refused(content, tmp_path):
  path = tmp_path / "x.gguf"
  path.write_bytes(content)
  said = message_of(GgufFile, str(path))
  assert said.startswith(f"{path}: is no whole GGUF file: ")
  assert DAMAGED[content] in said
  assert len(said) < 300 + len(str(path))


def test_a_big_endian_file_is_named(tmp_path):
  path = tmp_path / "x.gguf"
  path.write_bytes(BIG_ENDIAN)
  with pytest.raises(UserError, match="is a big-endian GGUF file; convert"):
    GgufFile(str(path))


NOT_REGULAR = {
  "FIFO": os.mkfifo,
  "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", NOT_REGULAR.values(), ids=NOT_REGULAR)
def test_what_is_no_regular_file_is_refused_at_once(make, tmp_path, capsys):
  path = tmp_path / "x.gguf"
  make(path)
  assert main(["import", str(path), "--output", str(tmp_path / "run")]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.endswith(", not a regular file.")


def test_the_gguf_packages_own_files_are_read_as_it_reads_them(tmp_path):
  path = str(tmp_path / "x.gguf")
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_custom_alignment(64)
  kinds = gguf.GGUFValueType
  numbers = [x for x in kinds if x not in (kinds.STRING, kinds.ARRAY)]
  for each in numbers:
    writer.add_key_value(f"a.{each.name}", 1, each)
  writer.add_string("text", "caf\u00e9\n")
  writer.add_array("texts", ["", "b\u2581"])
  writer.add_array("numbers", [1, -(2**31)])
  writer.add_array("reals", [0.5, 2.0])
  writer.add_array("truths", [True, False])
  writer.add_tensor("x", np.arange(6, dtype=np.float16).reshape(2, 3))
  writer.add_tensor("y", np.arange(64, dtype=np.float32))
  q8_0 = np.arange(68, dtype=np.uint8).reshape(1, 68)
  writer.add_tensor("z", q8_0, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  theirs, ours = gguf.GGUFReader(path), GgufFile(path)
  assert ours.metadata == {
    name: x.contents()
    for name, x in theirs.fields.items()
    if not name.startswith("GGUF.")
  }
  assert [*ours.places] == [x.name for x in theirs.tensors]
  for each in theirs.tensors:
    place = ours.places[each.name]
    assert place.shape == (*reversed(each.shape.tolist()),)
    assert (place.dtype, place.offset) == (
      each.tensor_type.name,
      each.data_offset,
    )
    rows = np.prod(place.shape[:-1], dtype=int)
    assert rows * place.row_bytes == each.n_bytes
