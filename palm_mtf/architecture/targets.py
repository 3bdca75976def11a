# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks which kernels an adapter changes."""

import fnmatch

from palm_mtf.architecture.block import Experts, model_of
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError, did_you_mean


def check_targets(config: ModelConfig) -> None:
  """Raises UserError if a pattern matches no kernel, or one of experts."""
  branches = [x for each in model_of(config).kinds for x in each.layer.branches]
  for pattern in config.adapter_targets:
    given, found = f"ADAPTER_TARGETS = {list(config.adapter_targets)!r}", False
    for branch in branches:
      for each in (*branch.inputs, branch.output):
        if fnmatch.fnmatchcase(each.part, pattern):
          found = True
          if isinstance(branch.mixer, Experts):
            raise UserError(
              f'{given}: "{pattern}" matches {each.part}, and a token uses '
              "only some experts, whose kernels have no adapters; name "
              'other kernels, such as "attention/*".'
            )
    if not found:
      parts = [x.part for y in branches for x in (*y.inputs, y.output)]
      raise UserError(
        f'{given}: no kernel of a layer matches "{pattern}"'
        f"{did_you_mean(pattern, parts)}; kernels: "
        f"{', '.join(dict.fromkeys(parts))}."
      )
