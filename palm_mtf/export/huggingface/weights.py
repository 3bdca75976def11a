# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts parameters to the names and layouts of transformers, and back.

Kernels are [outputs, inputs] in transformers (in GPT-2 [inputs, outputs]), and
[inputs, outputs] here. Some classes join q, k and v in one tensor. Our kernels
of experts are stacked; most files have one tensor for each expert. Some classes
rotate elements (2i, 2i + 1) of a head together, but our models usually rotate
(i, i + n / 2); then the columns of q and k are permuted.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Sequence

import numpy as np

from palm_mtf.architecture.block import NORMS, model_of
from palm_mtf.architecture.parameters import parameter_shapes, parse_name
from palm_mtf.architecture.rotary import find_divisors, rotary_of
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError, shorten
from palm_mtf.export.huggingface.family import Family
from palm_mtf.export.huggingface.tensor_files import ORIGINAL, TensorFiles

Read = Callable[[str], np.ndarray]

# Rotary frequencies and causal masks, which older versions of transformers
# wrote. Frequencies must have the expected values; masks are ignored.
_FREQUENCIES = re.compile(
  r"(model|gpt_neox)\.(layers\.(?P<layer>\d{1,5})\.(self_attn|attention)\.)?"
  r"rotary_emb\.inv_freq",
  re.ASCII,
)
_MASK = re.compile(
  r"(transformer\.h|gpt_neox\.layers)\.\d{1,5}\.(attn|attention)\."
  r"(masked_)?bias",
  re.ASCII,
)
# Key of `Family.names` for GGUF's tensor of divisors of rotary frequencies.
DIVISORS = "rotary/divisors"
# Types that are refused: their elements are weights only after scaling.
_OTHER_TYPES = re.compile(r"[IU]\d+|F4|F[68]_.*|BOOL")
_ADAPTER = re.compile(r"lora_|base_layer\.|modules_to_save\.")
# {dtype: relative error that a file's frequencies may have}, from rounding to
# the dtype and, for float32, also from computing the power.
_ROUNDING = {"F32": 1e-6, "F16": 2.0**-11, "BF16": 2.0**-8}
_ROTATED = re.compile(r"attention/[qk](_bias|_norm/scale)?")
# The kernel of one expert of a stack: layer_007/mlp/experts/3/wi
_EXPERT = re.compile(r"(.*mlp/experts)/(\d+)(/\w+)", re.ASCII)


def _part_shapes(
  model: ModelConfig, family: Family
) -> dict[str, tuple[int, ...]]:
  # Returns {name: shape} of the parameters that tensors hold; if each expert
  # has its own tensor, with a kernel of each expert in place of the stack.
  found: dict[str, tuple[int, ...]] = {}
  for name, shape in parameter_shapes(model).items():
    parameter = parse_name(name)
    if parameter.is_expert and family.names[parameter.part].count("{}") > 1:
      found |= dict.fromkeys(_name_experts(name, shape), shape[1:])
    elif not parameter.is_state:
      found[name] = shape
  return found


def _name_experts(name: str, shape: tuple[int, ...]) -> list[str]:
  # Returns names of the kernels of a stack's experts; see _EXPERT.
  start, end = name.rsplit("/", 1)
  return [f"{start}/{i}/{end}" for i in range(shape[0])]


def _find_stack(name: str) -> tuple[str, int | None]:
  # Returns the name of a parameter, and the expert whose kernel `name` is.
  match = _EXPERT.fullmatch(name)
  return (match[1] + match[3], int(match[2])) if match else (name, None)


def find_tensors(model: ModelConfig, family: Family) -> dict[str, list[str]]:
  """Returns {name in transformers: our parameters} of every tensor.

  The list has several parameters if the tensor joins q, k and v, or wi_gate and
  wi of all experts. The kernel of one expert is layer_007/mlp/experts/3/wi. The
  list is empty if settings determine the tensor: vectors of the last norm if
  FINAL_NORM_SCALE is "none", and divisors of rotary frequencies.
  """
  found: dict[str, list[str]] = {}
  for name in _part_shapes(model, family):
    stack, expert = _find_stack(name)
    layer, part = parse_name(stack)
    theirs = family.names[part].format(layer, expert)
    found.setdefault(theirs, []).append(name)
  if model.final_norm_scale == "none":
    found[family.names["final_norm/scale"]] = []
    if NORMS[model.norm].has_bias:
      found[family.names["final_norm/bias"]] = []
  if model.rotary_scaling == "llama3" and DIVISORS in family.names:
    found[family.names[DIVISORS]] = []
  return found


def find_tensor_shapes(
  model: ModelConfig, family: Family
) -> dict[str, tuple[int, ...]]:
  """Returns {name in transformers: shape} of every tensor."""
  shapes = _part_shapes(model, family)
  found: dict[str, tuple[int, ...]] = {}
  for theirs, names in find_tensors(model, family).items():
    if not names:
      found[theirs] = _make_constant(theirs, model, family).shape
      continue
    first, parameter = shapes[names[0]], parse_name(names[0])
    size = sum(math.prod(shapes[name]) for name in names)
    found[theirs] = (size,) if parameter.is_vector else first
    if parameter.is_kernel:
      inputs = _count_inputs(names[0], first)
      stack = first[:-2] if parameter.is_expert else ()
      kernel = (*stack, size // inputs // math.prod(stack), inputs)
      found[theirs] = kernel[::-1] if family.is_conv1d else kernel
  return found


def make_tensor_reader(model: ModelConfig, family: Family, read: Read) -> Read:
  """Returns a function that reads tensors by their names in transformers.

  `read` returns the parameter that has a given name in our checkpoints.
  """
  ours = find_tensors(model, family)
  read_stack = functools.lru_cache(maxsize=1)(read)  # for all its experts

  def read_part(name: str) -> np.ndarray:
    stack, expert = _find_stack(name)
    return read(name) if expert is None else read_stack(stack)[expert]

  def read_exported(theirs: str) -> np.ndarray:
    if not ours[theirs]:
      return _make_constant(theirs, model, family)
    parts = [
      permute_heads(_to_matrix(name, read_part(name)), name, model, family)
      for name in ours[theirs]
    ]
    value = parts[0] if len(parts) == 1 else join_outputs(parts, model, family)
    is_kernel = parse_name(ours[theirs][0]).is_kernel
    is_turned = is_kernel and not family.is_conv1d
    return value.swapaxes(-1, -2) if is_turned else value

  return read_exported


def _make_constant(
  theirs: str, model: ModelConfig, family: Family
) -> np.ndarray:
  # Returns a tensor that follows from settings, not from our parameters.
  rotary = rotary_of(model)
  if rotary and theirs == family.names.get(DIVISORS):
    return find_divisors(rotary).astype(np.float32)
  is_bias = theirs == family.names.get("final_norm/bias")
  scale = 0.0 if is_bias else 1.0 - NORMS[model.norm].scale_offset
  return np.full(model.d_model, scale, np.float32)


def import_parameters(
  model: ModelConfig, family: Family, read: Read
) -> dict[str, np.ndarray]:
  """Returns {our name: parameter}; the inverse of `make_tensor_reader`.

  `read` returns the tensor that has a given name in transformers, float32.
  """
  found, shapes = {}, _part_shapes(model, family)
  for theirs, names in find_tensors(model, family).items():
    if not names:
      continue
    value = read(theirs)
    if parse_name(names[0]).is_kernel and not family.is_conv1d:
      value = value.swapaxes(-1, -2)
    parts = [value]
    if len(names) > 1:
      parts = split_outputs(value, [shapes[x] for x in names], model, family)
    for name, part in zip(names, parts, strict=True):
      part = permute_heads(part, name, model, family, is_import=True)
      found[name] = np.ascontiguousarray(part.reshape(shapes[name]))
  return {
    name: _take_parameter(found, name, shape)
    for name, shape in parameter_shapes(model).items()
  }


def _take_parameter(
  found: dict[str, np.ndarray], name: str, shape: tuple[int, ...]
) -> np.ndarray:
  # Removes a parameter, or the kernels of its experts, from `found`.
  if parse_name(name).is_state:  # as in a new model: experts have equal loads
    return np.full(shape, 1 / shape[0], np.float32)
  if name in found:
    return found.pop(name)
  return np.stack([found.pop(x) for x in _name_experts(name, shape)])


def _to_matrix(name: str, x: np.ndarray) -> np.ndarray:
  # Returns a kernel as [inputs, outputs], and a vector as [outputs].
  # Kernels of experts, which may be stacked, have this form.
  parameter = parse_name(name)
  if parameter.is_vector:
    return x.reshape(-1)
  if parameter.is_expert:
    return x
  return x.reshape(_count_inputs(name, x.shape), -1)


def join_outputs(
  parts: Sequence[np.ndarray], model: ModelConfig, family: Family
) -> np.ndarray:
  """Joins q, k and v along their last dimension, the outputs."""
  if not family.joins_heads:
    return np.concatenate(parts, -1)
  heads = [x.reshape(*x.shape[:-1], model.num_heads, -1) for x in parts]
  joined = np.stack(heads, -2)
  return joined.reshape(*parts[0].shape[:-1], -1)


def split_outputs(
  x: np.ndarray,
  shapes: Sequence[tuple[int, ...]],
  model: ModelConfig,
  family: Family,
) -> list[np.ndarray]:
  """Undoes `join_outputs`; `shapes` has the shapes of the parts."""
  if family.joins_heads:
    heads = x.reshape(*x.shape[:-1], model.num_heads, len(shapes), model.d_kv)
    return [heads[..., i, :] for i in range(len(shapes))]
  rows = math.prod(x.shape[:-1])
  sizes = [math.prod(shape) // rows for shape in shapes]
  return np.split(x, np.cumsum(sizes)[:-1], -1)


def permute_heads(
  x: np.ndarray,
  name: str,
  model: ModelConfig,
  family: Family,
  *,
  is_import: bool = False,
) -> np.ndarray:
  """Reorders each head's elements, in the last dimension, if they are rotated.

  The result has the pairs of the class or, if `is_import` is true, ours. `name`
  is the parameter whose outputs are the last dimension of x.
  """
  layer, part = parse_name(name)
  if layer is None or not _ROTATED.fullmatch(part):
    return x
  rotary = model_of(model).layers[layer].attention.inputs[0].rotary
  if rotary is None or rotary.pairs == family.rotary_pairs:
    return x
  wanted = rotary.pairs if is_import else family.rotary_pairs
  heads, size = x.reshape(*x.shape[:-1], -1, model.d_kv), rotary.size
  sizes = (2, size // 2) if wanted == "neighbours" else (size // 2, 2)
  rotated = heads[..., :size].reshape(*heads.shape[:-1], *sizes)
  rotated = rotated.swapaxes(-1, -2).reshape(*heads.shape[:-1], size)
  return np.concatenate([rotated, heads[..., size:]], -1).reshape(x.shape)


def _count_inputs(name: str, shape: tuple[int, ...]) -> int:
  # The kernel o, [heads, d_kv, d_model], has two input dimensions, not one.
  parameter = parse_name(name)
  if parameter.is_expert:
    return shape[-2]
  return math.prod(shape[:-1] if parameter.last == "o" else shape[:1])


def check_tensors(
  files: TensorFiles, model: ModelConfig, family: Family, what: str
) -> None:
  """Raises UserError unless `files` hold the tensors of a model.

  Redundant tensors, such as the tied lm_head, may exist if they have the
  expected values. Unknown tensors are refused. Messages begin with `what`.
  """
  wanted = find_tensor_shapes(model, family)
  _check_not_quantized(files, wanted, what)
  ours, redundant = find_tensors(model, family), []
  for name in sorted({*wanted, *files.shapes}):
    if _MASK.fullmatch(name) and name not in wanted:
      continue
    expected = wanted.get(name) or _find_redundant_shape(name, model, family)
    found = files.shapes.get(name)
    if found != expected:
      raise UserError(
        f"{what}: {name if name in wanted else shorten(name)} is "
        f"{found or 'missing'}; the model wants "
        f"{expected or 'no such tensor'}."
      )
    if not ours.get(name):
      redundant.append(name)
  for name in redundant:
    _check_redundant(name, files, model, family, what)


def _check_not_quantized(
  files: TensorFiles, wanted: Collection[str], what: str
) -> None:
  # Refuses weights with a type of _OTHER_TYPES, and any tensor of a module that
  # is no weight, bias or adapter, such as the scales of quantized weights.
  layers = {name.rpartition(".")[0] for name in wanted}
  for name in sorted(files.shapes):
    prefixes = itertools.accumulate(name.split("."), "{}.{}".format)
    layer = next((x for x in prefixes if x in layers), None)
    rest = name.removeprefix(f"{layer}.")
    is_other = layer and name not in wanted and rest not in ("weight", "bias")
    is_coded = name in wanted and _OTHER_TYPES.fullmatch(files.dtypes[name])
    if is_coded or (is_other and not _ADAPTER.match(rest)):
      raise UserError(
        f"{what}: {shorten(name)} is {files.dtypes[name]}, of quantized "
        f"weights, which are not read here; {ORIGINAL}."
      )


def _find_redundant_shape(
  name: str, model: ModelConfig, family: Family
) -> tuple[int, ...] | None:
  # Returns the shape of a tied lm_head or of rotary frequencies, or None.
  if name == family.names.get("output_embedding", "lm_head.weight"):
    return model.vocab_size, model.d_model
  match = _FREQUENCIES.fullmatch(name)
  is_known = match and int(match["layer"] or 0) < model.num_layers
  return (model.rotary_size // 2,) if is_known else None


def _check_redundant(
  name: str, files: TensorFiles, model: ModelConfig, family: Family, what: str
) -> None:
  # Raises UserError if a redundant tensor differs from what palm_mtf computes.
  value, error = files.read(name), 0.0
  if name == family.names.get("output_embedding", "lm_head.weight"):
    ours = files.read(family.names["embedding"])
    reason = "the embedding, to which it is tied"
  elif _FREQUENCIES.fullmatch(name):
    size = model.rotary_size
    ours = model.rotary_base ** (-np.arange(0, size, 2) / size)
    reason = f"the frequencies of rope_theta = {model.rotary_base}"
    error = _ROUNDING[files.dtypes[name]]
  else:
    ours = _make_constant(name, model, family)
    reason = f'{ours[0]:g}, and FINAL_NORM_SCALE is "none"'
    if name == family.names.get(DIVISORS):
      reason, error = "those of Llama 3's rotary scaling", 1e-5
  if not np.allclose(value, ours, rtol=error, atol=0):
    raise UserError(
      f"{what}: {name} is not {reason}; palm_mtf computes only with these "
      "numbers."
    )
