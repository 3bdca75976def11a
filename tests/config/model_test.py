# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers differ only as VARIANTS can say; anything else is one line."""

import pytest

from tests.mtf_testing import small_config
from tests.refusals import message_of

WINDOW = {"ATTENTION_WINDOW": 3}
TWO = {"layers": "window, global"}


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"layers": 2}, "LAYERS = 2: give a text"),
    (
      {"layers": "window, globl", "variants": {"window": WINDOW, "global": {}}},
      "VARIANTS has no 'globl' (did you mean \"global\"?)",
    ),
    (
      {"layers": "window", "variants": {"window": WINDOW, "global": {}}},
      "VARIANTS['global']: LAYERS = 'window' does not name it",
    ),
    ({"variants": {"window": WINDOW}}, "VARIANTS['window']: LAYERS = ''"),
    ({**TWO}, "VARIANTS has no 'global'"),
    ({**TWO, "variants": [WINDOW]}, "give settings by name"),
    ({**TWO, "variants": {"window": 3, "global": {}}}, "give settings by name"),
    (
      {**TWO, "variants": {"window": {"ATENTION_WINDOW": 3}, "global": {}}},
      "VARIANTS['window']: 'ATENTION_WINDOW' cannot differ between layers "
      '(did you mean "ATTENTION_WINDOW"?)',
    ),
    (
      {**TWO, "variants": {"window": {"D_FF": 8}, "global": {}}},
      "VARIANTS['window']: 'D_FF' cannot differ between layers",
    ),
    (
      {**TWO, "variants": {"window": WINDOW, "global": {3: 4}}},
      "VARIANTS['global']: 3 cannot differ between layers",
    ),
    (
      {**TWO, "variants": {"window": {"ATTENTION_WINDOW": 0}, "global": {}}},
      "VARIANTS['window']: ATTENTION_WINDOW = 0: give a whole number",
    ),
    (
      {**TWO, "variants": {"window": {"ROTARY_BASE": "1"}, "global": {}}},
      "VARIANTS['window']: ROTARY_BASE = '1': give a number",
    ),
    (
      {**TWO, "variants": {"window": {"ROTARY_FACTOR": 2.0}, "global": {}}},
      "VARIANTS['window']: ROTARY_FACTOR = 2.0 and ROTARY_SCALING = 'none'",
    ),
    (
      {**TWO, "variants": {"window": WINDOW, "global": {"POSITIONS": "t5"}}},
      "VARIANTS['global'] and POSITIONS = 't5'",
    ),
    (
      {
        **TWO,
        "positions": "alibi",
        "variants": {"window": WINDOW, "global": {"POSITIONS": "none"}},
      },
      "VARIANTS['global'] and POSITIONS = 'alibi'",
    ),
    (
      {
        **TWO,
        "objective": "prefix_lm",
        "variants": {"window": WINDOW, "global": {}},
      },
      "VARIANTS['window']: ATTENTION_WINDOW = 3 and OBJECTIVE = 'prefix_lm'",
    ),
    (
      {"layers": "window, 2*global", "num_layers": 2},
      "NUM_LAYERS = 2: a pattern of 3 layers does not divide",
    ),
    ({"attention_window": 2**31}, "ATTENTION_WINDOW = 2,147,483,648: give"),
    ({"branch_norm": True}, "BRANCH_NORM = True and BLOCK = 'parallel'"),
    ({"score_scale": 0.0}, "or None for 1 / sqrt(D_KV)"),
  ],
  ids=str,
)
def test_what_layers_cannot_be_is_one_line(settings, message):
  assert message in message_of(small_config, **settings)


def test_layers_without_positions_leave_out_the_model_s_rotary_settings():
  model = small_config(
    **TWO,
    rotary_base=5e4,
    variants={"window": WINDOW, "global": {"POSITIONS": "none"}},
  )
  window, whole = model.variant("window"), model.variant("global")
  assert (window.attention_window, window.rotary_base) == (3, 5e4)
  assert (whole.attention_window, whole.positions) == (None, "none")
