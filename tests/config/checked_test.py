# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings refuse wrong values when they are made, each in one line."""

import dataclasses
import typing

import pytest

from palm_mtf.config import (
  DataConfig,
  DecodeConfig,
  FewShotConfig,
  FilterConfig,
  HardwareConfig,
  InspectionConfig,
  ModelConfig,
  PodsConfig,
  RunConfig,
  TaskEvalConfig,
  WatchConfig,
)
from tests.refusals import message_of
from tests.settings import PALM_LOSS, PALM_OPTIMIZER

PALM = ModelConfig(
  num_layers=2,
  d_model=32,
  num_heads=4,
  d_kv=8,
  d_ff=64,
  vocab_size=300,
  sequence_length=16,
)
ADAFACTOR = PALM_OPTIMIZER
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
FILTER, DECODE, CHIP = FilterConfig(), DecodeConfig(), HardwareConfig()
TASKS, SHOTS = TaskEvalConfig(), FewShotConfig()
EVERY = (PALM, ADAFACTOR, TEXT, RUN, WATCH, PODS, INSPECTION, FILTER, DECODE)


def refusal(settings, **changes) -> str:
  return message_of(dataclasses.replace, settings, **changes)


def fields_of(*kinds: type, settings=EVERY) -> list:
  """Returns a parameter for each field whose type is of some kinds."""
  return [
    pytest.param(each, name, id=name)
    for each in settings
    for name, kind in typing.get_type_hints(type(each)).items()
    # get_type_hints removes Annotated.
    if kind in kinds or typing.get_origin(kind) in kinds
  ]


@pytest.mark.parametrize(
  ("settings", "name"),
  fields_of(int, settings=(PALM, RUN, PODS, INSPECTION, DECODE)),
)
@pytest.mark.parametrize("value", [-1, 1.5, "4", True, None])
def test_a_count_is_a_whole_number(settings, name, value):
  may_be_0 = "seed inspect_rows coordinator_port retrieve neighbours".split()
  least = 0 if name in may_be_0 else 1
  assert refusal(settings, **{name: value}) == (
    f"{name.upper()} = {value!r}: give a whole number of at least {least}."
  )


@pytest.mark.parametrize(("settings", "name"), fields_of(typing.Literal))
def test_a_word_that_is_no_choice_is_answered_with_the_choices(settings, name):
  choices = typing.get_args(typing.get_type_hints(type(settings))[name])
  assert refusal(settings, **{name: "qqq"}) == (
    f"{name.upper()} = 'qqq': choose one of {', '.join(map(repr, choices))}."
  )


CLIP = "0.001 to 1000000000.0, or None for no clipping"


@pytest.mark.parametrize(
  ("settings", "name", "value", "bounds"),
  [
    (ADAFACTOR, "learning_rate", -1, "0.0 to 10.0"),
    (ADAFACTOR, "beta1", 1.0, "0.0 to 0.9999"),
    (ADAFACTOR, "beta2_exponent", "0.8", "0.01 to 2.0"),
    (ADAFACTOR, "update_clip", 0, CLIP),
    (ADAFACTOR, "gradient_clip", float("nan"), "1e-06 to 1000000000.0"),
    (
      ADAFACTOR,
      "weight_decay_exponent",
      True,
      "0.1 to 99.0, or None for no de",
    ),
    (ADAFACTOR, "parameter_scale_floor", 0.0, "1e-12 to 1000.0"),
    (PALM_LOSS, "dropout", 1.0, "0.0 to 0.99"),
    (PALM_LOSS, "z_loss", -1, "0.0 to 1.0"),
    (TEXT, "validation_share", 0.9, "0.0001 to 0.5"),
    (WATCH, "watchdog_secs", 0, "1.0 to 1000000000.0"),
    (PODS, "pod_timeout_secs", 0, "1.0 to 1000000.0"),
    (DECODE, "temperature", -1, "0.0 to 100.0"),
    (DECODE, "top_p", 1.1, "0.0 to 1.0"),
    (CHIP, "chip_memory_bytes", "32 GB", "0 to 1e+30"),
    (CHIP, "chip_watts", -1, "0 to 1e+30"),
  ],
)
def test_a_number_out_of_bounds_is_named_with_them(
  settings, name, value, bounds
):
  assert refusal(settings, **{name: value}).startswith(
    f"{name.upper()} = {value!r}: give a number from {bounds}"
  )


WHOLE = "give a whole number of at least 1."
GLOBS = "give a glob or a list of globs, such as '\"/any/folder/**/*.txt\"'."
GLOBS_OR_NONE = "give a glob, a list of globs, or None."
LIST = "give a list of texts, or [] for none."
BOTH = "set both of them, or neither"
PATTERNS, GROUPS = "answer_patterns", "category_groups"


@pytest.mark.parametrize(
  ("settings", "changes", "rule"),
  [
    (PALM, {"norm": "layernorm"}, '(did you mean "layer_norm"?): choose one'),
    (
      PALM,
      {"output_fan_in": "joined", "block": "serial"},
      'set OUTPUT_FAN_IN = "separate", or another BLOCK.',
    ),
    (PALM, {"d_kv": 7}, "rotary embedding turns pairs of numbers, so D_KV is"),
    (TEXT, {"text_files": []}, GLOBS),
    (TEXT, {"text_files": ["a", 3]}, GLOBS),
    (TEXT, {"vocabulary": 3}, "give the path of a vocabulary, or None to trai"),
    (RUN, {"prompts": "one"}, LIST),
    (RUN, {"prompts": ["a", ""]}, LIST),
    (RUN, {"sample_steps": 0}, WHOLE),
    (RUN, {"frozen": "embedding"}, "give a list of patterns of names of param"),
    (RUN, {"frozen": ["embedding", 7]}, "give a list of patterns of names of"),
    (
      RUN,
      {"keep_every_steps": 250, "checkpoint_steps": 100},
      "there is a checkpoint every CHECKPOINT_STEPS = 100 steps; give a "
      "multiple of that, such as 300, or None.",
    ),
    (RUN, {"init_checkpoint": ""}, "give the path of a checkpoint, a MODEL_DI"),
    (RUN, {"init_state": "all"}, "name it in INIT_CHECKPOINT."),
    (PODS, {"num_pods": 9}, "give a whole number of at most 8."),
    (PODS, {"client_address": "a:b:c"}, 'write "host" or "host:port", of this'),
    (
      PODS,
      {"client_address": "a:\u0661"},
      'write "host" or "host:port", of th',
    ),
    (PODS, {"manager": None}, 'give the address of a manager, "host:port", or'),
    (PODS, {"manager_tls": None}, "give the PREFIX of PREFIX.key and PREFIX.p"),
    (INSPECTION, {"inspect_steps": []}, "give a list of steps, such as [0, 10"),
    (FILTER, {"min_document_bytes": -1}, "give a whole number of at least 0."),
    (
      FILTER,
      {"max_document_bytes": 8, "min_document_bytes": 9},
      "give a whole number of at least 9.",
    ),
    (FILTER, {"decontaminate_tasks": "squad"}, "give a list of names of SeqIO"),
    (FILTER, {"decontaminate_files": []}, GLOBS_OR_NONE),
    (FILTER, {"quality_field": "q"}, f" and MIN_QUALITY = None: {BOTH}"),
    (FILTER, {"quality_field": None, "min_quality": 1}, BOTH),
    (FILTER, {"min_quality": "0.5", "quality_field": "q"}, "give a number fro"),
    (DECODE, {"top_k": 0}, WHOLE),
    (DECODE, {"top_p": 0}, "no token has a share of 0;"),
    (DECODE, {"repetition_penalty": 0}, "give a number from"),
    (DECODE, {"stop_strings": "."}, "give a list of texts, or []"),
    (DECODE, {"stop_strings": [""]}, "give a list of texts"),
    (
      DECODE,
      {"num_beams": 2, "num_samples": 3},
      "and NUM_SAMPLES = 3: beam search draws nothing",
    ),
    (DECODE, {"num_beams": 2, "top_k": 3}, "set NUM_BEAMS to 1 or TOP_K to No"),
    (DECODE, {"num_beams": 2, "stop_strings": ["."]}, "and STOP_STRINGS = ('."),
    (
      DECODE,
      {"num_samples": 2, "temperature": 0},
      "and TEMPERATURE = 0: all samples would be the same",
    ),
    (CHIP, {"chip_devices": 0}, "give a number above 0."),
    (CHIP, {"chip_efficiency": 1.5}, "a share, at most 1."),
    (CHIP, {"chip_efficiency": None}, "give a number"),
    (
      CHIP,
      {"chip_pass_bandwidths": {"float32": {"blocks": 0}}},
      "give bytes/s by dtype and kind",
    ),
    (CHIP, {"chip_pass_bandwidths": 5e9}, "give bytes/s by dtype and kind"),
    (TASKS, {"eval_tasks": "mine"}, "give a list of names of"),
    (TASKS, {"eval_split": None}, "give the name of a split"),
    (TASKS, {"eval_examples": 0}, "give a whole number"),
    (TASKS, {PATTERNS: "The answer"}, "give texts by task, such as {"),
    (TASKS, {PATTERNS: {"a": "is (.*"}}, "'is (.*' of a: not a regular expr"),
    (TASKS, {PATTERNS: {"a": "(is|of) (.*)"}}, "of a: has 2 groups; put the"),
    (TASKS, {GROUPS: {"mmlu": ["law"]}}, "give lists of categories by group"),
    (TASKS, {GROUPS: {"mmlu": {"law": "a"}}}, "give lists of categories by gr"),
    (TASKS, {"eval_checkpoints": "newst"}, '(did you mean "newest"?)'),
    (TASKS, {"eval_checkpoints": []}, "or a list of steps, such as [1000, 200"),
    (TASKS, {"eval_checkpoints": [True]}, "give"),
    (TASKS, {"clean_subset": "yes"}, "give True or False."),
    (TASKS, {"eval_wait_secs": -1}, "give a number"),
    (TASKS, {"task_eval_steps": 5}, "no task is given; name tasks"),
    (TASKS, {"task_eval_steps": 0, "eval_tasks": ["a"]}, "give a whole number"),
    (SHOTS, {"num_shots": -1}, "give a whole number of at least 0"),
    (SHOTS, {"exemplars": "frist"}, '(did you mean "first"?)'),
    (SHOTS, {"exemplar_files": "a.txt"}, "give texts by"),
    (SHOTS, {"exemplar_files": {"a": ""}}, "give texts"),
    (SHOTS, {"prompt_headers": {"a": 1}}, "give texts by"),
  ],
)
def test_a_wrong_setting_is_one_line_with_its_value_and_the_rule(
  settings, changes, rule
):
  message = refusal(settings, **changes)
  name, value = next(iter(changes.items()))
  values = f" = {value!r}", f' = "{value}"', ": "
  assert message.startswith(tuple(f"{name.upper()}{x}" for x in values))
  assert rule in message


@pytest.mark.parametrize(
  "steps",
  [20, None, "[1]", [0], [3], [1, 3], [True], [1.0], [[1, 2]], [1] * 11],
)
def test_steps_that_cannot_be_traced_are_refused(steps):
  assert refusal(RUN, trace_steps=steps) == (
    f"TRACE_STEPS = {steps!r}: give a list of at most 10 steps from 1 to "
    "TRAIN_STEPS = 2, such as [1], or [] for none."
  )


@pytest.mark.parametrize(
  ("settings", "given"),
  [
    ({"quality_field": "q", "min_quality": 0}, "QUALITY_FIELD = 'q'"),
    ({"attribute_filters": ["a/b >= 1"]}, "ATTRIBUTE_FILTERS = ('a/b >= 1',)"),
  ],
)
def test_fields_and_attributes_are_of_text_files(settings, given):
  filters = FilterConfig(**settings)
  said = refusal(TEXT, task="some", text_files=None, filters=filters)
  assert said.startswith(f"{given}: is for TEXT_FILES; let a preproc")


@pytest.mark.parametrize(
  ("schedule", "steps"), [("cosine", None), ("palm", 100), ("constant", 100)]
)
def test_a_cosine_and_no_other_schedule_has_a_length(schedule, steps):
  changes = {"learning_rate_decay_steps": steps}
  said = refusal(ADAFACTOR, learning_rate_schedule=schedule, **changes)
  assert "LEARNING_RATE_DECAY_STEPS = " in said


def test_the_defaults_are_the_paper_on_one_pod():
  names = "norm", "block", "attention", "activation_dtype"
  assert [getattr(PALM, name) for name in names] == [
    *("layer_norm", "parallel", "multi_query", "bfloat16")
  ]
  assert (
    ADAFACTOR.learning_rate_schedule,
    ADAFACTOR.second_moment,
    ADAFACTOR.parameter_scale,
    ADAFACTOR.weight_decay_on,
    ADAFACTOR.norm_scale,
  ) == ("palm", "full", "variable", "all", "zero_centered")
  assert PODS.num_pods == 1


def test_defaults_remove_nothing_and_any_filter_is_seen():
  assert not FilterConfig().removes
  assert not FilterConfig(decontaminate_tasks=[]).removes
  assert FilterConfig(decontaminate_tasks=["squad"]).removes
  assert FilterConfig(min_document_bytes=1).removes
  assert FilterConfig(remove_duplicates="exact").removes


def test_a_temperature_near_0_is_greedy():
  assert DecodeConfig(temperature=1e-4).is_greedy
  assert not DecodeConfig(temperature=1e-3).is_greedy


def test_a_task_keeps_its_form_unless_a_setting_names_it():
  config = FewShotConfig(
    exemplar_files={"a": "a.txt"}, prompt_headers={"b": "B:"}
  )
  assert [config.changes(name) for name in "abc"] == [True, True, False]
  assert FewShotConfig(num_shots=0).changes("c")
