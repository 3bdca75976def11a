# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""An objective that settings do not allow is one line that says the fix."""

import pytest

from palm_mtf.config import CorpusConfig, DataConfig
from palm_mtf.errors import UserError
from tests.mtf_testing import small_config


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
  with pytest.raises(UserError, match=r'set PACKING = "packed" or "single"'):
    config_of(objective, packing=packing)


def test_as_many_sentinels_are_asked_for_as_the_longest_row_needs():
  # 465 tokens of text, 70 of them noise in 23 spans, 46 sentinels and [eod].
  config_of(extra_ids=23)
  with pytest.raises(UserError, match=r"takes 23 spans .* EXTRA_IDS = 100\."):
    config_of(extra_ids=22)
  with pytest.raises(UserError, match=r"takes 409 spans .* EXTRA_IDS = 409\."):
    config_of(sequence_length=2048, noise_density=0.5, mean_span_length=1.5)


def test_a_row_too_short_for_any_span_is_refused():
  config_of(sequence_length=4)
  with pytest.raises(UserError, match="use 4 at least"):
    config_of(sequence_length=3)


@pytest.mark.parametrize(
  "setting", [{"noise_density": 1.0}, {"mean_span_length": 0.5}], ids=str
)
def test_noise_is_a_share_in_spans_of_a_token_or_more(setting):
  (name,) = setting
  with pytest.raises(UserError, match=name.upper()):
    config_of(**setting)


def test_a_model_that_does_not_exist_is_refused():
  with pytest.raises(UserError, match=r'did you mean "prefix_lm"'):
    small_config(objective="prefixlm")
