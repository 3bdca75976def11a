# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The turns of a program of a bench: one for each line of its stdin.

It imports the standard library alone: peers run in environments of their own.
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
    turn: work of a turn, warm; returns numbers to report. "secs" among them
      are those that count, in place of all of the turn's.
    facts: printed before the first turn.
  """
  print(json.dumps(facts), flush=True)
  for _ in sys.stdin:
    start = time.perf_counter()
    values = turn()
    secs = time.perf_counter() - start
    print(json.dumps({"secs": secs, **values}), flush=True)
