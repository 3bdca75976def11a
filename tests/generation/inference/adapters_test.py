# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of one batch, each with its own adapter and unlike the others."""

import contextlib
import dataclasses
import functools
import gc

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode import slot_program
from palm_mtf.generation.inference.adapters import BASE, find_factors
from palm_mtf.generation.inference.scorer import Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import SlotDecoder, SlotText
from palm_mtf.native.operations import operations
from tests import adapter_oracle, oracle, processes
from tests.blocks import block_config
from tests.cases import slow
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import SINGLE, small_config

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler"
)
EVERY = ("q", "k", "v", "o", "wi_gate", "wi", "wo")
# Rank, scale rule, kernels and size of B of each adapter.
ADAPTERS = [
  (3, "rank", EVERY, 0.3),
  (17, "sqrt_rank", ("q", "wo"), 0.2),
  (8, "rank", ("v", "o", "wi"), 0.3),
  (4, "rank", EVERY, 0.0),
]
PROMPTS = [[0, 5, 9, 13], [0, 7], [0, 40, 2, 2, 8, 21, 3]]
TOKENS = 6
SIZES = {"sequence_length": 20}


@dataclasses.dataclass
class Served:
  """A base with adapters."""

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
def serving(block, dtype, folder):
  is_float = dtype.endswith(("32", "16"))
  make = (
    small_config if block == "PaLM" else functools.partial(block_config, block)
  )
  config = make(activation_dtype=dtype if is_float else "float32", **SIZES)
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
      *(decoder, Scorer(loaded), [BASE, *adapters]), [(config, base), *models]
    )


def text_of(tokens, place, adapter, limit):
  key = np.array([len(tokens), 3], np.int32)
  state = tokens[-1], len(tokens) - 1, place, key, 0.0, None, 1.0, limit
  return SlotText(*state, adapter=adapter.number)


def read_texts(served, rows, *, wants_log_probs=True):
  """Returns what TOKENS steps choose for rows: (slot, prompt, adapter)."""
  found = {slot: [] for slot, _, _ in rows}
  for slot, prompt, adapter in rows:
    served.decoder.insert(slot, prompt, adapter.number)
  while any(len(x) < TOKENS for x in found.values()):
    texts = {}
    for slot, prompt, adapter in rows:
      chosen = [x.token for x in found[slot]]
      left = TOKENS - len(chosen)
      texts[slot] = text_of([*prompt, *chosen], len(chosen), adapter, left)
    steps = served.decoder.steps(
      texts, 1 if wants_log_probs else TOKENS, wants_log_probs=wants_log_probs
    )
    for slot, chosen in steps.items():
      found[slot] += chosen
  return found


def find_logits(logits, chosen, num_tokens):
  """Returns the largest logits where a step returns their log p."""
  top, likeliest = tf.math.top_k(logits[:, :num_tokens], 5)
  of_chosen = tf.gather(logits, chosen, batch_dims=1)
  return {
    "of_chosen": of_chosen,
    "likeliest": likeliest,
    "of_likeliest": top,
  }


@pytest.mark.parametrize(
  ("block", "dtype"),
  [
    ("LLaMA 3", "float32"),
    ("PaLM", "bfloat16"),
    ("PaLM", "int8"),
    ("LLaMA 3", "int4"),
    *(
      slow(block, dtype)
      for block, dtype in [
        ("LLaMA 3", "bfloat16"),
        ("LLaMA 3", "int8"),
        ("PaLM", "float32"),
        ("PaLM", "int4"),
        ("OLMoE", "float32"),
        ("OLMoE", "int8"),
      ]
    ),
  ],
)
def test_a_text_has_the_logits_of_its_adapter_alone(
  block, dtype, tmp_path, monkeypatch
):
  """To the bit, whatever other texts are in the batch; B = 0 is the base."""
  # TensorFlow sums exponentials of one row in another order than of several
  # rows, so log p may differ in the last bits; take the logits.
  monkeypatch.setattr(slot_program, "_find_log_probs", find_logits)
  with serving(block, dtype, tmp_path) as served:
    pairs = [(p, a) for a in served.adapters for p in PROMPTS]
    alone = [read_texts(served, [(0, *pair)])[0] for pair in pairs]
    mixed = read_texts(served, [(i, *x) for i, x in enumerate(pairs)])
    assert [*mixed.values()] == alone
    by_base, *others, by_zero = np.split(np.array(alone, object), 5)
    assert by_zero.tolist() == by_base.tolist()
    assert all(x.tolist() != by_base.tolist() for x in others)
    quick = read_texts(
      served, [(i, *x) for i, x in enumerate(pairs)], wants_log_probs=False
    )
    for i, chosen in quick.items():  # with prompt lookup
      assert [x.token for x in chosen] == [x.token for x in alone[i]]


@pytest.mark.parametrize("block", ["PaLM", "LLaMA 3", slow("OLMoE")])
def test_log_p_is_that_of_the_merged_model_in_float64(block, tmp_path):
  """Of a mixed batch's steps, and of scored prompts."""
  with serving(block, "float32", tmp_path) as served:
    rows = [(i, PROMPTS[2], x) for i, x in enumerate(served.adapters)]
    found = read_texts(served, rows)
    for (slot, prompt, adapter), (model, params) in zip(
      rows, served.models, strict=True
    ):
      merged = adapter_oracle.merge(model, params)
      tokens = [*prompt, *(x.token for x in found[slot])]
      logits = oracle.forward(model.base, merged, np.array([tokens]))[0]
      log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      exact = log_p[range(len(tokens) - 1), tokens[1:]]
      scored = served.scorer.score_prompt(tokens, adapter.number)
      limit = 1e-5 * np.abs(logits).max()
      np.testing.assert_allclose(
        [x.log_prob for x in scored], exact, atol=limit
      )
      np.testing.assert_allclose(
        [x.log_prob for x in found[slot]], exact[len(prompt) - 1 :], atol=limit
      )


def test_an_adapter_is_kept_as_long_as_it_is_used(tmp_path):
  with serving("PaLM", "float32", tmp_path) as served:
    rows = [(0, PROMPTS[0], served.adapters[1])]
    before = read_texts(served, rows)
    again = find_factors(served.models[1][0], served.models[1][1].__getitem__)
    number = served.adapters.pop(2).number
    gc.collect()
    newer = served.decoder.add_adapter(again)  # drops those that nobody uses
    assert newer.number > number
    assert read_texts(served, [(0, PROMPTS[0], newer)]) == before
    assert read_texts(served, rows) == before


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX2", "SSE41"])
def test_lesser_cpus_compute_the_same(limit):
  run = processes.python(
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not lesser"),
    __file__,
    variables={"ONEDNN_MAX_CPU_ISA": limit},
  )
  assert run.returncode == 0, run.stdout
