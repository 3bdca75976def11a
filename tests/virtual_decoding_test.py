# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding with prefix and prompt tuning has the oracle's log p and tokens."""

import numpy as np
import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.generation.inference.scorer import Example, Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import SlotDecoder
from tests import oracle
from tests.cases import slow
from tests.decode_testing import save_checkpoint
from tests.executors.xla.frozen_test import MESHES
from tests.generation.inference.slot_decoder_test import PROMPTS, run
from tests.mtf_testing import SINGLE, mesh_layout
from tests.virtual_oracle import KINDS, LENGTH, make_case

PALM = "layer_norm parallel multi_query"
SPLIT = mesh_layout("all over data and model")
STEPS = 5
LONG = {"sequence_length": LENGTH + 16}


def tokens_of(config, params, prompt):
  """Returns the likeliest tokens after a prompt, one by one."""
  tokens = [*[0] * LENGTH, 0, *prompt]
  for _ in range(STEPS):
    logits = oracle.forward(config, params, np.array([tokens]))
    tokens.append(int(logits[0, -1].argmax()))
  return tokens[-STEPS:]


@pytest.mark.parametrize(
  ("block", "kind", "mesh"),
  [
    (PALM, "prefix", SINGLE),  # steps in C++
    slow("GPT-2", "prompt", SPLIT),
    *(
      slow(block, kind, mesh)
      for block, kind in (
        *((PALM, x) for x in KINDS),
        *(("Gemma 3", x) for x in KINDS),
        ("LLaMA 3", "prefix"),
        ("Gopher", "prefix"),
        ("T5", "prompt"),
      )
      for mesh in (SINGLE, SPLIT)
    ),
    *(slow("LLaMA 3", x, MESHES["accelerators"]) for x in KINDS),
  ],
)
def test_decoding_has_the_papers_log_p(block, kind, mesh, tmp_path):
  """Texts that begin at different times are those of greedy decoding."""
  case = make_case(block, kind, **LONG)
  config, params = case.config, case.params
  checkpoint = save_checkpoint(config, params, tmp_path)
  examples = [Example([5, 9, 13], [7, 8]), Example([], [3, 4, 5, 40])]
  virtual = [0] * LENGTH
  with LoadedDecoder(checkpoint, config, mesh) as loaded:
    found = dict(Scorer(loaded).log_likelihoods(examples))
    for i, (given, targets) in enumerate(examples):
      expected = oracle.log_likelihood(
        config, params, [*virtual, *given], targets
      )
      assert found[i] == pytest.approx(expected, rel=1e-5)
    decoder = SlotDecoder(loaded, config.vocab_size, 6, prompt_lookup=True)
    assert decoder.sequence_length == 16
    times = [(i, i, STEPS) for i in range(len(PROMPTS))]
    texts = run(decoder, [DecodeConfig(temperature=0.0)] * len(PROMPTS), times)
  for prompt, text in zip(PROMPTS, texts, strict=True):
    assert [x.token for x in text] == tokens_of(config, params, prompt)
