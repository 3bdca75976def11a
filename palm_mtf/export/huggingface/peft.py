# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of PEFT, which hold an adapter of a model of transformers.

adapter_config.json         rank, alpha, and which modules have factors
adapter_model.safetensors   base_model.model.<module>.lora_A.weight, [rank, in];
                            .lora_B.weight, [out, rank]; for DoRA,
                            .lora_magnitude_vector, [out]

Folders with prefix or prompt tuning have another tensor (prompt_learning.py).
The factor of the product is lora_alpha / r, or lora_alpha / sqrt(r) with
use_rslora. rank_pattern and alpha_pattern have other values for some modules.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from palm_mtf.adapters.merge import (
  adapted_kernels,
  names_to_merge,
  sum_squares,
)
from palm_mtf.architecture.adapter import adapter_scale
from palm_mtf.architecture.parameters import parameter_shapes, parse_name
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError, did_you_mean, shorten
from palm_mtf.export.huggingface import prompt_learning
from palm_mtf.export.huggingface.adapter_tensors import (
  AdaptedModule,
  Factors,
  Read,
  find_modules,
  join_factors,
  split_factors,
)
from palm_mtf.export.huggingface.config_json import find_family
from palm_mtf.export.huggingface.families import Family
from palm_mtf.export.huggingface.model_card import write_card
from palm_mtf.export.huggingface.tensor_files import (
  SafetensorsFile,
  write_safetensors,
)
from palm_mtf.export.huggingface.values import Json, parse_number, parse_size
from palm_mtf.export.huggingface.weights import find_tensors
from palm_mtf.export.trained_model import Export, Reader, TrainedModel
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.foreign_files import read_json_object

CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Key of the safetensors file's metadata: the hash of the base's checkpoint.
_BASE = "palm_mtf_base"
_A, _B, _M = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_TENSOR = re.compile(
  rf"base_model\.model\.(.+)\.({'|'.join(map(re.escape, (_A, _B, _M)))})"
)


def _parse_tensor(tensor: str) -> tuple[str, str]:
  # Returns the module and the kind of a tensor, or ("", "").
  match = _TENSOR.fullmatch(tensor)
  return (match[1], match[2]) if match else ("", "")


def _find_modules(
  model: ModelConfig, family: Family
) -> dict[str, AdaptedModule]:
  found = find_modules(model, family)
  return {x.removesuffix(".weight"): module for x, module in found.items()}


def _name_tensors(
  name: str, module: AdaptedModule, rank: int, has_magnitude: bool
) -> dict[str, tuple[int, ...]]:
  # Returns {tensor: shape} of a module.
  a, b = module.shapes(rank)
  shapes: dict[str, tuple[int, ...]] = {_A: a, _B: b}
  if has_magnitude:
    shapes[_M] = (module.outputs,)
  return {f"base_model.model.{name}.{x}": shape for x, shape in shapes.items()}


def make_peft(trained: TrainedModel) -> Export:
  """Makes a folder with the adapter of a run, which PEFT loads.

  Raises UserError if no class of transformers computes the base, or PEFT would
  add the adapter to other kernels.
  """
  model = trained.model
  family = find_family(model.base)
  of_base = {"base_model_name_or_path": trained.base or None}
  if model.adapter_length:
    shape = prompt_learning.tensor_shape(model)
    return _make_folder(
      {**prompt_learning.describe(model), "inference_mode": True, **of_base},
      {prompt_learning.TENSOR: shape},
      lambda read, _: prompt_learning.join_virtual(model, family, read),
      family,
      trained,
    )
  assert model.adapter_rank
  modules = _find_modules(model, family)
  kernels = [x for module in modules.values() for x in module.adapted]
  if family.has_experts and any(parse_name(x).kind == "mlp" for x in kernels):
    raise UserError(
      f"ADAPTER_TARGETS = {list(model.adapter_targets)!r}: PEFT takes kernels "
      f"of MLPs in a {family.architecture} for those of experts; add --merge, "
      'which exports the whole model, or adapt only "attention/*".'
    )
  others = [x.removesuffix(".weight") for x in find_tensors(model.base, family)]
  config = {
    **_make_config(model, _find_ends(modules, others), family),
    **of_base,
  }
  shapes: dict[str, tuple[int, ...]] = {}
  for name, module in modules.items():
    rank = model.adapter_rank * len(module.adapted)
    shapes |= _name_tensors(name, module, rank, model.adapter == "dora")

  def read_tensor(read: Reader, tensor: str) -> np.ndarray:
    name, kind = _parse_tensor(tensor)
    a, b, magnitude = join_factors(modules[name], model, family, read)
    return magnitude if kind == _M else (a if kind == _A else b).T

  return _make_folder(config, shapes, read_tensor, family, trained)


def _make_folder(
  config: Mapping[str, Any],
  shapes: Mapping[str, tuple[int, ...]],
  read_tensor: Callable[[Reader, str], np.ndarray],
  family: Family,
  trained: TrainedModel,
) -> Export:
  # `read_tensor` returns a tensor, given the reader of parameters.
  base = trained.checkpoint.manifest.base
  assert base
  metadata = {_BASE: base["blake2b"], **trained.origin}

  def write(path: str, read: Reader) -> None:
    os.mkdir(path)
    with open(os.path.join(path, CONFIG), "w", encoding="utf-8") as file:
      file.write(json_text(config, indent=1))
    weights = os.path.join(path, _WEIGHTS)
    read_one = functools.partial(read_tensor, read)
    write_safetensors(weights, shapes, read_one, metadata)
    write_card(path, trained)

  num_bytes = 4 * sum(map(math.prod, shapes.values()))
  return Export(f"an adapter of a {family.architecture}", num_bytes, write)


def _find_ends(
  modules: Mapping[str, AdaptedModule], others: Iterable[str]
) -> dict[str, int]:
  # Returns {end of modules' names, such as "q_proj": how many adapted kernels
  # each of these modules joins}. No other module of the model has such an end,
  # by which PEFT and other programs choose modules.
  found = {}
  for name, module in modules.items():
    words = name.split(".")
    ends = (".".join(words[i:]) for i in reversed(range(len(words))))
    end = next(
      x
      for x in ends
      if all(y in modules for y in others if f".{y}".endswith(f".{x}"))
    )
    found[end] = len(module.adapted)
  return found


def _make_config(
  model: ModelConfig, ends: Mapping[str, int], family: Family
) -> dict[str, Any]:
  # Joined kernels have a larger rank and the same scale.
  assert model.adapter_rank and model.adapter_alpha
  is_root = model.adapter_scale == "sqrt_rank"
  joined = {x: count for x, count in ends.items() if count > 1}
  factors = {x: math.sqrt(n) if is_root else n for x, n in joined.items()}
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "r": model.adapter_rank,
    "lora_alpha": model.adapter_alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_rslora": is_root,
    "use_dora": model.adapter == "dora",
    "fan_in_fan_out": family.is_conv1d,
    "target_modules": [*ends],
    "rank_pattern": {x: n * model.adapter_rank for x, n in joined.items()},
    "alpha_pattern": {x: y * model.adapter_alpha for x, y in factors.items()},
  }


class PeftAdapter(NamedTuple):
  """An adapter that was read from a folder of PEFT."""

  model: ModelConfig  # the base with the settings of the adapter
  parameters: Mapping[str, np.ndarray]  # our names and shapes, float32
  base: str  # hash of the base's checkpoint; "" if the folder has none


# {key of adapter_config.json: why the adapter is refused if the key is set}
_REFUSED = {
  "target_parameters": "kernels of experts have no adapters here",
  "modules_to_save": "it replaces whole modules of the base",
  "lora_bias": "its factors have biases",
  "layer_replication": "it repeats layers of the base",
  "trainable_token_indices": "it changes rows of the embedding",
  "alora_invocation_tokens": "it begins in the middle of a text (aLoRA)",
  "bias": "it changes biases of the base",
  "init_lora_weights": "the base changed when its factors were drawn",
}
# {key of _REFUSED: values with which the adapter is not refused}
_PLAIN = {
  "bias": ("none",),
  "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
# Keys that are read, that the tensors make redundant, or that say how the
# adapter was trained.
_KNOWN = set(
  "peft_type peft_version task_type auto_mapping base_model_name_or_path "
  "revision inference_mode r lora_alpha lora_dropout use_rslora use_dora "
  "target_modules exclude_modules layers_to_transform layers_pattern "
  "rank_pattern alpha_pattern fan_in_fan_out megatron_core qalora_group_size "
  "loftq_config eva_config corda_config lora_ga_config runtime_config "
  "ensure_weight_tying".split()
)


def read_peft(folder: str, model: ModelConfig, read: Read) -> PeftAdapter:
  """Returns the adapter in a folder of PEFT, for the base `model`.

  Modules may have different ranks and scales. Then ADAPTER_RANK is the largest
  rank, factors are padded with zeros, and B is multiplied by what a module's
  scale differs by. `read` returns the base's parameter of a name, float32.

  Raises UserError if a tensor is missing, has the size of another base or would
  not be used, or if the adapter computes what ours do not compute.
  """
  family = find_family(model)
  path, weights = (os.path.join(folder, x) for x in (CONFIG, _WEIGHTS))
  config = read_json_object(path, "copy the folder again")
  file = SafetensorsFile(weights)
  if str(config.get("peft_type")) in prompt_learning.KINDS:
    found = prompt_learning.read_prompt_learning(
      config, file, path, model, family
    )
    return PeftAdapter(*found, file.metadata.get(_BASE, ""))
  try:
    model = dataclasses.replace(model, **_parse_config(config))
    modules = _find_modules(model, family)
    scales = {x: _parse_scale(config, x, model) for x in modules}
  except UserError as error:
    raise UserError(f"{path}: {error}") from None
  wanted = {
    name: _name_tensors(name, module, scales[name][0], model.adapter == "dora")
    for name, module in modules.items()
  }
  given = _check_tensors(file, wanted, f"{weights}: ", family)
  found = {}
  for name in given:
    a, b, *magnitude = map(file.read, wanted[name])
    factors = Factors(a.T, b.T, *magnitude)
    own = split_factors(factors, modules[name].kernels, model, family)
    found |= {kernel: (x, scales[name][1]) for kernel, x in own.items()}
  model, parameters = _join_ranks(model, found, read)
  return PeftAdapter(model, parameters, file.metadata.get(_BASE, ""))


def _parse_config(config: Json) -> dict[str, Any]:
  # Returns {field of ModelConfig: value} of the settings of the adapter.
  if (kind := config.get("peft_type")) != "LORA":
    raise UserError(
      f"peft_type = {shorten(kind)}: palm_mtf reads only "
      f"{', '.join(['LORA', *prompt_learning.KINDS])}; give one of these."
    )
  for key, value in config.items():
    if value and key not in _KNOWN and value not in _PLAIN.get(key, ()):
      why = _REFUSED.get(key, "palm_mtf does not know this key")
      raise UserError(
        f"{key} = {shorten(value)}: {why}; merge the adapter into its base "
        "with PEFT, and import that."
      )
  for key in ("r", "lora_alpha"):
    if config.get(key) is None:
      raise UserError(
        f"{key} is missing, without which the factors have no scale; add it."
      )
  for key in ("use_dora", "use_rslora"):
    if config.get(key) not in (True, False, None):
      raise UserError(f"{key} = {shorten(config[key])}: give true or false.")
  return {
    "adapter": "dora" if config.get("use_dora") else "lora",
    "adapter_rank": parse_size(config, "r"),
    "adapter_alpha": parse_number(config, "lora_alpha", 1.0),
    "adapter_scale": "sqrt_rank" if config.get("use_rslora") else "rank",
  }


# A regular expression holds Python's lock, so that a server stops meanwhile.
_MOST_WAYS = 10**6


def _count_ways(pattern: str) -> float:
  # Returns about how many ways to match a module's name an expression may try.
  # A repeated group may itself match in several ways.
  if re.search(r"\)[*+{]", pattern):
    return math.inf
  ways = 32.0 ** len(re.findall("[*+{]", pattern)) * 2.0 ** pattern.count("?")
  return ways * math.prod(1 + x.count("|") for x in re.split("[()]", pattern))


def _parse_scale(
  config: Json, module: str, model: ModelConfig
) -> tuple[int, float]:
  # Returns the rank of a module, and the factor of its product.
  def find(key: str, default: object) -> dict[str, object]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
      raise UserError(f"{key} = {shorten(patterns)}: is no JSON object.")
    for pattern, value in patterns.items():
      if _count_ways(pattern) > _MOST_WAYS:
        raise UserError(
          f"{key}: {shorten(pattern)} could take forever to match; name its "
          "modules with fewer repetitions and alternatives."
        )
      try:
        if re.match(rf"(.*\.)?({pattern})$", module):  # as in PEFT
          return {key: value}
      except re.error:
        raise UserError(
          f"{key}: {shorten(pattern)} is no regular expression."
        ) from None
    return {key: default}

  key = "rank_pattern"
  rank = parse_size(find(key, model.adapter_rank), key)
  key = "alpha_pattern"
  alpha = parse_number(find(key, model.adapter_alpha), key, 1.0)
  return rank, adapter_scale(model.adapter_scale, alpha, rank)


def _check_tensors(
  file: SafetensorsFile,
  wanted: Mapping[str, Mapping[str, tuple[int, ...]]],
  what: str,
  family: Family,
) -> list[str]:
  # Returns the modules that have tensors. `wanted` is {module: {tensor: shape}}
  # of all modules that may have some.
  given: dict[str, None] = {}
  for tensor in file.shapes:
    module, _ = _parse_tensor(tensor)
    if tensor not in wanted.get(module, ()):
      near = did_you_mean(module, wanted) if module else ""
      raise UserError(
        f"{what}{shorten(tensor)} is no factor of a kernel that can be adapted "
        f"in this base, a {family.architecture}{near}; give an adapter of "
        "kernels in its layers."
      )
    given[module] = None
  if not given:
    raise UserError(f"{what}has no tensors; copy the folder again.")
  for tensor, shape in (x for name in given for x in wanted[name].items()):
    if tensor not in file.shapes:
      raise UserError(f"{what}{tensor} is missing; copy the folder again.")
    if file.shapes[tensor] != shape:
      raise UserError(
        f"{what}{tensor} is {[*file.shapes[tensor]]}; with this base and its "
        f"rank it is {[*shape]}; give an adapter of this base."
      )
  return [*given]


def _join_ranks(
  model: ModelConfig,
  found: Mapping[str, tuple[Factors, float]],
  read: Read,
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
  # Returns the model and parameters of an adapter, given {kernel: (its factors,
  # its scale)}. Kernels of other layers get factors of zeros.
  rank = max(1, *(len(x.b) for x, _ in found.values()))
  targets = sorted({parse_name(x).part for x in found})
  model = dataclasses.replace(
    model, adapter_rank=rank, adapter_targets=tuple(targets)
  )
  assert model.adapter_alpha
  common = adapter_scale(model.adapter_scale, model.adapter_alpha, rank)
  if not all(math.isclose(scale, common) for _, scale in found.values()):
    common = max(scale for _, scale in found.values())
    model = dataclasses.replace(
      model, adapter_scale="rank", adapter_alpha=common * rank
    )
  shapes, parameters = parameter_shapes(model), {}
  for name, of in adapted_kernels(model).items():
    w, a, b, *magnitude = names_to_merge(name, of)
    own = {x: np.zeros(shapes[x], np.float32) for x in (a, b)}
    if name in found:
      factors, scale = found[name]
      factor = 1 if math.isclose(scale, common) else scale / common
      own[a][..., : len(factors.b)] = factors.a
      own[b][: len(factors.b)] = factors.b * np.float32(factor)
      own |= dict.fromkeys(magnitude, factors.magnitude)
    else:
      norms = (np.sqrt(sum_squares(np, of, read(w))) for _ in magnitude)
      own |= zip(magnitude, norms, strict=True)
    parameters |= own
  return model, parameters
