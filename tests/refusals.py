# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages of wrong calls, for the tests."""

from collections.abc import Callable

import pytest

from palm_mtf.errors import UserError


def message_of(function: Callable, *arguments: object, **named: object) -> str:
  """Returns the line with which a call refuses to work."""
  with pytest.raises(UserError) as error:
    function(*arguments, **named)
  assert "\n" not in str(error.value)
  return str(error.value)
