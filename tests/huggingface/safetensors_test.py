# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files are those of the safetensors library, in both directions."""

import json

import numpy as np
import pytest

from palm_mtf.errors import UserError
from palm_mtf.huggingface.safetensors import SafetensorsFile, write_safetensors

TENSORS = {
  "a": np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5,
  "b.weight": np.float32([1e-30, np.pi, -0.0]),
}


def _write(path, tensors=TENSORS) -> str:
  shapes = {name: x.shape for name, x in tensors.items()}
  write_safetensors(str(path), shapes, tensors.__getitem__)
  return str(path)


def _by_hand(path, header: dict, content: bytes) -> str:
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + content)
  return str(path)


def test_the_library_reads_what_is_written(tmp_path):
  library = pytest.importorskip("safetensors.numpy")
  found = library.load_file(_write(tmp_path / "x"))
  assert found.keys() == TENSORS.keys()
  for name, value in TENSORS.items():
    np.testing.assert_array_equal(found[name], value)


def test_what_the_library_writes_is_read(tmp_path):
  library = pytest.importorskip("safetensors.numpy")
  halves = {"c": np.float16([[1.5], [-3]])}
  library.save_file({**TENSORS, **halves}, tmp_path / "x")
  file = SafetensorsFile(str(tmp_path / "x"))
  assert file.shapes == {"a": (2, 3), "b.weight": (3,), "c": (2, 1)}
  for name, value in {**TENSORS, **halves}.items():
    assert file.read(name).dtype == np.float32
    np.testing.assert_array_equal(file.read(name), value)


def test_what_is_written_is_read_bit_for_bit(tmp_path):
  file = SafetensorsFile(_write(tmp_path / "x"))
  for name, value in TENSORS.items():
    assert file.read(name).tobytes() == value.tobytes()


def test_a_transposed_tensor_is_written_in_row_major_order(tmp_path):
  value = np.arange(6, dtype=np.float32).reshape(2, 3).T
  file = SafetensorsFile(_write(tmp_path / "x", {"a": value}))
  np.testing.assert_array_equal(file.read("a"), value)


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path):
  header = {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
  path = _by_hand(tmp_path / "x", header, bytes.fromhex("c03f00c0"))
  np.testing.assert_array_equal(SafetensorsFile(path).read("a"), [1.5, -2])


def test_integers_are_refused_by_the_tensors_name(tmp_path):
  header = {"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}
  path = _by_hand(tmp_path / "x", header, b"\0")
  with pytest.raises(UserError, match="its a is I8"):
    SafetensorsFile(path).read("a")


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"{}" * 9])
def test_another_file_is_refused(tmp_path, content):
  (tmp_path / "x").write_bytes(content)
  with pytest.raises(UserError, match="is no safetensors file"):
    SafetensorsFile(str(tmp_path / "x"))


def test_a_truncated_file_is_refused(tmp_path):
  path = tmp_path / "x"
  _write(path)
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(UserError, match="is not whole"):
    SafetensorsFile(str(path))


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(UserError, match=r"x: No such file"):
    SafetensorsFile(str(tmp_path / "x"))
