# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters under the names and in the layouts of transformers.

Its kernels are [outputs, inputs], ours [inputs, outputs]. Cohere rotates
neighbouring numbers of a head, (2i, 2i + 1), palm_mtf and Granite the halves,
(i, i + d_kv / 2): the columns of q and k change places. Norms multiply by their
scales in both.
"""

from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import parsed
from palm_mtf.errors import UserError
from palm_mtf.huggingface.architecture import COHERE

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


def tensor_names(model: PalmConfig) -> dict[str, str]:
  """Returns the name of every parameter in transformers, by our name."""
  names = {"embedding": "model.embed_tokens.weight"}
  names["final_norm/scale"] = FINAL_NORM
  for name in parameter_shapes(model):
    layer, part = parsed(name)
    if layer is not None:
      names[name] = f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
  if model.final_norm_scale == "none":
    del names["final_norm/scale"]
  return names


def tensor_shapes(model: PalmConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every tensor in transformers, by its name there."""
  shapes = parameter_shapes(model)
  found = {}
  for name, theirs in tensor_names(model).items():
    inputs = _num_inputs(name, shapes[name])
    size = int(np.prod(shapes[name]))
    kernel = parsed(name).is_kernel
    found[theirs] = (size // inputs, inputs) if kernel else shapes[name]
  # transformers has a scale of ones where we have none.
  found.setdefault(FINAL_NORM, (model.d_model,))
  return found


def exported(
  model: PalmConfig, architecture: str, read: Callable[[str], np.ndarray]
) -> Callable[[str], np.ndarray]:
  """Returns a function that reads tensors by their names in transformers.

  Args:
    model: the architecture of palm_mtf.
    architecture: class of transformers.
    read: returns a parameter by our name.
  """
  ours = {theirs: name for name, theirs in tensor_names(model).items()}

  def read_exported(theirs: str) -> np.ndarray:
    if theirs not in ours:  # FINAL_NORM_SCALE = "none"
      return np.ones(model.d_model, np.float32)
    name = ours[theirs]
    value = read(name)
    if not parsed(name).is_kernel:
      return value
    value = value.reshape(_num_inputs(name, value.shape), -1)
    if _is_rotated(name, architecture):
      halves = value.reshape(len(value), -1, 2, model.d_kv // 2)
      value = halves.swapaxes(2, 3).reshape(value.shape)
    return value.T

  return read_exported


def imported(
  model: PalmConfig, architecture: str, read: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns every parameter by our name; the inverse of `exported`.

  Args:
    model: the architecture of palm_mtf.
    architecture: class of transformers.
    read: returns a tensor by its name in transformers, float32.
  """
  parameters, names = {}, tensor_names(model)
  for name, shape in parameter_shapes(model).items():
    value = read(names[name])
    if parsed(name).is_kernel:
      value = value.T
      if _is_rotated(name, architecture):
        pairs = value.reshape(len(value), -1, model.d_kv // 2, 2)
        value = pairs.swapaxes(2, 3)
    parameters[name] = np.ascontiguousarray(value.reshape(shape))
  return parameters


def check_shapes(
  found: Mapping[str, tuple[int, ...]], model: PalmConfig, what: str
) -> None:
  """Raises UserError unless a file has the tensors of a model.

  Args:
    found: shape of every tensor of the file, by name.
    model: the architecture.
    what: noun phrase for messages.
  """
  wanted = tensor_shapes(model)
  # A tied embedding may be written twice.
  names = {*wanted, *found} - {"lm_head.weight"}
  for name in sorted(names):
    if found.get(name) != wanted.get(name):
      raise UserError(
        f"{what}: {name} is {found.get(name, 'missing')}; its config.json "
        f"wants {wanted.get(name, 'no such tensor')}."
      )


def _num_inputs(name: str, shape: tuple[int, ...]) -> int:
  # o is [heads, d_kv, d_model], the others begin with their inputs.
  return int(np.prod(shape[:-1] if parsed(name).last == "o" else shape[:1]))


def _is_rotated(name: str, architecture: str) -> bool:
  return architecture == COHERE and parsed(name).last in ("q", "k")
