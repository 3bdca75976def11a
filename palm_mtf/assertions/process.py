# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that calls an assertion of the user, which may hang or exit."""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from palm_mtf.errors import did_you_mean
from palm_mtf.machine.helper_process import HelperError, answer_questions
from palm_mtf.user_code import describe


class _Process:
  """Finds the function in the first request; later requests call it."""

  _function: Callable[[str, str], float] | None = None

  def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
      if self._function is None:
        self._find(*asked["name"].rsplit(".", 1))
        return {}
      found = self._function(asked["inputs"], asked["outputs"])
      if not 0 <= (severity := float(found)) < math.inf:
        raise HelperError(f"returns {found!r}, no number of at least 0")
      return {"severity": severity}
    except HelperError:
      raise
    except BaseException as error:  # SystemExit too
      raise HelperError(describe(error)) from None

  def _find(self, module: str, name: str) -> None:
    names = vars(importlib.import_module(module))
    if not callable(names.get(name)):
      guess = did_you_mean(name, [x for x in names if callable(names[x])])
      raise HelperError(f"{module} has no function {name!r}{guess}")
    inspect.signature(names[name]).bind("", "")  # raises TypeError
    self._function = names[name]


if __name__ == "__main__":
  answer_questions(_Process().answer, most_bytes=2**40, cpu_secs=600)
