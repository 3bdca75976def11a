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


EXPERTS = {"mlp": "experts", "num_experts": 8, "experts_per_token": 2}


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"mlp": "experts"}, 'MLP = "experts": give NUM_EXPERTS, too.'),
    (
      {"mlp": "experts", "num_experts": 8},
      'MLP = "experts": give EXPERTS_PER_TOKEN, too.',
    ),
    (
      {"num_experts": 8},
      "NUM_EXPERTS = 8 and MLP = 'swiglu': only \"experts\" has this setting; "
      'leave it out, or set MLP = "experts".',
    ),
    (
      {**EXPERTS, "experts_per_token": 9},
      "EXPERTS_PER_TOKEN = 9 and NUM_EXPERTS = 8: a token uses some of the "
      "experts; use at most 8.",
    ),
    (
      {**EXPERTS, "router_bias": True},
      "ROUTER_BIAS = True and ROUTER = 'softmax': the bias balances scores of "
      '"sigmoid"; set ROUTER = "sigmoid", or ROUTER_BIAS = False and '
      "BALANCE_LOSS.",
    ),
    (
      {**EXPERTS, "capacity_factor": 0},
      "CAPACITY_FACTOR = 0: give a number from 0.001 to 1000000.0.",
    ),
    (
      {**EXPERTS, "router": "sigmiod"},
      "ROUTER = 'sigmiod' (did you mean \"sigmoid\"?)",
    ),
    (
      {**EXPERTS, "biases": "mlp"},
      "BIASES = 'mlp' and MLP = \"experts\": experts have no biases; leave out "
      '"mlp".',
    ),
    (
      {**EXPERTS, "output_fan_in": "joined"},
      'OUTPUT_FAN_IN = "joined" and MLP = "experts": the kernels of experts '
      'are in no matrix with o; set OUTPUT_FAN_IN = "separate".',
    ),
    (
      {
        "num_experts": 8,
        "layers": "a",
        "variants": {"a": {"MLP": "gelu"}},
      },
      "NUM_EXPERTS = 8 and MLP = 'swiglu': only \"experts\" has this setting; "
      'leave it out, or set MLP = "experts".',
    ),
    (
      {"layers": "a", "variants": {"a": {"MLP": "expert"}}},
      "VARIANTS['a']: MLP = 'expert' (did you mean \"experts\"?)",
    ),
  ],
)
def test_what_experts_cannot_be_is_one_line(settings, message):
  assert message_of(small_config, **settings).startswith(message)


def test_a_dense_layer_leaves_out_the_models_settings_of_experts():
  config = small_config(
    **EXPERTS,
    layers="dense, sparse",
    variants={"dense": {"MLP": "geglu"}, "sparse": {}},
  )
  assert config.variant("dense") == small_config(mlp="geglu")
  assert config.variant("sparse") == small_config(**EXPERTS)
