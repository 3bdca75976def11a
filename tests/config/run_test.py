# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings refuse wrong values when they are made, each in one line."""

import dataclasses
import typing

import hypothesis
import pytest
from hypothesis import strategies as st

from palm_mtf.config import (
  AdafactorConfig,
  DataConfig,
  InspectionConfig,
  ModelConfig,
  PodsConfig,
  RunConfig,
  WatchConfig,
)
from palm_mtf.config.run import BatchSizes
from palm_mtf.errors import UserError
from tests.data.small_sources import repeatable

PALM = ModelConfig(
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

WATCH, PODS, INSPECTION = WatchConfig(), PodsConfig(), InspectionConfig()
GLOBS = "give a glob or a list of globs, such as '\"/any/folder/**/*.txt\"'."
TEXTS = "give a list of texts, or [] for none."

COUNTS = [
  pytest.param(settings, name, id=name)
  for settings in (PALM, RUN, PODS, INSPECTION)
  for name, kind in typing.get_type_hints(type(settings)).items()
  if kind is int  # get_type_hints removes Annotated
]


def refusal(settings, **changes) -> str:
  with pytest.raises(UserError) as error:
    dataclasses.replace(settings, **changes)
  return str(error.value)


@pytest.mark.parametrize(("settings", "name"), COUNTS)
@pytest.mark.parametrize("value", [-1, 1.5, "4", True, None])
def test_a_count_is_a_whole_number(settings, name, value):
  least = 0 if name in ("seed", "inspect_rows") else 1
  assert refusal(settings, **{name: value}) == (
    f"{name.upper()} = {value!r}: give a whole number of at least {least}."
  )


@pytest.mark.parametrize(
  ("settings", "name", "value", "bounds"),
  [
    (ADAFACTOR, "learning_rate", 0, "1e-09 to 10.0"),
    (ADAFACTOR, "beta1", 1.0, "0.0 to 0.9999"),
    (ADAFACTOR, "beta2_exponent", "0.8", "0.01 to 2.0"),
    (
      ADAFACTOR,
      "update_clip",
      0,
      "0.001 to 1000000000.0, or None for no clipping",
    ),
    (ADAFACTOR, "gradient_clip", float("nan"), "1e-06 to 1000000000.0"),
    (
      ADAFACTOR,
      "weight_decay_exponent",
      True,
      "0.1 to 99.0, or None for no decay",
    ),
    (ADAFACTOR, "parameter_scale_floor", 0.0, "1e-12 to 1000.0"),
    (ADAFACTOR, "dropout", 1.0, "0.0 to 0.99"),
    (ADAFACTOR, "z_loss", -1, "0.0 to 1.0"),
    (TEXT, "validation_share", 0.9, "0.0001 to 0.5"),
    (WATCH, "watchdog_secs", 0, "1.0 to 1000000000.0"),
    (PODS, "pod_timeout_secs", 0, "1.0 to 1000000.0"),
  ],
)
def test_a_number_out_of_bounds_is_named_with_them(
  settings, name, value, bounds
):
  assert refusal(settings, **{name: value}) == (
    f"{name.upper()} = {value!r}: give a number from {bounds}."
  )


@pytest.mark.parametrize(
  ("settings", "name", "value", "nearest", "choices"),
  [
    (
      *(PALM, "norm", "layernorm", "layer_norm"),
      "layer_norm layer_norm_bias rms_norm rms_norm_1p",
    ),
    (
      PALM,
      "positions",
      "rotry",
      "rotary",
      "rotary learned t5 transformer_xl alibi none",
    ),
    (
      PALM,
      "mlp",
      "swigl",
      "swiglu",
      "swiglu geglu geglu_tanh gelu gelu_tanh relu relu2",
    ),
    (PALM, "qk_norm", "rmsnorm", "rms_norm", "none rms_norm"),
    (PALM, "rotary_pairs", "half", "halves", "halves neighbours"),
    (PALM, "output_embedding", "tide", "tied", "tied separate"),
    (
      PALM,
      "block",
      "paralel",
      "parallel",
      "parallel parallel_two_norms serial",
    ),
    (PALM, "attention", "gqa", "", "multi_query multi_head grouped_query"),
    (
      PALM,
      "activation_dtype",
      "float16",
      "bfloat16",
      "auto bfloat16 float32",
    ),
    (PALM, "remat", "layers", "layer", "none attention layer"),
    (ADAFACTOR, "second_moment", "factor", "factored", "full factored"),
    (
      ADAFACTOR,
      "learning_rate_schedule",
      "cosin",
      "cosine",
      "palm constant cosine",
    ),
    (ADAFACTOR, "momentum_dtype", "float16", "bfloat16", "float32 bfloat16"),
    (ADAFACTOR, "parameter_scale", None, "", "variable stacked off"),
    (
      ADAFACTOR,
      "weight_decay_on",
      "kernel",
      "kernels",
      "all all_but_scales kernels",
    ),
    (ADAFACTOR, "norm_scale", "zero", "", "zero_centered plain"),
    (PALM, "logits_dtype", "bfloat16", "float32", "float32 activation"),
    (PALM, "final_norm_scale", "non", "none", "learned none"),
    (PALM, "output_fan_in", "join", "joined", "separate joined"),
    (PODS, "on_pod_failure", "shrnk", "shrink", "stop wait shrink"),
    (
      PODS,
      "pods",
      "in_proces",
      "in_process",
      "in_process local_servers cluster",
    ),
    (PODS, "dcn_dtype", "float16", "bfloat16", "float32 bfloat16"),
  ],
)
def test_a_word_that_is_no_choice_is_answered_with_the_choices(
  settings, name, value, nearest, choices
):
  hint = f' (did you mean "{nearest}"?)' if nearest else ""
  listed = ", ".join(map(repr, choices.split()))
  assert refusal(settings, **{name: value}) == (
    f"{name.upper()} = {value!r}{hint}: choose one of {listed}."
  )


@pytest.mark.parametrize(
  ("settings", "changes", "message"),
  [
    (
      PALM,
      {"d_kv": 7},
      "D_KV = 7: rotary embedding turns pairs of numbers, so D_KV is even; "
      "use 8.",
    ),
    (TEXT, {"text_files": []}, f"TEXT_FILES = []: {GLOBS}"),
    (TEXT, {"text_files": ["a", 3]}, f"TEXT_FILES = ['a', 3]: {GLOBS}"),
    (
      TEXT,
      {"vocabulary": 3},
      "VOCABULARY = 3: give the path of a vocabulary, or None to train one.",
    ),
    (RUN, {"prompts": "one"}, f"PROMPTS = 'one': {TEXTS}"),
    (RUN, {"prompts": ["a", ""]}, f"PROMPTS = ['a', '']: {TEXTS}"),
    (
      RUN,
      {"keep_every_steps": 250, "checkpoint_steps": 100},
      "KEEP_EVERY_STEPS = 250: there is a checkpoint every CHECKPOINT_STEPS = "
      "100 steps; give a multiple of that, such as 300, or None.",
    ),
    (
      RUN,
      {"sample_steps": 0},
      "SAMPLE_STEPS = 0: give a whole number of at least 1.",
    ),
    (
      RUN,
      {"keep_every_steps": 0},
      "KEEP_EVERY_STEPS = 0: give a whole number of at least 1.",
    ),
    (
      RUN,
      {"init_checkpoint": ""},
      "INIT_CHECKPOINT = '': give the path of a checkpoint, a MODEL_DIR or a "
      "TensorFlow prefix, or None.",
    ),
    (PODS, {"num_pods": 9}, "NUM_PODS = 9: give a whole number of at most 8."),
    (
      PODS,
      {"client_address": "a:b:c"},
      'CLIENT_ADDRESS = \'a:b:c\': write "host" or "host:port", of this host.',
    ),
    (
      INSPECTION,
      {"inspect_steps": []},
      "INSPECT_STEPS = []: give a list of steps, such as [0, 1000].",
    ),
    (
      INSPECTION,
      {"inspect_steps": [-1]},
      "INSPECT_STEPS = -1: give a whole number of at least 0.",
    ),
    (
      INSPECTION,
      {"overlap_files": [3]},
      "OVERLAP_FILES = [3]: give a glob, a list of globs, or None.",
    ),
  ],
)
def test_a_wrong_value_is_named_with_the_rule_and_the_fix(
  settings, changes, message
):
  assert refusal(settings, **changes) == message


@pytest.mark.parametrize("settings", [PALM, ADAFACTOR, TEXT, RUN, WATCH])
def test_settings_are_frozen(settings):
  name = dataclasses.fields(settings)[0].name
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(settings, name, getattr(settings, name))


def test_the_defaults_are_the_paper_on_one_pod():
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
    ADAFACTOR.norm_scale,
  ) == ("palm", "full", "variable", "all", "zero_centered")
  assert PODS.num_pods == 1


@pytest.mark.parametrize(
  "steps",
  [20, None, "[1]", [0], [3], [1, 3], [True], [1.0], [[1, 2]], [1] * 11],
)
def test_steps_that_cannot_be_traced_are_refused(steps):
  assert refusal(RUN, trace_steps=steps) == (
    f"TRACE_STEPS = {steps!r}: give a list of at most 10 steps from 1 to "
    "TRAIN_STEPS = 2, such as [1], or [] for none."
  )


def test_the_last_step_may_be_traced():
  assert dataclasses.replace(RUN, trace_steps=[2]).trace_steps == [2]


def test_a_state_to_resume_needs_its_checkpoint():
  assert refusal(RUN, init_state="all") == (
    'INIT_STATE = "all": needs a checkpoint to resume from; name it in '
    "INIT_CHECKPOINT."
  )


def test_a_serial_block_has_no_joined_fan_in():
  assert refusal(PALM, block="serial", output_fan_in="joined") == (
    'OUTPUT_FAN_IN = "joined": a serial block never adds the products of o and '
    'wo; use "separate".'
  )


@pytest.mark.parametrize(
  ("schedule", "steps"), [("cosine", None), ("palm", 100), ("constant", 100)]
)
def test_a_cosine_and_no_other_schedule_has_a_length(schedule, steps):
  with pytest.raises(UserError, match="LEARNING_RATE_DECAY_STEPS = "):
    dataclasses.replace(
      ADAFACTOR,
      learning_rate_schedule=schedule,
      learning_rate_decay_steps=steps,
    )


_ramps = st.lists(
  st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=5
)


@hypothesis.given(_ramps)
@repeatable(200)
def test_sizes_and_rows_before_are_those_of_counting_step_by_step(phases):
  pairs, every = [], []
  for length, size in phases:
    pairs.append([len(every), size])
    every += [size] * length
  sizes = BatchSizes(pairs)
  every += [phases[-1][1]] * 7
  for step, size in enumerate(every):
    assert sizes.size(step) == size
    assert sizes.rows_before(step) == sum(every[:step])
    later = [start for start, _ in pairs if start > step]
    assert sizes.next_change(step) == (later[0] if later else None)
  assert sizes.largest == max(every)
  assert (sizes.pairs, sizes.sizes) == (pairs, [size for _, size in phases])


def test_a_number_is_the_size_of_every_step():
  sizes = BatchSizes(16)
  assert (sizes.size(10**9), sizes.rows_before(10**9)) == (16, 16 * 10**9)
  assert (sizes.pairs, sizes.largest) == ([[0, 16]], 16)
  assert sizes.next_change(0) is None


@pytest.mark.parametrize(
  "value",
  [
    [],
    [[]],
    [[0]],
    [[0, 4, 4]],
    [[1, 4]],
    [[0, 4], [0, 8]],
    [[0, 4], [9, 8], [5, 16]],
    [[0, 0]],
    [[0, -4]],
    [[0, 4.0]],
    [[0, True]],
    [0, 4],
    "16",
    16.0,
    None,
  ],
)
def test_anything_else_is_an_error_that_shows_the_form(value):
  with pytest.raises(UserError) as info:
    BatchSizes(value)
  assert str(info.value) == (
    f"GLOBAL_BATCH_SIZE = {value!r}: give a whole number, or pairs of a step "
    "and the size from this step on, with rising steps from 0, such as "
    "[[0, 512], [50000, 1024]]."
  )


@pytest.mark.parametrize("value", [0, -1, True])
def test_a_size_below_one_is_an_error(value):
  with pytest.raises(UserError, match=r"give a whole number of at least 1"):
    BatchSizes(value)
