# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a small model in the format of `transformers`, and changes it."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from palm_mtf.config import ModelConfig
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.export.huggingface.config_json import find_family, make_config
from palm_mtf.export.huggingface.tensor_files import WEIGHTS, write_safetensors
from palm_mtf.export.huggingface.weights import (
  find_tensor_shapes,
  make_tensor_reader,
)
from tests import oracle, runs
from tests.mtf_testing import small_config

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
VOCAB_SIZE = 300
MODEL = small_config(vocab_size=VOCAB_SIZE)
UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
FREQUENCIES = "model.layers.1.self_attn.rotary_emb.inv_freq"


def parameters(model: ModelConfig) -> dict[str, np.ndarray]:
  """Returns the parameters that `write` writes, float32, by our names.

  Loads of experts, which no file holds, are equal, as in a new model.
  """
  drawn = oracle.random_parameters(model, seed=1)
  loads = {x: y for x, y in drawn.items() if x.endswith("router_load")}
  drawn |= {name: np.full_like(x, 1 / x.size) for name, x in loads.items()}
  return {name: x.astype(np.float32) for name, x in drawn.items()}


def tensors(model: ModelConfig) -> dict[str, np.ndarray]:
  """Returns the tensors that `write` writes, by their names in transformers."""
  read = make_tensor_reader(
    model, find_family(model), parameters(model).__getitem__
  )
  return {
    name: read(name) for name in find_tensor_shapes(model, find_family(model))
  }


def write(folder: Path, model: ModelConfig) -> Path:
  """Writes a model as `palm_mtf export` does, without a tokenizer.json."""
  folder.mkdir(parents=True, exist_ok=True)
  texts = [" ".join(runs.WORDS[n:]) for n in range(10)]
  train_vocabulary(texts, VOCAB_SIZE, path=str(folder / "vocabulary.model"))
  config = make_config(model, start_id=1, end_ids=[1], packing="joined")
  (folder / "config.json").write_text(json.dumps(config))
  write_tensors(folder / WEIGHTS, tensors(model))
  return folder


def write_tensors(path: Path, values: Mapping[str, np.ndarray]) -> None:
  """Writes a safetensors file."""
  shapes = {name: x.shape for name, x in values.items()}
  write_safetensors(str(path), shapes, values.__getitem__)


def read_parts(path: Path) -> tuple[dict, bytes]:
  """Returns the header of a safetensors file and the bytes that follow it."""
  content = path.read_bytes()
  begin = 8 + int.from_bytes(content[:8], "little")
  return json.loads(content[8:begin]), content[begin:]


def write_parts(path: Path, header: object, content: bytes) -> None:
  """Writes a safetensors file; a header given as bytes is written unchanged."""
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def set_tensors(folder: Path, **others: np.ndarray) -> None:
  """Writes the tensors of MODEL again, with other or further tensors."""
  write_tensors(folder / WEIGHTS, {**tensors(MODEL), **others})


def split(folder: Path) -> dict[str, str]:
  """Turns the file of weights into a shard; returns the map for its index."""
  (folder / WEIGHTS).rename(folder / SHARD)
  weight_map = dict.fromkeys(tensors(MODEL), SHARD)
  (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
  return weight_map


def change_json(path: Path, **changes: object) -> None:
  """Sets keys of a JSON object on the disk."""
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
