# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A decoder of a small random model that has several adapters."""

import contextlib
import dataclasses
import functools

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.generation.inference.adapters import BASE, find_factors
from palm_mtf.generation.inference.scorer import Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import SlotDecoder
from tests import adapter_oracle, oracle
from tests.blocks import block_config
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import SINGLE, small_config

EVERY = ("q", "k", "v", "o", "wi_gate", "wi", "wo")
# Rank, scale rule, kernels and size of B of each adapter.
ADAPTERS = [
  (3, "rank", EVERY, 0.3),
  (17, "sqrt_rank", ("q", "wo"), 0.2),
  (8, "rank", ("v", "o", "wi"), 0.3),
  (4, "rank", EVERY, 0.0),
]
SIZES = {"sequence_length": 20}
# A block, from tests/blocks.py, for each dtype of weights.
EACH_DTYPE = [
  ("LLaMA 3", "float32"),
  ("PaLM", "bfloat16"),
  ("PaLM", "int8"),
  ("LLaMA 3", "int4"),
]


@dataclasses.dataclass
class Served:
  """A base with adapters."""

  loaded: LoadedDecoder
  decoder: SlotDecoder
  scorer: Scorer
  adapters: list  # the base's, then those of ADAPTERS
  models: list  # settings and parameters of each of `adapters`


def make_adapters(config, base):
  """Returns settings and parameters of models with ADAPTERS."""
  for rank, rule, words, size in ADAPTERS:
    if config.mlp == "experts":
      words = [x for x in words if not x.startswith("w")]
    model = dataclasses.replace(
      config,
      adapter="lora",
      adapter_rank=rank,
      adapter_alpha=4.0,
      adapter_scale=rule,
    )
    names = adapter_oracle.kernels(model, words)
    targets = sorted({x.partition("/")[2] for x in names})
    model = dataclasses.replace(model, adapter_targets=targets)
    factors = adapter_oracle.random_adapter(model, names, seed=rank)
    for name in factors:
      if name.endswith("_lora_b"):
        factors[name] *= np.float32(size)
    yield model, {**base, **factors}


@contextlib.contextmanager
def serving(block, dtype, folder, **sizes):
  """Opens a decoder of a random model of a kind of block, with ADAPTERS.

  `dtype` is an activation dtype, or int8 or int4 weights.
  """
  is_float = dtype.endswith(("32", "16"))
  make = (
    small_config if block == "PaLM" else functools.partial(block_config, block)
  )
  config = make(
    activation_dtype=dtype if is_float else "float32", **SIZES | sizes
  )
  base = oracle.random_parameters(config, seed=1)
  checkpoint = save_checkpoint(config, base, folder)
  models = [*make_adapters(config, base)]
  weight_dtype = "activation" if is_float else dtype
  with LoadedDecoder(checkpoint, config, SINGLE, weight_dtype) as loaded:
    decoder = SlotDecoder(loaded, config.vocab_size, 16, prompt_lookup=True)
    assert decoder.can_add_adapters()
    adapters = [
      decoder.add_adapter(find_factors(model, params.__getitem__))
      for model, params in models
    ]
    yield Served(
      *(loaded, decoder, Scorer(loaded), [BASE, *adapters]),
      [(config, base), *models],
    )


def find_logits(logits, chosen, num_tokens):
  """Returns the largest logits where a step returns their log p."""
  top, likeliest = tf.math.top_k(logits[:, :num_tokens], 5)
  of_chosen = tf.gather(logits, chosen, batch_dims=1)
  return {
    "of_chosen": of_chosen,
    "likeliest": likeliest,
    "of_likeliest": top,
  }
