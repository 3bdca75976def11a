# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's program has settings only: no code, no path, nothing unknown."""

import json

import pytest

from palm_mtf.config import ModelConfig
from palm_mtf.learners.protocol import program_of, read_program
from tests.refusals import message_of
from tests.settings import ADAMW, MUON, PALM_OPTIMIZER, step_config

MODEL = ModelConfig(
  num_layers=2,
  d_model=16,
  num_heads=2,
  d_kv=8,
  d_ff=32,
  vocab_size=64,
  sequence_length=8,
  layers="a, b",
  variants={"a": {"ATTENTION_WINDOW": 4}, "b": {"ROTARY_BASE": 500.0}},
)


@pytest.mark.parametrize("optimizer", [PALM_OPTIMIZER, ADAMW, MUON])
def test_a_program_crosses_as_json(optimizer):
  config = step_config(MODEL, optimizer=optimizer)
  values = json.loads(json.dumps(program_of(config)))
  assert json.loads(json.dumps(program_of(read_program(values)))) == values
  assert type(read_program(values).optimizer) is type(optimizer)
  assert not {"MODEL_DIR", "TEXT_FILES", "NUM_PODS", "SEED"} & {*values}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"NUM_LAYER": 2},
      "the run's program has the setting 'NUM_LAYER' (did you mean "
      '"NUM_LAYERS"?), which a learner does not take.',
    ),
    (
      {"MODEL_DIR": "/root"},
      "the run's program has the setting 'MODEL_DIR'",
    ),
    (
      {"NUM_PODS": 2},
      "the run's program has the setting 'NUM_PODS'",
    ),
    (
      {"MODEL_FUNCTION": "os.system"},
      "the run's program has MODEL_FUNCTION = 'os.system': a learner reads no "
      "files and imports no code for a run.",
    ),
    (
      {"TEACHER": "/etc"},
      "the run's program has TEACHER = '/etc': a learner reads no files and "
      "imports no code for a run.",
    ),
    ({"D_MODEL": None}, "D_MODEL = None: give a whole number of at least 1."),
    (
      {"D_MODEL": 2**70},
      "D_MODEL = 1,180,591,620,717,411,303,424: give a whole number of at most "
      "16,777,216.",
    ),
    ({"D_FF": "8"}, "D_FF = '8': give a whole number of at least 1."),
    (
      {"VARIANTS": {"a": 1}},
      "VARIANTS = {'a': 1}: give settings by name, such",
    ),
  ],
)
def test_a_program_that_is_not_only_settings_is_refused(changes, message):
  values = program_of(step_config(MODEL)) | changes
  assert message_of(read_program, values).startswith(message)


def test_a_program_without_a_setting_is_refused():
  values = program_of(step_config(MODEL))
  del values["D_KV"]
  assert message_of(read_program, values) == "the run's program lacks D_KV."
  for wrong in ([], None, "gin", {"OPTIMIZER": []}):
    with pytest.raises(ValueError):
      read_program(wrong)
