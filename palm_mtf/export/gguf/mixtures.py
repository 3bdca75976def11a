# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which type each tensor of a GGUF file has, as llama.cpp's quantizer chooses.

A mixture such as q4_k_m has more bits for the tensors that lose most: those of
values, a half of the MLPs' outputs, and the table that gives the logits.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

Shapes = Mapping[str, tuple[int, ...]]


class _File(NamedTuple):
  most: str  # type of most matrices
  file_type: int  # value of GGUF's key general.file_type


_FILES = {
  "float32": _File("float32", 0),
  "float16": _File("float16", 1),
  "q8_0": _File("q8_0", 7),
  "q4_k_m": _File("q4_k", 15),
  "q5_k_m": _File("q5_k", 17),
  "q6_k": _File("q6_k", 18),
}
FILE_TYPES = {name: x.file_type for name, x in _FILES.items()}
GGUF_NAMES = {
  "float32": "F32",
  "float16": "F16",
  **{x: x.upper() for x in ("q8_0", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")},
}
# {type: the one in its place if no whole number of blocks makes up a row}
_OTHERS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
MIXTURES = tuple(name for name, x in _FILES.items() if x.most in _OTHERS)
_PLACE = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_EIGHT = 8  # experts for which llama.cpp has rules, made for Mixtral


def block_size(dtype: str) -> tuple[int, int]:
  """Returns how many numbers a block of a type has, and how many bytes."""
  from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

  return GGML_QUANT_SIZES[GGMLQuantizationType[GGUF_NAMES[dtype]]]


def choose_dtypes(
  shapes: Shapes, wanted: str, metadata: Mapping[str, Any]
) -> dict[str, str]:
  """Returns {tensor: its type} for a file where most weights have `wanted`.

  `wanted` is one of FILE_TYPES. `metadata` has the file's keys.
  """
  found = {}
  for name, shape in shapes.items():
    dtype = _choose(name, wanted, shapes, metadata)
    # llama.cpp reads scales, biases and learned positions only in float32. It
    # quantizes no routers of experts.
    is_exact = name.startswith("position_embd") or "ffn_gate_inp" in name
    if len(shape) == 1 or is_exact:
      dtype = "float32"
    while shape[-1] % block_size(dtype)[0]:
      dtype = _OTHERS.get(dtype, "float16")
    found[name] = dtype
  return found


def _choose(
  name: str, wanted: str, shapes: Shapes, metadata: Mapping[str, Any]
) -> str:
  # Follows llama_tensor_get_type_impl in llama.cpp's src/llama-quant.cpp.
  most = _FILES[wanted].most
  if most not in _OTHERS:
    return most
  if name == "output.weight" or (
    name == "token_embd.weight" and "output.weight" not in shapes
  ):
    return "q6_k" if shapes[name][-1] % 256 == 0 else "q8_0"
  place = _PLACE.fullmatch(name)
  if not place:
    return most
  family = metadata["general.architecture"]
  layers = metadata[f"{family}.block_count"]
  experts = metadata.get(f"{family}.expert_count")
  layer, part = int(place[1]), place[2]
  eighth = layers // 8
  is_high = (
    layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
  )
  if experts == _EIGHT and part in ("attn_k", "attn_v"):
    return "q8_0"
  if part in ("attn_v", "attn_qkv"):
    if is_high:
      return "q6_k"
    # llama.cpp takes models with 80 layers for those with 70B parameters.
    is_large = layers == 80 and not experts and _shares_keys(metadata)
    return "q5_k" if most == "q4_k" and is_large else most
  if part.startswith("ffn_down"):
    return "q6_k" if is_high else most
  if part == "attn_output" and experts == _EIGHT and most == "q4_k":
    return "q5_k"
  return most


def _shares_keys(metadata: Mapping[str, Any]) -> bool:
  family = metadata["general.architecture"]
  names = (f"{family}.attention.head_count{x}" for x in ("", "_kv"))
  heads, key_heads = (metadata.get(x) for x in names)
  return family == "qwen2" or (family == "llama" and heads != key_heads)


def count_bytes(shapes: Shapes, dtypes: Mapping[str, str]) -> int:
  """Returns how many bytes tensors take in a file."""
  total = 0
  for name, shape in shapes.items():
    size, num_bytes = block_size(dtypes[name])
    total += math.prod(shape) // size * num_bytes
  return total
