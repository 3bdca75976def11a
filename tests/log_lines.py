# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The log lines that a test finds on stderr, whatever the clock says."""

import re

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def without_stamps(text: str) -> str:
  """Returns what was written to stderr, each log line without its time."""
  return re.sub(f"^{STAMP}(?=palm_mtf: )", "", text, flags=re.MULTILINE)
