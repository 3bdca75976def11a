# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the settings of a plan from a recipe and macros."""

from palm_mtf.cli import gin_files
from palm_mtf.commands.plan import check_settings
from palm_mtf.config import PlanConfig


def plan_config(*files: str, **macros: object) -> PlanConfig:
  """Returns the checked settings of gin files; macros override the files."""
  given = [f"{name}={value!r}" for name, value in macros.items()]
  return check_settings(gin_files.load("plan", files, given).build()[1])


def palm_540b(**macros: object) -> PlanConfig:
  """Returns PaLM 540B on two pods of 3,072 TPU v4."""
  return plan_config("recipes/palm_540b_two_pods.gin", **macros)
