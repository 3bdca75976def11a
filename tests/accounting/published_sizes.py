# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Published models, from gin/models, and their numbers of parameters."""

import dataclasses
import math

from palm_mtf.architecture.parameters import parameter_shapes, parse_name
from palm_mtf.cli.gin_folder import gin_folder
from palm_mtf.cli.gin_statements import read_file
from palm_mtf.config import ModelConfig


def preset(name: str) -> ModelConfig:
  """Returns the model of gin/models/NAME.gin."""
  settings = read_file(gin_folder() / "models" / f"{name}.gin")
  return ModelConfig(**{x.name.lower(): x.value for x in settings})


# The three models of PaLM Table 1, without recomputation.
PALM_8B, PALM_62B, PALM_540B = (
  dataclasses.replace(preset(f"palm_{size}"), remat="none")
  for size in ("8b", "62b", "540b")
)


def count_all(config: ModelConfig) -> int:
  """Returns the number of elements in all parameters, without states."""
  shapes = parameter_shapes(config).items()
  return sum(
    math.prod(x) for name, x in shapes if not parse_name(name).is_state
  )


def count_norm_scales(config: ModelConfig) -> int:
  """Returns the number of elements in all norm scales."""
  return sum(
    math.prod(shape)
    for name, shape in parameter_shapes(config).items()
    if parse_name(name).is_scale
  )
