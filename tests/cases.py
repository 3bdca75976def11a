# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases of parametrized tests."""

import pytest


def slow(*case: object, unless: bool = False) -> object:
  """Returns a case that only `make test-slow` runs, unless told otherwise."""
  return pytest.param(*case, marks=() if unless else pytest.mark.slow)
