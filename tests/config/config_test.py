# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""An objective that settings do not allow is one line that says the fix."""

import pytest

from palm_mtf.config import CorpusConfig, DataConfig
from tests.mtf_testing import small_config
from tests.refusals import message_of


def config_of(objective="span_corruption", sequence_length=512, **data):
  settings = {"packing": "packed", "extra_ids": 100, **data}
  return CorpusConfig(
    model=small_config(objective=objective, sequence_length=sequence_length),
    data=DataConfig(
      text_files="*.txt", vocabulary=None, validation_share=0.1, **settings
    ),
  )


@pytest.mark.parametrize("packing", ["packed", "single"])
@pytest.mark.parametrize(
  "objective", ["causal", "prefix_lm", "span_corruption"]
)
def test_whole_documents_serve_every_objective(objective, packing):
  assert config_of(objective, packing=packing).data.packing == packing


@pytest.mark.parametrize("packing", ["joined", "joined_masked"])
@pytest.mark.parametrize("objective", ["prefix_lm", "span_corruption"])
def test_joined_documents_have_no_inputs(objective, packing):
  said = message_of(config_of, objective, packing=packing)
  assert 'set PACKING = "packed" or "single"' in said


def test_as_many_sentinels_are_asked_for_as_the_longest_row_needs():
  # 465 tokens of text, 70 of them noise in 23 spans, 46 sentinels and [eod].
  config_of(extra_ids=23)
  said = message_of(config_of, extra_ids=22)
  assert "takes 23 spans " in said and " EXTRA_IDS = 100." in said
  noise = {"noise_density": 0.5, "mean_span_length": 1.5}
  said = message_of(config_of, sequence_length=2048, **noise)
  assert "takes 409 spans " in said and " EXTRA_IDS = 409." in said


def test_a_row_too_short_for_any_span_is_refused():
  config_of(sequence_length=4)
  assert "use 4 at least" in message_of(config_of, sequence_length=3)


def test_noise_is_a_share_in_spans_of_a_token_or_more():
  assert message_of(config_of, noise_density=1.0).startswith("NOISE_DENSITY")
  said = message_of(config_of, mean_span_length=0.5)
  assert said.startswith("MEAN_SPAN_LENGTH")
