# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases of parametrized tests, and marks of tests."""

import importlib.util

import pytest

# T5's import takes seconds and a gigabyte, so only tests of T5 import it.
needs_t5 = pytest.mark.skipif(
  importlib.util.find_spec("t5") is None,
  reason="T5 is not installed; `make test` installs it",
)


def slow(*case: object, unless: bool = False) -> object:
  """Returns a case that only `make test-slow` runs, unless told otherwise."""
  return pytest.param(*case, marks=() if unless else pytest.mark.slow)
