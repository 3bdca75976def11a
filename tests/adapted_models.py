# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Small adapted models, and what an export makes of them."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from palm_mtf.export.trained_model import TrainedModel
from tests import adapter_oracle
from tests.checkpoint_files import manifest
from tests.transformers_folder import parameters

BASE = {"kind": "adapted", "checkpoint": "there", "blake2b": "5eed"}
# {name: settings of the adapter}
KINDS = {
  "lora": {"adapter": "lora"},
  "rank-stabilized": {"adapter": "lora", "adapter_scale": "sqrt_rank"},
  "dora": {"adapter": "dora", "adapter_scale": "sqrt_rank"},
}
EVERY = ("q", "k", "v", "o", "wi_gate", "wi", "wo")


def adapt(model, kind, words=EVERY, size=1.0):
  """Returns a model with an adapter, and float32 parameters by name.

  `words` are the last words of the names of adapted kernels. `size` multiplies
  B, which otherwise is larger than the kernels.
  """
  model = dataclasses.replace(
    model, adapter_rank=3, adapter_alpha=5.0, **KINDS[kind]
  )
  names = adapter_oracle.kernels(model, words)
  # A router's load, or an expert's kernel, is no kernel of an adapter.
  names = [x for x in names if "experts" not in x]
  targets = sorted({x.partition("/")[2] for x in names})
  model = dataclasses.replace(model, adapter_targets=targets)
  factors = adapter_oracle.random_adapter(model, names, seed=4)
  for name in factors:
    if name.endswith("_lora_b"):
      factors[name] *= np.float32(size)
  return model, {**parameters(model.base), **factors}


def describe(model):
  """Returns what an export reads of a trained model."""
  found = dataclasses.replace(manifest(1), base=BASE)
  path = "run/checkpoints/step_00000001"
  checkpoint = SimpleNamespace(manifest=found, path=path, blake2b="0dd")
  return TrainedModel(SimpleNamespace(model=model), checkpoint, None)
