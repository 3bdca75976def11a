# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings refuse wrong values when they are made, each in one line."""

import dataclasses

import pytest

from palm_mtf.config.data import DataConfig
from palm_mtf.config.fault_tolerance import WatchConfig
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.run import RunConfig
from palm_mtf.errors import UserError

PALM = PalmConfig(
  num_layers=2,
  d_model=32,
  num_heads=4,
  d_kv=8,
  d_ff=64,
  vocab_size=300,
  sequence_length=16,
)
ADAFACTOR = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.9,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1.0,
  weight_decay_exponent=2.0,
  z_loss=1e-4,
)
TEXT = DataConfig(text_files="*.txt", vocabulary=None, validation_share=0.1)
RUN = RunConfig(
  train_steps=2,
  global_batch_size=2,
  seed=0,
  log_steps=1,
  eval_steps=1,
  eval_batches=1,
  checkpoint_steps=1,
  keep_checkpoints=1,
  chip="measured",
  prompts=[],
  sample_tokens=1,
)

WATCH = WatchConfig()

COUNTS = [
  pytest.param(settings, field.name, id=field.name)
  for settings in (PALM, RUN)
  for field in dataclasses.fields(settings)
  if field.type is int
]


@pytest.mark.parametrize(("settings", "name"), COUNTS)
@pytest.mark.parametrize("value", [-1, 1.5, "4", True, None])
def test_a_count_is_a_whole_number(settings, name, value):
  least = 0 if name == "seed" else 1
  with pytest.raises(UserError) as error:
    dataclasses.replace(settings, **{name: value})
  assert str(error.value) == (
    f"{name.upper()} = {value!r}: give a whole number of at least {least}."
  )


@pytest.mark.parametrize(
  ("settings", "name", "value", "message"),
  [
    (
      PALM,
      "d_kv",
      7,
      "D_KV = 7: rotary embedding turns pairs of numbers, so D_KV is even; "
      "use 8.",
    ),
    (
      PALM,
      "norm",
      "layernorm",
      "NORM = 'layernorm' (did you mean \"layer_norm\"?): choose one of "
      "'layer_norm', 'rms_norm'.",
    ),
    (
      PALM,
      "block",
      "paralel",
      "BLOCK = 'paralel' (did you mean \"parallel\"?): choose one of "
      "'parallel', 'serial'.",
    ),
    (
      PALM,
      "attention",
      "gqa",
      "ATTENTION = 'gqa': choose one of 'multi_query', 'multi_head'.",
    ),
    (
      PALM,
      "activation_dtype",
      "float16",
      "ACTIVATION_DTYPE = 'float16' (did you mean \"bfloat16\"?): choose one "
      "of 'auto', 'bfloat16', 'float32'.",
    ),
    (
      PALM,
      "remat",
      "layers",
      "REMAT = 'layers' (did you mean \"layer\"?): choose one of 'none', "
      "'attention', 'layer'.",
    ),
    (
      ADAFACTOR,
      "learning_rate",
      0,
      "LEARNING_RATE = 0: give a number from 1e-09 to 10.0.",
    ),
    (
      ADAFACTOR,
      "beta1",
      1.0,
      "BETA1 = 1.0: give a number from 0.0 to 0.9999.",
    ),
    (
      ADAFACTOR,
      "beta2_exponent",
      "0.8",
      "BETA2_EXPONENT = '0.8': give a number from 0.01 to 2.0.",
    ),
    (
      ADAFACTOR,
      "update_clip",
      0,
      "UPDATE_CLIP = 0: give a number from 0.001 to 1000000000.0, or None for "
      "no clipping.",
    ),
    (
      ADAFACTOR,
      "gradient_clip",
      float("nan"),
      "GRADIENT_CLIP = nan: give a number from 1e-06 to 1000000000.0.",
    ),
    (
      ADAFACTOR,
      "weight_decay_exponent",
      True,
      "WEIGHT_DECAY_EXPONENT = True: give a number from 0.1 to 99.0, or None "
      "for no decay.",
    ),
    (
      ADAFACTOR,
      "second_moment",
      "factor",
      "SECOND_MOMENT = 'factor' (did you mean \"factored\"?): choose one of "
      "'full', 'factored'.",
    ),
    (
      ADAFACTOR,
      "learning_rate_schedule",
      "cosine",
      "LEARNING_RATE_SCHEDULE = 'cosine': choose one of 'palm', 'constant'.",
    ),
    (
      ADAFACTOR,
      "momentum_dtype",
      "float16",
      "MOMENTUM_DTYPE = 'float16' (did you mean \"bfloat16\"?): choose one of "
      "'float32', 'bfloat16'.",
    ),
    (
      ADAFACTOR,
      "parameter_scale",
      None,
      "PARAMETER_SCALE = None: choose one of 'variable', 'stacked', 'off'.",
    ),
    (
      ADAFACTOR,
      "parameter_scale_floor",
      0.0,
      "PARAMETER_SCALE_FLOOR = 0.0: give a number from 1e-12 to 1000.0.",
    ),
    (
      ADAFACTOR,
      "weight_decay_on",
      "kernel",
      "WEIGHT_DECAY_ON = 'kernel' (did you mean \"kernels\"?): choose one of "
      "'all', 'all_but_scales', 'kernels'.",
    ),
    (
      ADAFACTOR,
      "dropout",
      1.0,
      "DROPOUT = 1.0: give a number from 0.0 to 0.99.",
    ),
    (ADAFACTOR, "z_loss", -1, "Z_LOSS = -1: give a number from 0.0 to 1.0."),
    (
      TEXT,
      "text_files",
      [],
      "TEXT_FILES = []: give a glob or a list of globs, such as "
      "'\"/any/folder/**/*.txt\"'.",
    ),
    (
      TEXT,
      "text_files",
      ["a", 3],
      "TEXT_FILES = ['a', 3]: give a glob or a list of globs, such as "
      "'\"/any/folder/**/*.txt\"'.",
    ),
    (
      TEXT,
      "vocabulary",
      3,
      "VOCABULARY = 3: give the path of a SentencePiece model, or None to "
      "train one.",
    ),
    (
      TEXT,
      "validation_share",
      0.9,
      "VALIDATION_SHARE = 0.9: give a number from 0.0001 to 0.5.",
    ),
    (
      RUN,
      "prompts",
      "one",
      "PROMPTS = 'one': give a list of texts, or [] for none.",
    ),
    (
      RUN,
      "prompts",
      ["a", ""],
      "PROMPTS = ['a', '']: give a list of texts, or [] for none.",
    ),
    (
      WATCH,
      "watchdog_secs",
      0,
      "WATCHDOG_SECS = 0: give a number from 1.0 to 1000000000.0.",
    ),
  ],
)
def test_a_wrong_value_is_named_with_the_rule_and_the_fix(
  settings, name, value, message
):
  with pytest.raises(UserError) as error:
    dataclasses.replace(settings, **{name: value})
  assert str(error.value) == message


@pytest.mark.parametrize("settings", [PALM, ADAFACTOR, TEXT, RUN, WATCH])
def test_settings_are_frozen(settings):
  name = dataclasses.fields(settings)[0].name
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(settings, name, getattr(settings, name))


def test_the_defaults_are_the_paper():
  assert (PALM.norm, PALM.block, PALM.attention, PALM.activation_dtype) == (
    "layer_norm",
    "parallel",
    "multi_query",
    "bfloat16",
  )
  assert (
    ADAFACTOR.learning_rate_schedule,
    ADAFACTOR.second_moment,
    ADAFACTOR.parameter_scale,
    ADAFACTOR.weight_decay_on,
  ) == ("palm", "full", "variable", "all")


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      {"keep_every_steps": 250, "checkpoint_steps": 100},
      "KEEP_EVERY_STEPS = 250: there is a checkpoint every CHECKPOINT_STEPS = "
      "100 steps; give a multiple of that, such as 300, or None.",
    ),
    (
      {"sample_steps": 0},
      "SAMPLE_STEPS = 0: give a whole number of at least 1.",
    ),
    (
      {"keep_every_steps": 0},
      "KEEP_EVERY_STEPS = 0: give a whole number of at least 1.",
    ),
    (
      {"init_checkpoint": ""},
      "INIT_CHECKPOINT = '': give the path of a checkpoint, a MODEL_DIR or a "
      "TensorFlow prefix, or None.",
    ),
  ],
)
def test_checkpoints_that_cannot_be_kept_or_read_are_refused(changes, message):
  with pytest.raises(UserError) as error:
    dataclasses.replace(RUN, **changes)
  assert str(error.value) == message


@pytest.mark.parametrize(
  "steps",
  [20, None, "[1]", [0], [3], [1, 3], [True], [1.0], [[1, 2]], [1] * 11],
)
def test_steps_that_cannot_be_traced_are_refused(steps):
  with pytest.raises(UserError) as error:
    dataclasses.replace(RUN, trace_steps=steps)
  assert str(error.value) == (
    f"TRACE_STEPS = {steps!r}: give a list of at most 10 steps from 1 to "
    "TRAIN_STEPS = 2, such as [1], or [] for none."
  )


def test_the_last_step_may_be_traced():
  assert dataclasses.replace(RUN, trace_steps=[2]).trace_steps == [2]
