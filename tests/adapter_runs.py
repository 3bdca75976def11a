# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that continue from the weights of another run, or adapt it."""

import pathlib

from palm_mtf.config import ModelConfig
from tests import runs

LORA = {
  "ADAPTER_RANK": 4,
  "ADAPTER_ALPHA": 8.0,
  # As the optimizer scales updates by parameters, and B begins as 0.
  "PARAMETER_SCALE_FLOOR": 0.5,
}
VIRTUAL = {"ADAPTER_LENGTH": 5}
# {kind of adapter: settings of its runs}
KINDS = {
  kind: {"ADAPTER": kind, **more}
  for kinds, more in ((("lora", "dora"), LORA), (("prefix", "prompt"), VIRTUAL))
  for kind in kinds
}


def train(base: pathlib.Path, model_dir: pathlib.Path, **macros: object) -> int:
  """Trains from the weights of a run, with its settings and `macros`.

  Returns the exit code.
  """
  values = {
    "MODEL_DIR": str(model_dir),
    "INIT_CHECKPOINT": str(base),
    "VOCABULARY": str(base / "vocabulary.model"),
    "TRAIN_STEPS": 8,
    "EVAL_STEPS": 8,
    "PROMPTS": [],
    **macros,
  }
  flags = [f"--gin.{name}={value!r}" for name, value in values.items()]
  return runs.main(["train", f"--gin_file={base}/config.gin", *flags])


def model_config(**macros: object) -> ModelConfig:
  """Returns the model of the runs, or of a run with `macros`."""
  names = {x.upper() for x in ModelConfig.__dataclass_fields__}
  settings = {**runs.SETTINGS, **macros}
  return ModelConfig(
    **{x.lower(): y for x, y in settings.items() if x in names}
  )
