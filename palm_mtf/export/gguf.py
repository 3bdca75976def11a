# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=gguf: one file that llama.cpp loads.

  command-r   BLOCK = "parallel", NORM = "layer_norm"
  granite     BLOCK = "serial", NORM = "rms_norm"

In both of these architectures of llama.cpp, kernels are [outputs, inputs], and
the rotary embedding rotates neighbouring elements of a head. llama.cpp's
tokenizer "llama" gives the same ids as SentencePiece's byte-pair encoding with
byte fallback. Unlike sentencepiece_vocabulary.py, "llama" encodes a U+2581 in a
text as a space, not as three bytes. gguf_tokenizer.py has other tokenizers.
"""

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf.config import PalmConfig
from palm_mtf.data.vocabulary.gguf_tokenizer import make_gguf_tokenizer
from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
  SentencePieceVocabulary,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.config_json import (
  COHERE,
  GRANITE,
  NORM_EPSILON,
  ROTARY_BASE,
  find_architecture,
)
from palm_mtf.export.huggingface.folder import explain_inexact
from palm_mtf.export.huggingface.weights import (
  FINAL_NORM,
  find_tensor_shapes,
  make_tensor_reader,
)
from palm_mtf.export.trained_model import Export, Reader, TrainedModel

Value = bool | int | float | str | list
Shapes = Mapping[str, tuple[int, ...]]

# {dtype of most weights: value of GGUF's key general.file_type}
_FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7}
_GGUF_NAMES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}
# In q8_0, _BLOCK elements of a row share a float16 scale: max |x| / 127.
_BLOCK, _LARGEST_INT8 = 32, np.float32(127)
_ARCHITECTURES = {COHERE: "command-r", GRANITE: "granite"}
# From this many layers on, llama.cpp expects a command-r to normalize q and k.
_LAYERS_OF_COMMAND_R_PLUS = 64
_IN_LAYER = {
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def make_gguf(trained: TrainedModel, dtype: str) -> Export:
  """Makes a GGUF file with the weights and the tokenizer.

  Most weights have `dtype`; other tensors have float16 or float32.

  Raises:
    UserError: if llama.cpp lacks the architecture or the tokenizer.
  """
  model, vocabulary = trained.model, trained.vocabulary
  metadata = make_model_metadata(model, dtype)
  check_vocabulary(vocabulary)
  metadata |= make_gguf_tokenizer(
    vocabulary, start_id=trained.start_id, vocab_size=model.vocab_size
  )
  shapes = find_tensor_shapes(model)

  def write(path: str, read: Reader) -> None:
    # Like Cohere, both architectures of llama.cpp rotate neighbouring elements.
    read = make_tensor_reader(model, COHERE, read)
    write_gguf(path, metadata, shapes, dtype, read)

  return Export(
    f"a {metadata['general.architecture']} in {dtype}",
    sum(_count_bytes(x, _choose_dtype(x, dtype)) for x in shapes.values()),
    write,
  )


def write_gguf(
  path: str,
  metadata: Mapping[str, Value],
  shapes: Shapes,
  dtype: str,
  read: Callable[[str], np.ndarray],
) -> None:
  """Writes a GGUF file, with one tensor at a time in memory.

  Args:
    metadata: {key of GGUF: value}.
    shapes: {name in transformers: shape}.
    read: function from a tensor's name in transformers to its float32 value.

  Raises:
    UserError: if a weight, or a scale of q8_0, is beyond the range of float16.
  """
  from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

  writer = GGUFWriter(path, metadata["general.architecture"])
  for key, value in metadata.items():
    is_int = type(value) is int
    kind = GGUFValueType.UINT32 if is_int else GGUFValueType.get_type(value)
    if key != "general.architecture":  # GGUFWriter itself adds this key
      writer.add_key_value(key, value, kind)
  dtypes = {name: _choose_dtype(shape, dtype) for name, shape in shapes.items()}
  types = {k: GGMLQuantizationType[_GGUF_NAMES[x]] for k, x in dtypes.items()}
  for name, shape in shapes.items():
    num_bytes = _count_bytes(shape, dtypes[name])
    writer.add_tensor_info(
      make_gguf_name(name), shape, np.dtype(np.float32), num_bytes, types[name]
    )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for name in shapes:
    x = np.ascontiguousarray(read(name), np.float32)
    _check_range(x, dtypes[name], make_gguf_name(name))
    writer.write_tensor_data(quants.quantize(x, types[name]))
  writer.close()


def _choose_dtype(shape: tuple[int, ...], wanted: str) -> str:
  """Returns a tensor's dtype in a file where most weights have `wanted`."""
  if len(shape) == 1:  # llama.cpp reads scales of norms only in float32
    return "float32"
  return "float16" if wanted == "q8_0" and shape[-1] % _BLOCK else wanted


def _count_bytes(shape: tuple[int, ...], dtype: str) -> int:
  size = math.prod(shape)
  if dtype == "q8_0":
    return size // _BLOCK * (2 + _BLOCK)
  return size * (2 if dtype == "float16" else 4)


def _check_range(x: np.ndarray, dtype: str, name: str) -> None:
  """Raises UserError if an element or a scale of q8_0 overflows float16."""
  if dtype == "float32":
    return
  largest = np.abs(x).max() / (_LARGEST_INT8 if dtype == "q8_0" else 1)
  with np.errstate(over="ignore"):
    is_finite = np.isfinite(largest.astype(np.float16))
  if not is_finite:
    raise UserError(
      f"--dtype = {dtype!r}: numbers of {name} are beyond float16; use float32."
    )


def find_gguf_architecture(model: PalmConfig) -> str:
  """Returns the llama.cpp architecture of a model, or raises UserError."""
  name = _ARCHITECTURES[find_architecture(model)]
  width = model.num_heads * model.d_kv
  if name == "command-r" and width != model.d_model:
    raise UserError(
      f"NUM_HEADS * D_KV = {width} and D_MODEL = {model.d_model}: a command-r "
      "of llama.cpp has the same of both; use another --format."
    )
  if name == "command-r" and model.num_layers >= _LAYERS_OF_COMMAND_R_PLUS:
    raise UserError(
      f"NUM_LAYERS = {model.num_layers}: llama.cpp takes a command-r of "
      f"{_LAYERS_OF_COMMAND_R_PLUS} layers or more for one with norms of q and "
      "k; use another --format."
    )
  return name


def make_gguf_name(name: str) -> str:
  """Returns a tensor's name in GGUF, given its name in transformers."""
  if name == FINAL_NORM:
    return "output_norm.weight"
  match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
  if match:
    return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.weight"
  return "token_embd.weight"


def make_model_metadata(model: PalmConfig, dtype: str) -> dict[str, Value]:
  """Returns {key of GGUF: value}, given the dtype of most weights.

  Raises:
    UserError: if llama.cpp has no architecture that computes the model.
  """
  name = find_gguf_architecture(model)
  is_shared = model.attention == "multi_query"
  described: dict[str, Value] = {
    "context_length": model.sequence_length,
    "embedding_length": model.d_model,
    "feed_forward_length": model.d_ff,
    "block_count": model.num_layers,
    "vocab_size": model.vocab_size,
    "attention.head_count": model.num_heads,
    "attention.head_count_kv": 1 if is_shared else model.num_heads,
    "attention.key_length": model.d_kv,
    "attention.value_length": model.d_kv,
    "rope.dimension_count": model.d_kv,
    "rope.freq_base": ROTARY_BASE,
  }
  if name == "command-r":
    described["attention.layer_norm_epsilon"] = NORM_EPSILON
    described["logit_scale"] = model.d_model**-0.5
  else:
    described["attention.layer_norm_rms_epsilon"] = NORM_EPSILON
    described["logit_scale"] = model.d_model**0.5  # a divisor in granite
    described["attention.scale"] = model.d_kv**-0.5
  return {
    "general.architecture": name,
    **{f"{name}.{key}": value for key, value in described.items()},
    "general.file_type": _FILE_TYPES[dtype],
    "general.quantization_version": 2,
  }


def check_vocabulary(vocabulary: Vocabulary) -> None:
  """Raises UserError unless llama.cpp encodes texts like a SentencePiece model.

  `make_gguf_tokenizer` checks vocabularies of other kinds.
  """
  if not isinstance(vocabulary, SentencePieceVocabulary):
    return
  if reason := explain_inexact(vocabulary):
    raise UserError(
      f"{vocabulary.path}: llama.cpp would encode differently: {reason}; train "
      "a model with a vocabulary of palm_mtf vocab, or use another --format."
    )
