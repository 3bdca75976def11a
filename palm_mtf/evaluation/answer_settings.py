# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings that a checkpoint's answers to examples depend on.

Every setting counts, also one that is added later, unless it is listed here
with the reason why no answer depends on it. Answers that were kept under other
settings are asked again (answers.AnswerJournal).
"""

from palm_mtf.config import Config
from palm_mtf.config.macros import values_of

# {why no answer depends on these macros: macros}
INDEPENDENT = {
  "the hash of the checkpoint stands for what training made": """
    OUTPUT_FAN_IN
    TEXT_FILES TASK TEXT_FIELD WEIGHT_FIELD VALIDATION_SHARE CACHE_DIR
    NOISE_DENSITY MEAN_SPAN_LENGTH DECONTAMINATE_TASKS DECONTAMINATE_FILES
    MIN_DOCUMENT_BYTES MAX_DOCUMENT_BYTES QUALITY_FIELD MIN_QUALITY
    REMOVE_DUPLICATES
    LEARNING_RATE BETA1 BETA2_EXPONENT UPDATE_CLIP GRADIENT_CLIP
    WEIGHT_DECAY_EXPONENT Z_LOSS DROPOUT LEARNING_RATE_SCHEDULE
    LEARNING_RATE_DECAY_STEPS SECOND_MOMENT MOMENTUM_DTYPE PARAMETER_SCALE
    PARAMETER_SCALE_FLOOR WEIGHT_DECAY_ON NORM_SCALE
    TRAIN_STEPS GLOBAL_BATCH_SIZE NUM_MICROBATCHES GRADIENT_DTYPE STEPS_PER_LOOP
    INIT_CHECKPOINT INIT_STATE
    NUM_PODS PODS ISLANDS CLIENT_ADDRESS DCN_DTYPE FINGERPRINT_STEPS
    POD_TIMEOUT_SECS ON_POD_FAILURE POD_WAIT_SECS
    SKIP_STEPS SPIKE_POLICY SPIKE_SKIP_STEPS SPIKE_REWINDS WATCHDOG_SECS""",
  "the hash of the vocabulary stands for its file": "VOCABULARY",
  "the fingerprint of the examples stands for their ids": """
    EVAL_TASKS EVAL_SPLIT EVAL_EXAMPLES NUM_SHOTS EXEMPLARS EXEMPLAR_FILES
    PROMPT_HEADERS""",
  "each checkpoint has its own answers, whenever they are asked": """
    EVAL_CHECKPOINTS EVAL_WAIT_SECS TASK_EVAL_STEPS""",
  "metrics are computed from answers": """
    ANSWER_PATTERNS CATEGORY_GROUPS CLEAN_SUBSET""",
  "other commands read it, or what training writes besides checkpoints": """
    LOG_STEPS EVAL_STEPS EVAL_BATCHES CHECKPOINT_STEPS KEEP_CHECKPOINTS
    KEEP_EVERY_STEPS SAMPLE_STEPS TRACE_STEPS PROMPTS STRIDE
    INSPECT_STEPS INSPECT_ROWS OVERLAP_FILES""",
  "plans and MFU are computed from the rates of devices": """
    CHIP CHIP_BFLOAT16_FLOPS CHIP_FLOAT32_FLOPS CHIP_EFFICIENCY CHIP_DEVICES
    CHIP_MEMORY_BYTES CHIP_MEMORY_BANDWIDTH CHIP_PASS_BANDWIDTHS
    CHIP_PROCESS_BYTES CHIP_FUSED_ATTENTION CHIP_LINK_BANDWIDTH CHIP_LINK_DIMS
    CHIP_LINK_CHIPS CHIP_DCN_BANDWIDTH CHIP_WATTS CHIP_HOUR_COST""",
}


def answer_settings(config: Config) -> dict[str, object]:
  """Returns the settings that answers depend on, by macro."""
  independent = set(" ".join(INDEPENDENT.values()).split())
  return {
    name: value
    for name, value in values_of(config).items()
    if name not in independent
  }
