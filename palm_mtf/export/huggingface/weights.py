# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts parameters to the names and layouts of transformers, and back.

Kernels are [outputs, inputs] in transformers, and [inputs, outputs] here. The
rotary embedding rotates elements (2i, 2i + 1) of a head in Cohere, and (i, i +
d_kv / 2) in palm_mtf and Granite. Therefore, for Cohere, the columns of the
kernels of q and k are permuted.
"""

import re
from collections.abc import Callable

import numpy as np

from palm_mtf.architecture.parameters import parameter_shapes, parse_name
from palm_mtf.config import PalmConfig
from palm_mtf.errors import UserError, shorten
from palm_mtf.export.huggingface.config_json import COHERE, ROTARY_BASE
from palm_mtf.export.huggingface.tensor_files import TensorFiles

_IN_LAYER = {
  "norm/scale": "input_layernorm",
  "mlp_norm/scale": "post_attention_layernorm",
  "attention/q": "self_attn.q_proj",
  "attention/k": "self_attn.k_proj",
  "attention/v": "self_attn.v_proj",
  "attention/o": "self_attn.o_proj",
  "mlp/wi_gate": "mlp.gate_proj",
  "mlp/wi": "mlp.up_proj",
  "mlp/wo": "mlp.down_proj",
}
FINAL_NORM = "model.norm.weight"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Older versions of transformers wrote the rotary embedding's frequencies as
# tensors with these names.
_FREQUENCIES = re.compile(
  r"model\.(layers\.(?P<layer>\d{1,5})\.self_attn\.)?rotary_emb\.inv_freq",
  re.ASCII,
)
# {dtype: maximum relative error of the frequencies}. The error is from rounding
# to the dtype and, for float32, also from computing the power.
_ROUNDING = {"F32": 1e-6, "F16": 2.0**-11, "BF16": 2.0**-8}


def find_tensor_names(model: PalmConfig) -> dict[str, str]:
  """Returns {our name: name in transformers} of every parameter."""
  names = {"embedding": _EMBEDDING, "final_norm/scale": FINAL_NORM}
  for name in parameter_shapes(model):
    layer, part = parse_name(name)
    if layer is not None:
      names[name] = f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
  if model.final_norm_scale == "none":
    del names["final_norm/scale"]
  return names


def find_tensor_shapes(model: PalmConfig) -> dict[str, tuple[int, ...]]:
  """Returns {name in transformers: shape} of every tensor."""
  shapes = parameter_shapes(model)
  found = {}
  for name, theirs in find_tensor_names(model).items():
    inputs = _count_inputs(name, shapes[name])
    size = int(np.prod(shapes[name]))
    kernel = parse_name(name).is_kernel
    found[theirs] = (size // inputs, inputs) if kernel else shapes[name]
  # If our model's last norm has no scale, transformers gets a scale of ones.
  found.setdefault(FINAL_NORM, (model.d_model,))
  return found


def make_tensor_reader(
  model: PalmConfig, architecture: str, read: Callable[[str], np.ndarray]
) -> Callable[[str], np.ndarray]:
  """Returns a function that reads tensors by their names in transformers.

  `read` returns a parameter by our name; `architecture` is a class of
  transformers.
  """
  ours = {theirs: name for name, theirs in find_tensor_names(model).items()}

  def read_exported(theirs: str) -> np.ndarray:
    if theirs not in ours:  # FINAL_NORM_SCALE = "none"
      return np.ones(model.d_model, np.float32)
    name = ours[theirs]
    value = read(name)
    if not parse_name(name).is_kernel:
      return value
    value = value.reshape(_count_inputs(name, value.shape), -1)
    if _is_rotated(name, architecture):
      halves = value.reshape(len(value), -1, 2, model.d_kv // 2)
      value = halves.swapaxes(2, 3).reshape(value.shape)
    return value.T

  return read_exported


def import_parameters(
  model: PalmConfig, architecture: str, read: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns {our name: parameter}; the inverse of `make_tensor_reader`.

  `read` returns a float32 tensor by its name in transformers; `architecture` is
  a class of transformers.
  """
  parameters, names = {}, find_tensor_names(model)
  for name, shape in parameter_shapes(model).items():
    value = read(names[name])
    if parse_name(name).is_kernel:
      value = value.T
      if _is_rotated(name, architecture):
        pairs = value.reshape(len(value), -1, model.d_kv // 2, 2)
        value = pairs.swapaxes(2, 3)
    parameters[name] = np.ascontiguousarray(value.reshape(shape))
  return parameters


def check_tensors(files: TensorFiles, model: PalmConfig, what: str) -> None:
  """Raises UserError unless `files` hold the tensors of a model.

  Redundant tensors, such as the tied lm_head, may exist if they have the
  expected values. Unknown tensors may not. `what` names the files in messages.
  """
  wanted = find_tensor_shapes(model)
  for name in sorted({*wanted, *files.shapes}):
    expected = wanted.get(name) or _find_redundant_shape(name, model)
    found = files.shapes.get(name)
    if found != expected:
      raise UserError(
        f"{what}: {name if name in wanted else shorten(name)} is "
        f"{found or 'missing'}; its config.json wants "
        f"{expected or 'no such tensor'}."
      )
  for name in sorted(files.shapes.keys() - find_tensor_names(model).values()):
    _check_redundant(name, files, model, what)


def _find_redundant_shape(
  name: str, model: PalmConfig
) -> tuple[int, ...] | None:
  """Returns the shape of a redundant tensor, or None for any other name."""
  if name == _HEAD:
    return model.vocab_size, model.d_model
  match = _FREQUENCIES.fullmatch(name)
  if match and int(match["layer"] or 0) < model.num_layers:
    return (model.d_kv // 2,)
  return None


def _check_redundant(
  name: str, files: TensorFiles, model: PalmConfig, what: str
) -> None:
  """Raises UserError if a redundant tensor has unexpected values.

  FINAL_NORM is redundant in a model whose last norm has no scale.
  """
  value, error = files.read(name), 0.0
  if name == _HEAD:
    ours, reason = files.read(_EMBEDDING), "the embedding, to which it is tied"
  elif name == FINAL_NORM:
    ours, reason = 1.0, '1, and FINAL_NORM_SCALE is "none"'
  else:
    ours = ROTARY_BASE ** (-np.arange(0, model.d_kv, 2) / model.d_kv)
    reason = f"the frequencies of rope_theta = {ROTARY_BASE}"
    error = _ROUNDING[files.dtypes[name]]
  if not np.allclose(value, ours, rtol=error, atol=0):
    raise UserError(
      f"{what}: {name} is not {reason}; palm_mtf computes only with these "
      "numbers."
    )


def _count_inputs(name: str, shape: tuple[int, ...]) -> int:
  # The kernel o, [heads, d_kv, d_model], has two input dimensions, not one.
  return int(np.prod(shape[:-1] if parse_name(name).last == "o" else shape[:1]))


def _is_rotated(name: str, architecture: str) -> bool:
  return architecture == COHERE and parse_name(name).last in ("q", "k")
