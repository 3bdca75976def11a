# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What decode(encode(text)) of a vocabulary changes."""

import string
from collections.abc import Callable

# {what decode(encode(text)) may change: a text that shows it}. Losses are found
# by trying, not by settings of the model, and so in a model of any make.
_PROBES = {
  "spaces at both ends": "  a  ",
  "runs of spaces": "a    b",
  "tabs": "\ta\t\tb",
  "line ends": "a\n\nb\r\nc\n",
  "control characters": "a\x00b\x1fc\x7f",
  "the order of combining marks": "e\u0301 \u00e9",
  "compatibility characters": "\ufb01 \uff21 \u212b \u00b2",
  "U+2581": "a\u2581b",
  "rare characters": "\U0001f469\u200d\U0001f467 \u0645\u202e\ue000\U0010fffd",
}
# Each between two letters, so that no rule about the ends of a text is meant.
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation


def find_losses(round_trip: Callable[[str], str]) -> list[str]:
  """Returns what a vocabulary changes; nothing where it is lossless.

  Args:
    round_trip: returns the text that encoding and decoding makes of a text.
  """
  found = [name for name, text in _PROBES.items() if round_trip(text) != text]
  lost = [c for c in _CHARACTERS if c not in round_trip(f"a{c}b")]
  return [*found, *([f"the characters {' '.join(lost)}"] if lost else [])]
