# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of decoding that cannot work are refused, one by one or together."""

import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"temperature": -1}, "TEMPERATURE = -1: give a number from 0.0 to 100.0."),
    ({"top_k": 0}, "TOP_K = 0: give a whole number of at least 1."),
    (
      {"top_p": 0.0},
      "TOP_P = 0: no token has a share of 0;",
    ),
    ({"top_p": 1.1}, "TOP_P = 1.1: give a number from 0.0 to 1.0."),
    ({"top_p": "x"}, "TOP_P = 'x': give a number from 0.0 to 1.0."),
    ({"repetition_penalty": 0}, "REPETITION_PENALTY = 0: give a number from"),
    ({"num_samples": 0}, "NUM_SAMPLES = 0: give a whole number of at least 1."),
    ({"num_beams": 1.5}, "NUM_BEAMS = 1.5: give a whole number of at least 1."),
    ({"stop_strings": "."}, "STOP_STRINGS = '.': give a list of texts, or []"),
    ({"stop_strings": [""]}, "STOP_STRINGS = ['']: give a list of texts"),
    (
      {"weight_dtype": "int16"},
      "WEIGHT_DTYPE = 'int16' (did you mean \"int8\"?): choose one of "
      "'activation', 'int8', 'int4'.",
    ),
    (
      {"num_beams": 2, "num_samples": 3},
      "NUM_BEAMS = 2 and NUM_SAMPLES = 3: beam search draws nothing",
    ),
    ({"num_beams": 2, "top_k": 3}, "set NUM_BEAMS to 1 or TOP_K to None."),
    (
      {"num_beams": 2, "stop_strings": ["."]},
      "NUM_BEAMS = 2 and STOP_STRINGS = ('.',)",
    ),
    (
      {"temperature": 0, "num_samples": 2},
      "NUM_SAMPLES = 2 and TEMPERATURE = 0: all samples would be the same",
    ),
  ],
)
def test_wrong_settings_are_one_line(settings, message):
  with pytest.raises(UserError) as info:
    DecodeConfig(**settings)
  assert message in str(info.value)


def test_a_prompt_has_a_row_for_each_sample_or_beam():
  assert DecodeConfig().rows_per_prompt == 1
  assert DecodeConfig(num_samples=3).rows_per_prompt == 3
  assert DecodeConfig(num_beams=4).rows_per_prompt == 4


def test_a_temperature_near_0_is_greedy():
  assert DecodeConfig(temperature=1e-4).is_greedy
  assert not DecodeConfig(temperature=1e-3).is_greedy
