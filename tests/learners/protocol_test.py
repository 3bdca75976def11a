# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's program has settings only: no code, no path, nothing unknown."""

import json

import numpy as np
import pytest

from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError
from palm_mtf.learners.protocol import (
  Message,
  MessageReader,
  at_most,
  program_of,
  read_program,
  write_chunks,
)
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


def test_mutated_messages_are_read_or_refused_and_nothing_else():
  """Flipped, removed and repeated bytes of a message's first chunk."""
  generator = np.random.default_rng(0)
  arrays = {"w": np.ones((3, 4), np.float32), "b": np.zeros(2, np.int8)}
  first, *rest = write_chunks(Message({"work": 1, "metrics": {}}, arrays))
  refused = 0
  for _ in range(2000):
    mutant = bytearray(first)
    for _ in range(generator.integers(1, 4)):
      at, kind = generator.integers(len(mutant)), generator.integers(3)
      if kind == 0:
        mutant[at] = generator.integers(256)
      elif kind == 1:
        del mutant[at : at + generator.integers(1, 9)]
      else:
        mutant[at:at] = mutant[at : at + generator.integers(1, 9)]
    try:
      reader = MessageReader(bytes(mutant), at_most(1000))
      for chunk in rest:
        reader.take(chunk)
      reader.end()
    except UserError:
      refused += 1
  assert 1000 < refused < 2000


def test_mutated_programs_are_read_or_refused_and_nothing_else():
  generator = np.random.default_rng(0)
  values = program_of(step_config(MODEL))
  odd = [None, True, -1, 2**70, 1e308, "", "x", [], [[]], {}, {"a": {"b": []}}]
  for _ in range(300):
    names = generator.choice([*values], generator.integers(1, 4))
    picks = generator.integers(len(odd), size=len(names))
    try:
      read_program(
        values | {x: odd[i] for x, i in zip(names, picks, strict=True)}
      )
    except UserError:
      continue
