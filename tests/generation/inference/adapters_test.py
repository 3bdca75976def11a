# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of one batch, each with its own adapter and unlike the others."""

import gc

import numpy as np
import pytest

from palm_mtf.generation.decode import slot_program
from palm_mtf.generation.inference.adapters import find_factors
from palm_mtf.generation.inference.slot_decoder import SlotText
from palm_mtf.native.operations import operations
from tests import adapter_oracle, oracle, processes
from tests.cases import slow
from tests.served_adapters import EACH_DTYPE, find_logits, serving

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler"
)
PROMPTS = [[0, 5, 9, 13], [0, 7], [0, 40, 2, 2, 8, 21, 3]]
TOKENS = 6


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
    count = 1 if wants_log_probs else TOKENS
    steps = served.decoder.steps(texts, count, wants_log_probs=wants_log_probs)
    for slot, chosen in steps.items():
      found[slot] += chosen
  return found


@pytest.mark.parametrize(
  ("block", "dtype"),
  [
    *EACH_DTYPE,
    *(slow("LLaMA 3", x) for x in ("bfloat16", "int8", "q4_k")),
    *(slow("PaLM", x) for x in ("float32", "int4")),
    *(slow("OLMoE", x) for x in ("float32", "q6_k", "int8")),
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
    rows = [(i, *x) for i, x in enumerate(pairs)]
    quick = read_texts(served, rows, wants_log_probs=False)
    for i, chosen in quick.items():  # with prompt lookup
      assert [x.token for x in chosen] == [x.token for x in alone[i]]


@pytest.mark.parametrize("block", ["PaLM", "LLaMA 3", slow("OLMoE")])
def test_log_p_is_that_of_the_merged_model_in_float64(block, tmp_path):
  """Of a mixed batch's steps, and of scored prompts."""
  with serving(block, "float32", tmp_path) as served:
    rows = [(i, PROMPTS[2], x) for i, x in enumerate(served.adapters)]
    found = read_texts(served, rows)
    given = zip(rows, served.models, strict=True)
    for (slot, prompt, adapter), (model, params) in given:
      merged = adapter_oracle.merge(model, params)
      tokens = [*prompt, *(x.token for x in found[slot])]
      logits = oracle.forward(model.base, merged, np.array([tokens]))[0]
      log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      exact = log_p[range(len(tokens) - 1), tokens[1:]]
      scored = served.scorer.score_prompt(tokens, adapter.number)
      limit = 1e-5 * np.abs(logits).max()
      of_text = exact[len(prompt) - 1 :]
      for chosen, log_p in (scored, exact), (found[slot], of_text):
        log_probs = [x.log_prob for x in chosen]
        np.testing.assert_allclose(log_probs, log_p, atol=limit)


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
