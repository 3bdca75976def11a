# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix and prompt tuning in folders of PEFT, which calls it prompt learning.

adapter_model.safetensors has one tensor, prompt_embeddings:

PREFIX_TUNING   [virtual, 2 * layers * key heads * d_kv]: of each layer the keys
                as attention reads them, rotated, then the values
PROMPT_TUNING   [virtual, d_model]
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from palm_mtf.architecture.adapter import PROMPT, VIRTUAL
from palm_mtf.architecture.parameters import saved_shapes
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError, shorten
from palm_mtf.export.huggingface.families import Family
from palm_mtf.export.huggingface.tensor_files import SafetensorsFile
from palm_mtf.export.huggingface.values import Json, parse_size
from palm_mtf.export.huggingface.weights import permute_heads
from palm_mtf.export.trained_model import Reader

TENSOR = "prompt_embeddings"
# {peft_type: ADAPTER}
KINDS = {"PREFIX_TUNING": "prefix", "PROMPT_TUNING": "prompt"}
# Keys besides those of `describe`. A projection of the prefix is already in
# the tensor, and the others say how the adapter was trained.
_KNOWN = set(
  "peft_version auto_mapping base_model_name_or_path revision inference_mode "
  "encoder_hidden_size init_weights prefix_projection prompt_tuning_init "
  "prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs".split()
)


def describe(model: ModelConfig) -> dict[str, Any]:
  """Returns the keys of adapter_config.json that depend on the model."""
  is_prefix = model.adapter == "prefix"
  of_keys = model.key_heads, model.key_heads * model.d_kv
  heads, width = of_keys if is_prefix else (model.num_heads, model.d_model)
  return {
    "peft_type": next(x for x, kind in KINDS.items() if kind == model.adapter),
    "task_type": "CAUSAL_LM",
    "num_virtual_tokens": model.adapter_length,
    "num_transformer_submodules": 1,
    "num_layers": model.num_layers,
    "num_attention_heads": heads,
    "token_dim": width,
  }


def tensor_shape(model: ModelConfig) -> tuple[int, int]:
  """Returns the shape of the tensor."""
  sizes = map(math.prod, saved_shapes(model).values())
  rows = model.adapter_length or 0
  return rows, sum(sizes) // rows


def _factor(model: ModelConfig, family: Family) -> float:
  # The class multiplies the embeddings of the prompt, too.
  is_again = family.architecture == "GraniteForCausalLM"
  return model.embedding_scale if is_again else 1.0


def join_virtual(
  model: ModelConfig, family: Family, read: Reader
) -> np.ndarray:
  """Returns the tensor; `read` reads the parameters of the adapter."""
  if model.adapter == "prompt":
    return read(PROMPT) / np.float32(_factor(model, family))
  rows = [
    permute_heads(
      read(x).reshape(shape[0], -1), x.removesuffix(VIRTUAL), model, family
    )
    for x, shape in saved_shapes(model).items()
  ]
  return np.concatenate(rows, 1)


def read_prompt_learning(
  config: Json,
  file: SafetensorsFile,
  what: str,
  base: ModelConfig,
  family: Family,
) -> tuple[ModelConfig, Mapping[str, np.ndarray]]:
  """Returns the model with the adapter, and the adapter's parameters.

  Args:
    config: adapter_config.json, whose path is `what`.
    file: the tensors.
    base: the model that the adapter is for, of the class `family`.

  Raises UserError if the sizes are of another base, or PEFT would compute
  something else.
  """
  try:
    count = parse_size(config, "num_virtual_tokens")
    kind = KINDS[str(config["peft_type"])]
    model = dataclasses.replace(base, adapter=kind, adapter_length=count)
    wanted = describe(model)
    if kind == "prompt":  # its tensor has no heads
      wanted["num_attention_heads"] = config.get("num_attention_heads")
    for key, value in config.items():
      if key not in wanted and key not in _KNOWN and value:
        raise UserError(
          f"{key} = {shorten(value)}: palm_mtf does not know this key; leave "
          "it out if it changes nothing."
        )
    for key, value in wanted.items():
      if config.get(key) != value:
        raise UserError(
          f"{key} = {shorten(config.get(key))}: for this base it is {value!r}; "
          "give an adapter of this base."
        )
  except UserError as error:
    raise UserError(f"{what}: {error}") from None
  shapes = {TENSOR: tensor_shape(model)}
  if file.shapes != shapes:
    raise UserError(
      f"{what}: its tensors are {shorten(dict(file.shapes))}; with this base "
      f"they are {shapes}; give an adapter of this base."
    )
  value = file.read(TENSOR)
  if kind == "prompt":
    return model, {PROMPT: value * np.float32(_factor(model, family))}
  found, end = {}, 0
  for name, shape in saved_shapes(model).items():
    begin, end = end, end + math.prod(shape[1:])
    of = value[:, begin:end], name.removesuffix(VIRTUAL), model, family
    found[name] = permute_heads(*of, is_import=True).reshape(shape)
  return model, found
