# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lets the program of a bench take a turn for each line of its stdin.

Imports only the standard library, because peers run in other environments.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping


def take_turns(
  turn: Callable[[], Mapping[str, float]], facts: Mapping[str, object]
) -> None:
  """Takes a turn for each line of stdin; prints its seconds and its values.

  Args:
    turn: takes a warm turn; returns numbers to report. If it returns "secs",
      they replace the seconds of the whole turn.
    facts: values to print before the first turn.
  """
  print(json.dumps(facts), flush=True)
  for _ in sys.stdin:
    start = time.perf_counter()
    values = turn()
    secs = time.perf_counter() - start
    print(json.dumps({"secs": secs, **values}), flush=True)
