# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a command says to people: one line on stderr; stdout is for results."""

import sys


def say(line: str) -> None:
  """Writes one line of the program's own to stderr."""
  print(f"palm_mtf: {line}", file=sys.stderr, flush=True)
