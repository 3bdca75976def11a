# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every weight file in a folder is read, or refused by name."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.tensor_files import (
  SafetensorsFile,
  TensorFiles,
  write_safetensors,
)
from tests import transformers_folder
from tests.transformers_folder import GATE, INDEX, SHARD, UP, change_json, split


def _refused(folder) -> str:
  with pytest.raises(UserError) as error:
    TensorFiles(str(folder))
  assert len(str(error.value).splitlines()) == 1
  return str(error.value)


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"[]",
    b"{}",
    b"[" * 200_000,
    b'{"weight_map": {}}',
    b'{"weight_map": "a"}',
  ],
  ids=lambda x: str(x[:20]),
)
def test_an_index_without_a_map_is_refused(content, model_folder):
  split(model_folder)
  (model_folder / INDEX).write_bytes(content)
  assert "index.json: " in _refused(model_folder)


@pytest.mark.parametrize(
  "file",
  [
    5,
    ["a.safetensors"],
    "",
    "..",
    "a\0b.safetensors",
    "../model/" + SHARD,
    "/tmp/x.safetensors",
    "sub/x.safetensors",
    "config.json",
    "missing.safetensors",
  ],
)
def test_an_index_names_only_files_of_safetensors_in_its_folder(
  file, model_folder
):
  index = split(model_folder)
  change_json(model_folder / INDEX, weight_map={**index, UP: file})
  assert "safetensors" in _refused(model_folder)


def test_an_index_and_its_shards_name_the_same_tensors(model_folder):
  index = split(model_folder)
  path = model_folder / INDEX
  change_json(path, weight_map={**index, "a": SHARD})
  assert f"'a' is not in {SHARD}" in _refused(model_folder)
  del index[UP]
  change_json(path, weight_map=index)
  assert f"its '{UP}' is not listed" in _refused(model_folder)


def test_a_tensor_that_two_shards_hold_is_refused(model_folder):
  index = split(model_folder)
  other = {"model.norm.weight": np.ones(24, np.float32), "a": np.ones(1)}
  transformers_folder.write_tensors(model_folder / "b.safetensors", other)
  change_json(model_folder / INDEX, weight_map={**index, "a": "b.safetensors"})
  assert "its 'model.norm.weight' is not listed as this file's" in _refused(
    model_folder
  )


@pytest.mark.parametrize(
  "name",
  [
    SHARD,
    "model.fp16.safetensors",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "tf_model.h5",
    "flax_model.msgpack",
    "model.ckpt.index",
    "ggml-model-q4_0.gguf",
  ],
)
def test_other_weights_in_the_folder_are_refused_by_name(name, model_folder):
  shutil.copy(model_folder / "model.safetensors", model_folder / name)
  line = _refused(model_folder)
  assert "only model.safetensors is read" in line and name in line


def test_other_weights_next_to_shards_are_refused_by_name(model_folder):
  split(model_folder)
  (model_folder / "old.safetensors").write_bytes(b"")
  line = _refused(model_folder)
  assert "only model.safetensors.index.json is read" in line
  assert "'old.safetensors'" in line


def test_an_adapter_s_configuration_is_refused_as_what_it_is(model_folder):
  (model_folder / "adapter_config.json").write_text('{"r": 8}')
  line = _refused(model_folder)
  assert "'adapter_config.json' is the configuration of an adapter" in line
  assert "weights" not in line


def test_files_that_are_ignored_are_named_in_one_warning(model_folder, caplog):
  TensorFiles(str(model_folder))
  assert not caplog.records
  (model_folder / "lora").mkdir()
  (model_folder / "lora" / "optimizer.pt").touch()
  (model_folder / "lora" / "adapter_model.safetensors").touch()
  (model_folder / "pytorch_model.bin.index.json").touch()
  TensorFiles(str(model_folder))
  (record,) = caplog.records
  assert record.getMessage() == (
    f"{model_folder}: only model.safetensors is read; ignored: "
    "'lora/adapter_model.safetensors', 'pytorch_model.bin.index.json'."
  )
  (model_folder / "lora" / "b.bin").touch()
  (model_folder / "model.safetensors.bak").touch()
  split(model_folder)
  TensorFiles(str(model_folder))
  assert "only model.safetensors.index.json is" in caplog.text
  assert "'model.safetensors.bak' and 1 more." in caplog.text


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


def _check_refused(path) -> None:
  with pytest.raises(UserError) as error:
    file = SafetensorsFile(str(path))
    for name in file.shapes:
      file.read(name)
  (line,) = str(error.value).splitlines()
  assert line.startswith(f"{path}: ")


def test_the_library_reads_what_is_written(tmp_path):
  found = safetensors.numpy.load_file(_write(tmp_path / "x"))
  assert found.keys() == TENSORS.keys()
  for name, value in TENSORS.items():
    np.testing.assert_array_equal(found[name], value)


def test_what_the_library_writes_is_read(tmp_path):
  halves = {"c": np.float16([[1.5], [-3]])}
  safetensors.numpy.save_file({**TENSORS, **halves}, tmp_path / "x")
  file = SafetensorsFile(str(tmp_path / "x"))
  assert file.shapes == {"a": (2, 3), "b.weight": (3,), "c": (2, 1)}
  for name, value in {**TENSORS, **halves}.items():
    assert file.read(name).dtype == np.float32
    np.testing.assert_array_equal(file.read(name), value)


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


@pytest.mark.parametrize(
  "change",
  [
    lambda x: {"data_offsets": x[GATE]["data_offsets"]},
    lambda x: {"data_offsets": [0, x[UP]["data_offsets"][1]]},
    lambda x: {"data_offsets": [-4, x[UP]["data_offsets"][1]]},
    lambda x: {"data_offsets": [10**30, x[UP]["data_offsets"][1]]},
    lambda x: {"data_offsets": x[UP]["data_offsets"][::-1]},
    lambda x: {"data_offsets": [a + 10**6 for a in x[UP]["data_offsets"]]},
    lambda x: {"data_offsets": [*map(float, x[UP]["data_offsets"])]},
    lambda _: {"data_offsets": [None, None]},
    lambda _: {"data_offsets": [0]},
    lambda _: {"dtype": "F16"},
    lambda _: {"dtype": "bogus"},
    lambda _: {"dtype": ["F32"]},
    lambda _: {"shape": [36.0, 24.0]},
    lambda _: {"shape": [-36, -24]},
    lambda _: {"shape": [2**62, 2**62]},
    lambda _: {"shape": [[36], [24]]},
    lambda _: {"shape": None},
  ],
)
def test_a_tensor_with_wrong_offsets_or_size_is_refused(change, tmp_path):
  ones = np.ones([36, 24], np.float32)
  path = tmp_path / "x"
  _write(path, {"a": ones, GATE: 2 * ones, UP: 3 * ones, "z": ones})
  header, content = transformers_folder.read_parts(path)
  header[UP].update(change(header))
  transformers_folder.write_parts(path, header, content)
  _check_refused(path)


def _framed(header: bytes) -> bytes:
  return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
  "content",
  [
    _framed(b"[" * 200_000),
    _framed(b'{"a":' * 200_000),
    _framed(b""),
    _framed(b"\xff"),
    _framed(b"[]"),
    _framed(b"null"),
    _framed(b'{"a": [1]}'),
    _framed(b'{"__metadata__": {"a": 1}}'),
    _framed(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}} x'),
    # Without a header.
    b"",
    b"\xff" * 8 + b"{}",
    b"\0" * 8,
  ],
  ids=lambda x: str(x[:17]),
)
def test_a_file_without_a_header_of_safetensors_is_refused(content, tmp_path):
  (tmp_path / "x").write_bytes(content)
  _check_refused(tmp_path / "x")


@pytest.mark.parametrize(
  "change", [lambda x: x + b"\0" * 8, lambda x: x[:-1]], ids=["more", "less"]
)
def test_a_file_with_more_or_fewer_bytes_is_refused(change, tmp_path):
  path = tmp_path / "x"
  _write(path)
  path.write_bytes(change(path.read_bytes()))
  _check_refused(path)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
  "dtype, bits", [("F32", 32), ("F16", 16), ("BF16", 16)]
)
def test_a_number_that_is_not_finite_is_refused_by_the_tensors_name(
  number, dtype, bits, tmp_path
):
  content = np.array([0, number], "<f2" if dtype == "F16" else "<f4").tobytes()
  if dtype == "BF16":
    content = content[2:4] + content[6:]
  header = {"a": {"dtype": dtype, "shape": [2]}}
  header["a"]["data_offsets"] = [0, bits // 4]
  path = _by_hand(tmp_path / "x", header, content)
  with pytest.raises(UserError, match="its a holds a number that is not fin"):
    SafetensorsFile(path).read("a")


def test_a_very_long_header_is_refused_before_it_is_read(tmp_path):
  with (tmp_path / "x").open("wb") as file:
    file.write((20_000_001).to_bytes(8, "little"))
    file.truncate(8 + 20_000_001)
  with pytest.raises(UserError, match="a header of 20,000,001 bytes; it has"):
    SafetensorsFile(str(tmp_path / "x"))


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(UserError, match=r"x: No such file"):
    SafetensorsFile(str(tmp_path / "x"))
