# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that computes blocks has the numbers of the float64 oracle.

A row of EXECUTORS is all that a new layout or a new implementation needs.
"""

import dataclasses
import functools
from collections.abc import Callable

import pytest

from palm_mtf.architecture.block import model_of
from tests.blocks import (
  ALL_HEADS,
  CAPACITY,
  MIXTURES,
  PALM,
  SETTINGS,
  Z_LOSS,
  Case,
  block_config,
  check,
  make_case,
)
from tests.cases import slow
from tests.mtf_testing import (
  MOVED,
  ModelResult,
  mesh_layout,
  random_documents,
  random_examples,
  random_tokens,
  relative_error,
  run_model,
  small_config,
  without_compiler,
)
from tests.unitransformer.runs_of_layers import run_unitransformer, split_by


def without_cpp(*args, **settings) -> ModelResult:
  """Returns the result of devices that have no C++ operations."""
  with pytest.MonkeyPatch.context() as patch:
    without_compiler(patch)
    return run_model(*args, **settings)


def whole_documents(*args, **settings):
  """Returns rows without padding; all targets count the same."""
  batch = random_documents(*args, **settings)
  batch["segments"][batch["segments"] == 0] = 2
  del batch["loss_weights"]
  return batch


def recomputing(*args, **settings) -> ModelResult:
  """Returns the result of a Unitransformer that recomputes its layers."""
  line = "transformer.LayerStack.recompute_grads = True"
  return run_unitransformer(*args, line, **settings)


SPLIT = mesh_layout("all over data and model")
_PALM = "layer_norm parallel multi_query"
# `make test` tries these with documents or on a mesh, and other blocks of
# SETTINGS on one device. Learned positions count from a document's start.
_IN_DOCUMENTS = ("LaMDA", "Transformer-XL in groups")
_ON_A_MESH = ("GPT-3",)
# Other blocks have each of their settings.
_SLOW = (
  *("LLaMA", "LLaMA 3", "LLaMA 3.1", "Mistral", "Qwen 3", "Gemma", "GPT-2"),
  *("GPT-NeoX", "Phi", "BLOOM", "T5 with one key head", "OLMoE"),
  *("Mixtral", "Transformer-XL with norms of results"),
)
_SPARSE = ("Mixtral", "OLMoE", "DeepSeek-V3", *CAPACITY)
# {what computes: (function, rows, names that `make test` tries, other names)}.
EXECUTORS = {
  "one device": (
    run_model,
    random_tokens,
    (
      _PALM,
      *(x for x in SETTINGS if x not in _IN_DOCUMENTS + _ON_A_MESH + _SLOW),
      "norms of groups of heads",
    ),
    {**SETTINGS, **CAPACITY, **ALL_HEADS, **PALM},
  ),
  "documents": (
    run_model,
    random_documents,
    _IN_DOCUMENTS,
    {**SETTINGS, **ALL_HEADS, **PALM},
  ),
  "prefixes": (
    run_model,
    random_examples,
    ("rms_norm parallel multi_head",),
    PALM,
  ),
  "without C++": (
    without_cpp,
    random_documents,
    ("Gemma", _PALM),
    ("LLaMA 3", "GPT-2", "Phi", "layer_norm serial multi_head"),
  ),
  "PaLM's 2D": (
    functools.partial(run_model, mesh=mesh_layout("PaLM's 2D")),
    random_documents,
    _ON_A_MESH,
    SETTINGS,
  ),
  "all over data and model": (
    functools.partial(run_model, mesh=SPLIT),
    random_documents,
    (),
    SETTINGS,
  ),
  "experts over model": (
    functools.partial(
      run_model,
      mesh=split_by("data:2,model:2", "batch:data,heads:model,experts:model"),
    ),
    random_documents,
    ("Mixtral",),
    _SPARSE,
  ),
  "experts over data": (
    functools.partial(run_model, mesh=MOVED),
    random_documents,
    ("GLaM",),
    _SPARSE,
  ),
  "Mesh TensorFlow": (
    run_unitransformer,
    random_tokens,
    ("in groups", "GPT-2 with ALiBi"),
    (
      *(*MIXTURES, _PALM),
      *("layer_norm serial multi_query", "rms_norm parallel multi_query"),
    ),
  ),
  "Mesh TensorFlow, documents": (
    run_unitransformer,
    whole_documents,
    (_PALM,),
    MIXTURES,
  ),
  "Mesh TensorFlow, split": (
    functools.partial(run_unitransformer, layout=SPLIT),
    whole_documents,
    (),
    ("in groups", "GPT-2 with ALiBi", _PALM),
  ),
  "Mesh TensorFlow, split positions": (
    functools.partial(
      run_unitransformer,
      layout=split_by("data:2,model:3", "batch:data,length:model"),
    ),
    random_tokens,
    (),
    (_PALM,),
  ),
  "Mesh TensorFlow, recomputed": (
    recomputing,
    whole_documents,
    (),
    ("in groups", "GPT-2 with ALiBi", _PALM),
  ),
}


def case_of(name: str, rows: Callable[..., dict] = random_tokens) -> Case:
  """Makes a case, of one layer if other models' layers are alike.

  Their second layer would add time, but no operation.
  """
  is_one = name not in PALM and not block_config(name).layers
  return make_case(name, rows, **({"num_layers": 1} if is_one else {}))


@functools.cache
def result_of(executor: str, name: str) -> ModelResult:
  """Runs a block, and compares the result with the oracle."""
  run, rows, *_ = EXECUTORS[executor]
  case = case_of(name, rows)
  result = run(case.config, case.params, case.batch, z_loss=Z_LOSS)
  check(case, result)
  return result


@pytest.mark.parametrize(
  ("executor", "name"),
  [
    slow(x, name, unless=name in fast)
    for x, (_, _, fast, others) in EXECUTORS.items()
    for name in dict.fromkeys((*fast, *others))
  ],
)
def test_logits_and_gradients_equal_the_oracle_s(executor, name):
  result_of(executor, name)


@pytest.mark.parametrize(
  ("layers", "num_layers", "groups"),
  [
    ("", 7, [("g", 7)]),
    ("w", 7, [("w", 7)]),
    ("h, g", 8, [("g", 8)]),  # the two variants are equal
    ("w, g", 8, [("wg", 4)]),
    ("5*w, g", 24, [("wwwwwg", 4)]),
    ("4*(5*w, g), 2*w", 26, [("wwwwwg", 4), ("w", 2)]),
    ("2*w, g", 3, [("w", 2), ("g", 1)]),
    ("w, 3*(g, w), g, g", 9, [("wg", 4), ("g", 1)]),
  ],
)
def test_layers_that_repeat_are_one_group(layers, num_layers, groups):
  variants = {"w": {"ATTENTION_WINDOW": 3}, "g": {}, "h": {}}
  model = small_config(
    num_layers=num_layers,
    layers=layers,
    variants={x: y for x, y in variants.items() if x in layers} or None,
  )
  found = [
    ("".join("w" if x.attention.mixer.window else "g" for x in period), count)
    for period, count in model_of(model).groups
  ]
  assert found == groups


@pytest.mark.parametrize(
  ("run", "name"),
  [
    (run_model, _PALM),
    (run_unitransformer, _PALM),
    *(slow(run_model, name) for name in ("LLaMA", *list(PALM)[1:])),
    *(slow(without_cpp, name) for name in (_PALM, "LLaMA")),
  ],
)
def test_bfloat16_agrees_with_the_oracle_to_its_8_bits(run, name):
  """One rounding is 2^-9 = 0.2%; a gradient has some twenty roundings."""
  case = case_of(name)
  config = dataclasses.replace(case.config, activation_dtype="bfloat16")
  result = run(config, case.params, case.batch, z_loss=Z_LOSS)
  assert relative_error(result.logits, case.logits) < 0.02
  if result.z_loss is not None:
    losses = result.loss, result.z_loss
    assert losses == pytest.approx(case.losses, rel=0.01)
  # In float32, gradients equal the oracle's to 1e-5.
  for key, gradient in result_of("one device", name).gradients.items():
    assert relative_error(result.gradients[key], gradient) < 0.05, key
