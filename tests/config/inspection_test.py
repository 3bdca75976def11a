# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of `data inspect` and `data statistics` refuse wrong values."""

import pytest

from palm_mtf.config import InspectionConfig
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (
      {"inspect_steps": []},
      "INSPECT_STEPS = []: give a list of steps, such as [0, 1000].",
    ),
    (
      {"inspect_steps": [-1]},
      "INSPECT_STEPS = -1: give a whole number of at least 0.",
    ),
    (
      {"inspect_rows": 0.5},
      "INSPECT_ROWS = 0.5: give a whole number of at least 0.",
    ),
    (
      {"overlap_files": [3]},
      "OVERLAP_FILES = [3]: give a glob, a list of globs, or None.",
    ),
  ],
)
def test_a_wrong_value_is_named_with_its_macro(settings, message):
  with pytest.raises(UserError) as error:
    InspectionConfig(**settings)
  assert str(error.value) == message
