# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every file of weights in a folder is read, or refused by its name."""

import shutil

import numpy as np
import pytest

from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.tensor_files import TensorFiles
from tests import transformers_folder
from tests.transformers_folder import INDEX, SHARD, UP, change_json, split


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
    b'{"weight_map": []}',
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
    None,
    ["a.safetensors"],
    "",
    ".",
    "..",
    "a\0b.safetensors",
    "../model/" + SHARD,
    "/etc/passwd",
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
    "adapter_config.json",
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
